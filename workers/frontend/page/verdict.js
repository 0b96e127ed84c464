// The one line that says how the cluster is: the worst first.
import { count, share, span } from "/page/dom.js";

const LOST_S = 60;

export function verdict(view) {
  const found = [], nodes = view.nodes || [], recent = view.recent || {}, arrived = recent.arrived || 0;
  const bad = (text) => found.push([2, text]), warn = (text) => found.push([1, text]);
  const ready = (role) => nodes.filter((node) => node.role === role && node.state === "ready" && !node.no_attention).length;
  const nowhere = nodes.filter((node) => node.no_attention);
  if (view.problem) bad("New requests are refused: " + view.problem);
  if (!view.caught_up) bad("The conductor is still reading the log");
  const mixed = ready("mixed"), known = nodes.some((node) => node.role === "mixed");
  if (!mixed) for (const role of ["prefill", "decode"]) if (!ready(role)) {
    bad("Not serving: " + (role === "decode" && nowhere.length ? nowhere[0].no_attention : "no " + role + (known ? " and no mixed" : "") + " worker is ready"));
  }
  if (mixed || ready("decode")) for (const node of nowhere) warn(node.id + " decodes nothing new: " + node.no_attention);
  const rejected = Object.values(recent.rejected || {}).reduce((sum, n) => sum + n, 0);
  if (rejected) {
    const [reason] = Object.entries(recent.rejected).sort((a, b) => b[1] - a[1])[0];
    (rejected > arrived / 10 ? bad : warn)(share(rejected, Math.max(arrived, rejected)) + " of requests rejected, mostly " + reason);
  }
  if (recent.failed) (recent.failed > arrived / 20 ? bad : warn)(count(recent.failed) + (recent.failed === 1 ? " request" : " requests") + " failed");
  for (const [spread, name, slo_ns] of [[view.ttft, "TTFT", view.ttft_slo_ns], [view.tbt, "TBT", view.tbt_slo_ns]]) {
    const finished = spread?.finished || 0, met = spread?.met || 0;
    if (finished && met < finished * 0.99) (met < finished * 0.9 ? bad : warn)(share(met, finished) + " of requests met the " + name + " SLO (" + span(slo_ns / 1000) + ")");
  }
  for (const node of nodes) {
    if (node.state === "suspected") warn(node.id + "'s store is suspected");
    if (node.exact_numerics === "not_held") warn("Exact numerics: not held on " + node.id + "'s CPU");
    if (node.state === "draining") warn(node.id + " is draining");
  }
  for (const lost of (view.happened || []).filter((h) => h.kind === "lost" && view.at_ns - h.at_ns < LOST_S * 1e9)) {
    warn(lost.words + " (" + Math.round((view.at_ns - lost.at_ns) / 1e9) + " s ago)");
  }
  const waiting = view.stages?.waiting || 0;
  if (waiting) warn(count(waiting) + (waiting === 1 ? " request waits" : " requests wait") + " for a worker");
  found.sort((a, b) => b[0] - a[0]);
  const pools = ["prefill", "decode", "attention"].filter((role) => role !== "attention" || ready(role));
  const pair = pools.map((role) => count(ready(role)) + " " + role).join(", ").replace(/, ([^,]*)$/, " and $1") + " workers";
  const workers = (mixed ? count(mixed) + " mixed" + (ready("prefill") + ready("decode") ? ", " + pair : " workers") : pair) + " ready";
  if (found.length) {
    const rest = found.slice(1, 4).map(([, text]) => text);
    if (found.length > 4) rest.push(found.length - 4 + " more");
    return { level: found[0][0] === 2 ? "bad" : "warn", headline: found[0][1], more: rest.join(" · ") || workers };
  }
  if (!arrived && !Object.values(view.stages || {}).some(Boolean)) return { level: "good", headline: "Ready", more: workers + ", no request in the last minute" };
  return { level: "good", headline: "Healthy", more: workers + ", nothing lost, nothing rejected in the last minute" };
}
