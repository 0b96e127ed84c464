// Who was rejected and why, what happened to processes, and the tail of the event log with its filter.
import { $, ago, clock, count, h, request, rows, say, span } from "/page/dom.js";

const KEPT = 300, SHOWN = 80, BEATS = /Heartbeat$|^TimerFired$|^StateDigested$/;
let kept = [], passed = 0, paused = false;

export function listenEvents() {
  $("filter").addEventListener("submit", (event) => event.preventDefault());
  $("words").addEventListener("input", render);
  $("beats").addEventListener("change", render);
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    say($("pause"), paused ? "Go on" : "Pause");
    render();
  });
}

export function showEvents(view) {
  if (kept.length && view.seq < kept[0].seq) kept = []; // another log
  const newest = kept.length ? kept[0].seq : 0;
  kept = [...(view.events || []).filter((event) => event.seq > newest).reverse(), ...kept].slice(0, KEPT);
  passed += view.events_left_out || 0;
  render();
  refusals(view);
  happened(view);
}

function render() {
  if (paused) return;
  const words = $("words").value.toLowerCase().split(/\s+/).filter(Boolean), beats = $("beats").checked;
  const fits = (event) => {
    if (!beats && BEATS.test(event.kind)) return false;
    const text = (event.kind + " " + (event.words || "")).toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const found = kept.filter(fits);
  rows($("events"), found.slice(0, SHOWN), (event) => event.seq, line);
  $("events").classList.toggle("none", !found.length);
  say($("log-facts"), passed ? "a sample: " + count(passed) + " more passed" : "newest first");
}

function line(event) {
  return h("li", {}, h("time", {}, clock(event.at_ns)), h("b", {}, event.kind), event.request_id ? request(event.request_id) : null, h("span", {}, without(event)));
}

// The request is a link already.
const without = (event) => (event.words || "").replace("request_id=" + event.request_id + " ", "");

function refusals(view) {
  const recent = view.recent?.rejected || {}, all = view.counts?.rejected || {};
  const failed = view.counts?.failed ? [["failed", view.recent?.failed || 0, view.counts.failed]] : [];
  const reasons = [...Object.entries(all).map(([reason, n]) => [reason, recent[reason] || 0, n]), ...failed].sort((a, b) => b[1] - a[1] || b[2] - a[2]);
  rows($("reasons"), reasons, ([reason]) => reason, ([reason]) => h("li", {}, h("span", {}, reason), h("b"), h("em")), (row, [, lately, n]) => {
    say(row.children[1], count(lately));
    say(row.children[2], count(n));
    row.classList.toggle("some", lately > 0);
  });
  $("reasons").classList.toggle("none", !reasons.length);
  const refused = [...(view.refused || [])].reverse().slice(0, 8);
  rows($("refused"), refused, (one) => one.request_id + one.at_ns, (one) => h("li", {}, h("time", {}, clock(one.at_ns)), request(one.request_id), h("b", {}, one.reason), h("span", {}, predicted(one))));
}

function predicted(one) {
  const parts = [];
  if (one.ttft_ns) parts.push("predicted first token " + span(one.ttft_ns / 1000));
  if (one.tbt_ns) parts.push("between tokens " + span(one.tbt_ns / 1000));
  return parts.join(", ") || one.message;
}

function happened(view) {
  const lately = [...(view.happened || [])].reverse().slice(0, 8);
  rows($("happened"), lately, (one) => one.seq + one.words, (one) => h("li", { class: "h-" + one.kind }, h("i"), h("span", {}, one.words), h("time")), (row, one) => {
    say(row.lastChild, ago((view.at_ns - one.at_ns) / 1e9));
    row.lastChild.title = clock(one.at_ns);
  });
  $("happened").classList.toggle("none", !lately.length);
}
