// Requests in flight: how many are in each stage, and some of them one by one, each a bar of what its time was spent on.
import { $, clock, count, h, request, rows, say, span } from "/page/dom.js";

export const STAGES = [["waiting", "waiting"], ["queued", "queued"], ["transfer", "transfer"], ["prefill", "prefill"], ["handover", "handover"], ["decode", "decode"]];
const MEANS = {
  waiting: "no worker could take it yet", queued: "in the prefill worker's queue", transfer: "cached KV comes from another node or from SSD",
  prefill: "its prompt is computed", handover: "KV goes to the decode worker, which then takes it into its batch", decode: "tokens are generated",
};

export function showRequests(view) {
  const stages = view.stages || {}, all = Object.values(stages).reduce((a, b) => a + b, 0), followed = view.requests || [];
  rows($("stages"), STAGES, ([name]) => name, ([name, label]) => h("li", { class: "s-" + name, title: MEANS[name] }, h("b"), h("span", {}, label)), (row, [name]) => {
    say(row.firstChild, count(stages[name]));
    row.classList.toggle("some", !!stages[name]);
  });
  const open = followed.filter((one) => one.stage !== "ended").length;
  say($("flight-facts"), all > open ? "a sample: " + count(open) + " of " + count(all) + " in flight, and some that ended" : count(all) + " in flight, all shown");
  rows($("requests"), followed, (one) => one.request_id, make, (row, one) => update(row, one, view));
  $("requests").classList.toggle("none", !followed.length);
}

function make(one) {
  const parts = { stage: h("em"), way: h("span", { class: "way" }), bar: h("div", { class: "bar", "aria-hidden": "true" }), told: h("span", { class: "told" }) };
  const row = h("li", {}, h("div", { class: "line" }, request(one.request_id), parts.stage, parts.way, parts.told), parts.bar);
  row.parts = parts;
  return row;
}

function update(row, one, view) {
  const parts = row.parts, ended = one.stage === "ended";
  const stage = ended ? one.ending : one.stage;
  row.dataset.stage = stage;
  row.className = ended ? "ended" : "open";
  say(parts.stage, stage);
  parts.stage.className = "s-" + stage;
  const way = one.prefill_id ? one.prefill_id + " → " + one.decode_id : "";
  say(parts.way, way + (one.placements > 1 ? ", placed " + one.placements + " times" : ""));
  const until = ended ? one.end_ns : view.at_ns, took_us = Math.max(0, until - one.arrived_ns) / 1000;
  let told = count(one.prompt_tokens) + " tokens" + (one.cached_tokens ? ", " + count(one.cached_tokens) + " cached" : "");
  told = told + (one.similar_tokens ? ", " + count(one.similar_tokens) + " of a similar prompt" : "") + " · " + span(took_us);
  if (one.ttft_ns) told = told + " · TTFT " + span(one.ttft_ns / 1000) + late(one.ttft_ns, one.ttft_slo_ns) + (one.tbt_ns ? " · TBT " + span(one.tbt_ns / 1000) + late(one.tbt_ns, one.tbt_slo_ns) : "");
  say(parts.told, told);
  row.title = "arrived " + clock(one.arrived_ns) + (one.reason && one.ending !== "finished" ? ": " + one.reason : "");
  const stretches = one.stretches || [], begin = one.arrived_ns, whole = Math.max(1, until - begin);
  rows(parts.bar, stretches.map((stretch, i) => [i, ...stretch]), ([i, name]) => i + name, ([, name]) => h("i", { class: "s-" + name, title: name }), (part, [, name, from, to]) => {
    part.style.left = (100 * Math.max(0, from - begin)) / whole + "%";
    part.style.width = Math.max(0.4, (100 * (to - from)) / whole) + "%";
    part.title = name + " " + span((to - from) / 1000);
  });
}

const late = (took, slo) => (slo && took > slo ? " (over " + span(slo / 1000) + ")" : "");
