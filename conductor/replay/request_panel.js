// What the mouse and the keys do, and the story of the request that was clicked. All text goes in as text, never as markup.

// The bar under the mouse; among the arrivals the nearest request, of several one that went wrong.
function found(px, py) {
  if (px > LEFT && py > AXIS && py < AXIS + FLOW) {
    const r = RUN.requests;
    let best = -1, least = 4;
    for (let i = 0; i < r.at.length; i++) {
      const good = r.ending[i] === "finished" || r.ending[i] === "open", away = Math.abs(x(r.at[i]) - px) + (good ? 2 : 0);
      if (away < least) { best = i; least = away; }
    }
    return best < 0 ? null : { request: best };
  }
  for (let i = shapes.length - 1; i >= 0; i--) {
    const bar = shapes[i], [y, h] = place(bar);
    if (py < y - 1 || py > y + Math.max(h, 3)) continue;
    if (px >= x(bar.parts[0]) - 2 && px <= x(bar.parts[bar.parts.length - 1]) + 2) return bar;
  }
  return null;
}

function tip(px, py) {
  const box = $("tip"), bar = found(px, py);
  hovered = bar;
  canvas.classList.toggle("over", !!bar);
  let text = "";
  if (bar && !bar.parts) {
    const r = RUN.requests, i = bar.request;
    text = r.id[i] + "\n" + r.prompt[i] + " prompt tokens; " + r.ending[i] + "\n" + r.text[i];
  } else if (bar) {
    const r = RUN.requests, p = bar.parts, i = bar.request;
    const names = bar.role === "prefill" ? ["waited", "computed", "delivered"] : ["waited for KV", "decoded"];
    text = r.id[i] + "\n" + r.prompt[i] + " prompt tokens, order " + bar.order + "\n";
    text += p.slice(1).map((end, part) => (p.length === 2 && bar.role === "prefill" ? "there" : names[part]) + " " + span(end - p[part])).join(", ");
    if (bar.transfer) text += "\nloaded " + span(bar.transfer[1] - bar.transfer[0]);
    if (bar.lost) text += "\n" + bar.lost;
  } else {
    const near = RUN.happenings.find(([t, , lane]) => Math.abs(x(t) - px) < 5 && (lane < 0 ? py < AXIS + FLOW : py >= lanes[lane].y && py <= lanes[lane].y + lanes[lane].h));
    if (near) text = near[3] + "\nat " + span(near[0]);
  }
  box.hidden = !text;
  box.textContent = text;
  box.style.left = Math.min(px + 14, width - 300) + "px";
  box.style.top = py + 16 + "px";
}

// --- mouse and keys --------------------------------------------------------------------------------------------------

function listen() {
  let grip = null;
  const where = (e) => { const box = canvas.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
  canvas.addEventListener("wheel", (e) => {
    if (e.ctrlKey === false && e.shiftKey === false && Math.abs(e.deltaX) <= Math.abs(e.deltaY)) {
      e.preventDefault();
      const t = at(where(e)[0]), k = Math.exp(Math.max(-1, Math.min(1, e.deltaY / 240)));
      const size = Math.min(Math.max((to - from) * k, 20), 1.04 * RUN.meta.span), left = ((t - from) / (to - from)) * size;
      show(t - left, t - left + size);
    } else {
      e.preventDefault();
      const by = ((e.deltaX || e.deltaY) / (width - LEFT)) * (to - from);
      show(from + by, to + by);
    }
  }, { passive: false });
  canvas.addEventListener("pointerdown", (e) => {
    canvas.setPointerCapture(e.pointerId);
    grip = { x: e.clientX, from, to, moved: false };
  });
  canvas.addEventListener("pointermove", (e) => {
    if (!grip) return tip(...where(e));
    const by = e.clientX - grip.x;
    if (Math.abs(by) > 3) grip.moved = true;
    if (!grip.moved) return;
    canvas.classList.add("dragging");
    const shift = (-by / (width - LEFT)) * (grip.to - grip.from);
    show(grip.from + shift, grip.to + shift);
  });
  canvas.addEventListener("pointerup", (e) => {
    canvas.classList.remove("dragging");
    if (grip && !grip.moved) {
      const bar = found(...where(e));
      if (bar) pick(bar.request); else close();
    }
    grip = null;
  });
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  canvas.addEventListener("dblclick", () => show(0, RUN.meta.span));
  $("fit").onclick = () => show(0, RUN.meta.span);
  $("close").onclick = close;
  $("theme").onclick = () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches, root = document.documentElement;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    repaint();
    draw();
  };
  $("find").oninput = (e) => {
    const wanted = e.target.value.trim(), i = wanted ? RUN.requests.id.findIndex((id) => id === wanted || (wanted.length > 3 && id.endsWith(wanted))) : -1;
    e.target.classList.toggle("none", !!wanted && i < 0);
    if (i >= 0) { pick(i); reveal(i); }
  };
  document.addEventListener("keydown", (e) => {
    if (e.target.tagName === "INPUT") return;
    const size = to - from, middle = (from + to) / 2;
    const keys = {
      ArrowLeft: () => show(from - size / 4, to - size / 4), ArrowRight: () => show(from + size / 4, to + size / 4),
      "+": () => show(middle - size / 4, middle + size / 4), "-": () => show(middle - size, middle + size),
      "0": () => show(0, RUN.meta.span), Escape: close,
    };
    if (keys[e.key]) { keys[e.key](); e.preventDefault(); }
  });
  new ResizeObserver(layout).observe($("stage"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { repaint(); draw(); });
}

function reveal(i) {
  const a = RUN.requests.at[i], b = Math.max(RUN.requests.end[i], a + RUN.meta.span / 500);
  if (a < from || b > to || (b - a) / (to - from) < 0.02) show(a - 2 * (b - a), b + 2 * (b - a));
}

function close() {
  picked = -1;
  history.replaceState(null, "", location.pathname);
  $("side").hidden = true;
  draw();
}

// --- the story -------------------------------------------------------------------------------------------------------

function element(parent, tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  parent.appendChild(made);
  return made;
}

function table(parent, heads, rows) {
  const made = element(parent, "table"), head = element(made, "tr");
  heads.forEach((text) => element(head, "th", text));
  for (const [name, cells] of rows) {
    const row = element(made, "tr", undefined, name);
    cells.forEach((text) => element(row, "td", text));
  }
}

async function pick(i) {
  picked = i;
  history.replaceState(null, "", "#" + encodeURIComponent(RUN.requests.id[i]));
  const story = $("story"), r = RUN.requests;
  story.textContent = "";
  $("side").hidden = false;
  element(story, "h2", r.id[i]);
  element(story, "p", "arrived at " + span(r.at[i]) + " (event " + r.seq[i] + "), " + r.prompt[i] + " prompt tokens, at most " + r.max[i] + " more");
  const ending = r.ending[i], took = r.end[i] ? " after " + span(r.end[i] - r.at[i]) : "";
  element(story, "p", ending + took + (r.text[i] ? ": " + r.text[i] : ""), ending === "finished" || ending === "open" ? "said" : "bad");
  draw();
  WHY = WHY || (await unpacked("why"));
  if (picked !== i) return;
  for (const why of WHY[i]) explain(story, why);
  window.told = i;
}

// `why`: see `_why` in page.py.
function explain(story, why) {
  element(story, "h3", why.head);
  element(story, "p", why.verdict, why.refused ? "bad" : "said");
  table(story, ["prefill", "queue", "transfer", "prefill", "first token", "copies", "cached", "fetched", "why"], why.prefill);
  table(story, ["decode", "between tokens", "KV blocks", "reserved", "batch", "prefix", "why"], why.decode);
  for (const text of why.more) element(story, "p", text);
}

// --- start -----------------------------------------------------------------------------------------------------------

function legend() {
  const entries = [["wait", "queue"], ["compute", "prefill (chunks between gaps)"], ["transfer", "KV loaded from another node, by layer"],
    ["delivery", "delivery of the last layers"], ["kv", "decode waits for KV"], ["decode", "decode"], ["lost", "given up, lost, rejected"],
    ["good", "joined"], ["policy", "policy changed"]];
  for (const [colour, text] of entries) {
    const entry = element($("legend"), "span");
    element(entry, "i").style.background = "var(--" + colour + ")";
    entry.append(text);
  }
  const entry = element($("legend"), "span");
  const tick = element(entry, "i", undefined, "tick");
  tick.style.background = "var(--ink)";
  entry.append("KV of a layer ready");
  element($("legend"), "span", "— wheel: zoom, drag: move, click: why");
}

(async () => {
  const began = performance.now();
  RUN = await unpacked("run");
  const m = RUN.meta;
  $("facts").textContent = m.facts;
  lanes = RUN.lanes;
  for (const [role, list] of [["prefill", RUN.prefill], ["decode", RUN.decode]])
    for (const [request, order, lane, row, parts, transfer, chunks, marks, lost] of list)
      bars.push({ role, request, order, lane, row, parts, transfer, chunks, marks, lost });
  bars.sort((one, other) => one.parts[0] - other.parts[0]); // so that a row is drawn from left to right
  let slots = 0;
  for (const lane of lanes) { lane.first = slots; slots += lane.rows; }
  lanes.slots = slots;
  for (const bar of bars) bar.slot = lanes[bar.lane].first + bar.row;
  legend();
  repaint();
  from = -0.01 * m.span;
  to = 1.01 * m.span;
  layout();
  listen();
  window.loaded_ms = performance.now() - began;
  const wanted = RUN.requests.id.indexOf(decodeURIComponent(location.hash.slice(1)));
  if (wanted >= 0) { // run.html#REQUEST
    await pick(wanted);
    reveal(wanted);
  }
  document.documentElement.dataset.drawn = bars.length;
})();
