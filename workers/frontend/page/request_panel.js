// Why a request went where it went: opened from any link to a request, by its address, or by its id.
import { $, clock, count, h, span } from "/page/dom.js";

let key = () => "", shown = "";

export function listenStory(keyOf) {
  key = keyOf;
  window.addEventListener("hashchange", follow);
  $("story-close").addEventListener("click", () => $("story").close());
  $("story").addEventListener("click", (event) => { if (event.target === $("story")) $("story").close(); });
  $("story").addEventListener("close", () => {
    shown = "";
    if (location.hash) history.replaceState(null, "", location.pathname);
  });
  $("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const id = $("wanted").value.trim();
    if (id) location.hash = "request=" + encodeURIComponent(id.replace(/^(chat)?cmpl-/, ""));
  });
  follow();
}

function follow() {
  const found = /^#request=(.+)$/.exec(location.hash);
  if (found) open(decodeURIComponent(found[1]));
  else if ($("story").open) $("story").close();
}

async function open(id) {
  shown = id;
  $("story-title").textContent = "Request " + id;
  $("story-body").replaceChildren(h("p", { class: "wait" }, "Asking a conductor…"));
  if (!$("story").open) $("story").showModal();
  let parts;
  try {
    const headers = key() ? { authorization: "Bearer " + key() } : {};
    const response = await fetch("/page/explain?request=" + encodeURIComponent(id), { headers, cache: "no-store" });
    const told = await response.json();
    parts = response.ok ? story(told) : [h("p", { class: "bad" }, told.error.message)];
  } catch (problem) {
    parts = [h("p", { class: "bad" }, "The frontend does not answer: " + problem.message)];
  }
  if (shown === id) $("story-body").replaceChildren(...parts);
}

function story(told) {
  const one = told.request, ended = one.stage === "ended";
  const lines = told.text.split("\n"), last = lines[lines.length - 1];
  const parts = [
    h("p", {}, "Arrived " + clock(one.arrived_ns) + " (event " + count(told.seq) + "): " + count(one.prompt_tokens) + " prompt tokens, at most " + count(one.max_tokens) + " more."),
    h("p", { class: ended && one.ending !== "finished" ? "bad" : "said" }, ended ? last : "In flight: " + one.stage + ", as of event " + count(told.until_seq) + "."),
  ];
  if (one.stretches?.length) parts.push(spent(one.stretches));
  for (const grounds of told.grounds) {
    parts.push(h("h3", {}, grounds.verdict), h("p", { class: grounds.refused ? "bad" : "" }, grounds.head));
    parts.push(table("Prefill candidates", told.prefill_heads, grounds.prefill), table("Decode candidates", told.decode_heads, grounds.decode));
    for (const text of grounds.more) parts.push(h("p", {}, text));
  }
  if (!told.grounds.length) parts.push(h("p", {}, "The grounds of its placement were not noted."));
  const copy = h("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(told.text);
    copy.textContent = "Copied";
  } }, "Copy as text");
  if (navigator.clipboard) parts.push(copy);
  return parts;
}

function spent(stretches) {
  const total = stretches.reduce((sum, [, from, to]) => sum + to - from, 0) || 1;
  const list = h("ul", { class: "spent", "aria-label": "what its time was spent on" });
  for (const [name, from, to] of stretches) {
    const bar = h("i", { class: "s-" + name });
    bar.style.width = Math.max(1, (100 * (to - from)) / total) + "%";
    list.append(h("li", {}, h("span", {}, name), h("em", {}, span((to - from) / 1000)), h("u", {}, bar)));
  }
  return list;
}

function table(label, heads, lines) {
  const made = h("table", {}, h("caption", {}, label), h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head || "why")))));
  made.append(h("tbody", {}, ...lines.map(([name, cells]) => h("tr", { class: name }, ...cells.map((cell) => h("td", {}, cell))))));
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, made);
}
