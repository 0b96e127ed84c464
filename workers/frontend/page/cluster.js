// Nodes in their pools, how loaded and how full, and the links on which KVCache moves.
import { $, bytes, count, h, percent, rows, say, svg } from "/page/dom.js";

function meter(name) {
  const fill = h("i"), text = h("em");
  return { box: h("div", { class: "meter " + name.toLowerCase() }, h("span", {}, name), h("u", {}, fill), text), fill, text };
}

function set(parts, part, text, hot) {
  parts.fill.style.width = Math.min(100, Math.max(0, 100 * part)) + "%";
  parts.box.classList.toggle("hot", !!hot);
  say(parts.text, text);
}

// A node: its store agent, and its workers.
function nodesOf(view) {
  const loads = new Map((view.loads || []).map((load) => [load.worker_id, load.load])), nodes = new Map();
  const at = (id) => nodes.get(id) || nodes.set(id, { id, workers: [], tiers: {} }).get(id);
  for (const node of view.nodes || []) {
    if (node.role === "store") at(node.id).store = node;
    else if (node.role !== "frontend") at(node.node_id || node.id).workers.push({ ...node, load: loads.get(node.id) || 0 });
  }
  for (const tier of view.tiers || []) if (nodes.has(tier.node_id)) at(tier.node_id).tiers[tier.tier] = tier;
  const number = new Intl.Collator("en", { numeric: true });
  return [...nodes.values()].sort((a, b) => number.compare(a.id, b.id));
}

const roleOf = (node) => ["mixed", "attention", "decode"].find((role) => node.workers.some((worker) => worker.role === role)) || "prefill";
// Who attends stands below who decodes.
const COLUMNS = { prefill: ["prefill"], decode: ["decode", "mixed", "attention"] };

function make(node) {
  const card = h("article", { class: "node", "data-node": node.id });
  const parts = { load: meter("Load"), dram: meter("DRAM"), ssd: meter("SSD"), title: h("h4"), work: h("span", { class: "work" }), dot: h("i", { class: "dot" }) };
  card.append(h("div", { class: "name" }, parts.dot, parts.title), parts.work, parts.load.box, parts.dram.box, parts.ssd.box);
  card.parts = parts;
  return card;
}

function state(node) {
  if (node.workers.some((worker) => worker.state === "draining")) return "draining";
  if (node.store && node.store.state === "suspected") return "suspected";
  if (!node.workers.length) return "no worker";
  if (node.workers.some((worker) => worker.no_attention)) return "no attention";
  return "ready";
}

function update(card, node, view) {
  const parts = card.parts, how = state(node), sum = (name) => node.workers.reduce((all, worker) => all + (worker[name] || 0), 0);
  card.dataset.state = how;
  say(parts.title, node.id);
  const names = node.workers.map((worker) => worker.id).filter((id) => id !== node.id);
  say(parts.work, [names.join(", "), how === "ready" ? "" : how, count(sum("running")) + " running", count(sum("queued")) + " queued"].filter(Boolean).join(" · "));
  const role = roleOf(node), held = Math.floor((1000 * sum("kv_used")) / Math.max(1, sum("kv_total")));
  const load = role === "attention" ? held : Math.max(0, ...node.workers.map((worker) => worker.load));
  const word = { prefill: "queue against the TTFT SLO", decode: "step against the TBT SLO", attention: "its cache in use", mixed: "queue against the TTFT SLO" }[role];
  set(parts.load, load / 1000, percent(load, 1000), load > 800);
  parts.load.box.title = word;
  const dram = node.tiers.dram, ssd = node.tiers.ssd, size = view.block_bytes || 0;
  parts.dram.box.hidden = !dram || !dram.total;
  if (dram) set(parts.dram, (dram.used || 0) / Math.max(1, dram.total || 0), percent(dram.used || 0, dram.total), false);
  if (dram) parts.dram.box.title = count(dram.used) + " of " + count(dram.total) + " blocks, " + bytes((dram.used || 0) * size);
  parts.ssd.box.hidden = !ssd;
  if (ssd) {
    set(parts.ssd, 1, size ? bytes(ssd.used * size) : count(ssd.used), false);
    parts.ssd.box.title = count(ssd.used) + " blocks";
  }
}

export function showCluster(view) {
  const nodes = nodesOf(view), pools = { prefill: [], decode: [], mixed: [], attention: [] };
  for (const node of nodes) pools[roleOf(node)].push(node);
  for (const [column, roles] of Object.entries(COLUMNS)) {
    const shown = roles.filter((role) => role === column || pools[role].length);
    const members = shown.flatMap((role) => [{ id: " " + role, title: role, count: pools[role].length }, ...pools[role]]);
    rows($(column), members, (node) => node.id, (node) => (node.title ? h("h3", {}) : make(node)), (card, node) => {
      if (node.title) say(card, node.title + " · " + count(node.count));
      else update(card, node, view);
    });
    $(column).classList.toggle("many", members.length > 6 + shown.length);
  }
  const frontends = (view.nodes || []).filter((node) => node.role === "frontend");
  const facts = [count(frontends.length) + (frontends.length === 1 ? " frontend" : " frontends"), "policy " + view.policy, "admission " + view.admission];
  if (view.nodes_left_out) facts.push(count(view.nodes_left_out) + " processes not shown");
  say($("cluster-facts"), facts.join(" · "));
  showLinks(view);
}

// A link is as wide as it is busy, and moves while it moves.
export function showLinks(view) {
  const map = $("map").getBoundingClientRect(), wires = $("wires"), links = (view.links || []).slice(0, 24);
  wires.setAttribute("viewBox", `0 0 ${map.width} ${map.height}`);
  const places = new Map([...document.querySelectorAll(".node")].map((card) => [card.dataset.node, card]));
  const most = Math.max(1, ...links.map((link) => link.bytes_s || 0));
  const ends = (card) => {
    const box = card.getBoundingClientRect(), left = card.parentElement.id === "prefill";
    return { x: (left ? box.right : box.left) - map.left, y: box.top + box.height / 2 - map.top, left };
  };
  const gap = Math.max(16, $("decode").getBoundingClientRect().left - $("prefill").getBoundingClientRect().right);
  const drawn = links.filter((link) => places.has(link.source) && places.has(link.destination) && link.source !== link.destination);
  rows(wires, drawn, (link) => link.source + " " + link.destination, () => svg("path"), (path, link) => {
    const a = ends(places.get(link.source)), b = ends(places.get(link.destination));
    const bend = (end) => (end.left ? 1 : -1) * gap * (a.left === b.left ? 0.7 : 0.5);
    path.setAttribute("d", `M${a.x} ${a.y}C${a.x + bend(a)} ${a.y} ${b.x + bend(b)} ${b.y} ${b.x} ${b.y}`);
    path.setAttribute("stroke-width", (1.5 + 4 * Math.sqrt((link.bytes_s || 0) / most)).toFixed(1));
    path.setAttribute("class", (link.bytes_s ? "moving" : "idle") + (a.left === b.left ? " fetch" : ""));
  });
  rows($("moving"), links.slice(0, 6), (link) => link.source + " " + link.destination, () => h("li", {}, h("span"), h("em")), (row, link) => {
    say(row.firstChild, link.source + " → " + link.destination);
    say(row.lastChild, link.bytes_s ? bytes(link.bytes_s) + "/s" : bytes(link.moved_bytes) + "/min");
  });
}
