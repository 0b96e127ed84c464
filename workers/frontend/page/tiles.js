// The figures of the last minute, with the last two minutes as curves.
import { $, count, h, say, share, span, svg } from "/page/dom.js";

const WIDTH = 240, HEIGHT = 44, GAP = 12;
let tiles = null;

function tile(name, label) {
  const made = h("article", { class: "tile", "aria-label": label });
  const parts = { box: made, value: h("b"), unit: h("span", { class: "unit" }), note: h("p"), chart: svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }) };
  made.append(h("h3", {}, label), h("div", { class: "value" }, parts.value, parts.unit), parts.note, parts.chart);
  $("tiles").append(made);
  return parts;
}

function build() {
  tiles = {
    rate: tile("rate", "Requests"), ttft: tile("ttft", "First token (TTFT)"), tbt: tile("tbt", "Between tokens (TBT)"),
    hits: tile("hits", "Prompt tokens found"), refused: tile("refused", "Rejected"),
  };
}

// A curve; with `gaps`, 0 is a second in which nothing finished, and the curve goes on if that was not for long.
function line(values, most, gaps) {
  let path = "", open = false;
  let last = -GAP;
  values.forEach((value, i) => {
    if (gaps && !value) return;
    const x = ((i + 0.5) / values.length) * WIDTH, y = HEIGHT - 2 - (value / most) * (HEIGHT - 6);
    open = open && i - last < GAP;
    path += (open ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1) + (open ? "" : "h1");
    open = true;
    last = i;
  });
  return path;
}

// A stroke for each second that is not 0.
function strokes(values, most) {
  return values.map((value, i) => (value ? `M${(((i + 0.5) / values.length) * WIDTH).toFixed(1)} ${HEIGHT}V${(HEIGHT - 3 - (value / most) * (HEIGHT - 7)).toFixed(1)}` : "")).join("");
}

function draw(parts, curves, most, mark) {
  const made = curves.map(([values, name, gaps, filled]) => {
    const path = name === "refused" ? strokes(values, most) : line(values, most, gaps);
    return svg("path", { d: filled && path ? path + `L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z` : path, class: name });
  });
  if (mark && mark <= most) {
    const y = HEIGHT - 2 - (mark / most) * (HEIGHT - 6);
    made.push(svg("path", { d: `M0 ${y}H${WIDTH}`, class: "slo" }));
  }
  parts.chart.replaceChildren(...made);
}

const top = (...lists) => Math.max(1, ...lists.map((list) => list.reduce((a, b) => Math.max(a, b), 0)));

function slo(parts, spread, p50, p99, slo_ns) {
  const finished = spread?.finished || 0, slo_us = slo_ns / 1000;
  say(parts.value, finished ? span(spread.p99_us || 0) : "–");
  say(parts.unit, finished ? "p99" : "");
  parts.unit.classList.toggle("k-p99", finished > 0);
  if (!parts.note.firstChild) parts.note.append(h("span", { class: "k-p50" }), h("span"));
  say(parts.note.firstChild, finished ? "p50 " + span(spread.p50_us || 0) : "");
  say(parts.note.lastChild, finished ? " · " + share(spread.met || 0, finished) + " in SLO (" + span(slo_us) + ")" : "SLO " + span(slo_us));
  parts.box.classList.toggle("bad", finished > 0 && (spread.met || 0) < 0.9 * finished);
  parts.box.classList.toggle("warn", finished > 0 && (spread.met || 0) < 0.99 * finished);
  const most = top(p99, p50), shown = slo_us < 2 * most ? Math.max(most, slo_us) : most;
  draw(parts, [[p99, "p99", true], [p50, "p50", true]], shown * 1.05, slo_us);
}

export function showTiles(view) {
  if (!tiles) build();
  const s = view.series || {}, recent = view.recent || {}, empty = [];
  const arrived = s.arrived || empty, refused = (s.rejected || empty).map((n, i) => n + ((s.failed || empty)[i] || 0));
  const bad = [[refused.slice(0, -1), "refused"]];
  // The newest second is not over: it would always look like a fall.
  const lately = arrived.slice(-11, -1), rate = lately.length ? lately.reduce((a, b) => a + b, 0) / lately.length : 0;
  say(tiles.rate.value, rate >= 10 || rate === 0 ? count(rate) : rate.toFixed(1));
  say(tiles.rate.unit, "/s");
  const flying = Object.values(view.stages || {}).reduce((a, b) => a + b, 0);
  say(tiles.rate.note, count(flying) + " in flight · " + count(recent.finished) + " finished/min");
  draw(tiles.rate, [[arrived.slice(0, -1), "arrived", false, true], ...bad], top(arrived) * 1.05);
  slo(tiles.ttft, view.ttft, s.ttft_p50_us || empty, s.ttft_p99_us || empty, view.ttft_slo_ns || 0);
  slo(tiles.tbt, view.tbt, s.tbt_p50_us || empty, s.tbt_p99_us || empty, view.tbt_slo_ns || 0);
  hits(recent);
  const rejected = Object.values(recent.rejected || {}).reduce((a, b) => a + b, 0), all = recent.arrived || 0;
  say(tiles.refused.value, count(rejected));
  say(tiles.refused.unit, rejected ? share(rejected, Math.max(all, rejected)) : "");
  const reasons = Object.entries(recent.rejected || {}).sort((a, b) => b[1] - a[1]).map(([reason, n]) => reason + " " + count(n));
  if (recent.failed) reasons.push("failed " + count(recent.failed));
  if (recent.wasted_prefills) reasons.push("wasted prefills " + count(recent.wasted_prefills));
  say(tiles.refused.note, reasons.join(" · ") || "none in the last minute");
  tiles.refused.box.classList.toggle("bad", rejected > all / 10);
  tiles.refused.box.classList.toggle("warn", rejected > 0);
  draw(tiles.refused, bad, top(refused) * 1.05);
}

// By source: on the node itself, fetched from others, computed.
function hits(recent) {
  const prompt = recent.prompt_tokens || 0, local = recent.cached_local_tokens || 0, fetched = recent.cached_fetched_tokens || 0;
  say(tiles.hits.value, prompt ? share(local + fetched, prompt) : "–");
  say(tiles.hits.unit, prompt ? "of " + count(prompt) : "");
  say(tiles.hits.note, prompt ? "local " + share(local, prompt) + " · fetched " + share(fetched, prompt) + (recent.similar_tokens ? " · similar " + share(recent.similar_tokens, prompt) : "") : "no prompt in the last minute");
  const parts = [[local, "local"], [fetched, "fetched"], [Math.max(0, prompt - local - fetched), "computed"]];
  let x = 0;
  tiles.hits.chart.replaceChildren(...parts.map(([tokens, name]) => {
    const width = prompt ? (tokens / prompt) * WIDTH : 0, bar = svg("rect", { x, y: HEIGHT - 16, width, height: 12, class: name });
    x += width;
    return bar;
  }));
}
