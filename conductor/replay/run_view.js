"use strict";
// Draws one run on a canvas. Times are microseconds since the first event; RUN and WHY come compressed inside the page.
const $ = (id) => document.getElementById(id);
const canvas = $("view"), pen = canvas.getContext("2d");
const LEFT = 118, AXIS = 22, FLOW = 50, CURVE = 62, GAP = 5, ROWS_MAX = 48;
let RUN, WHY, lanes = [], bars = [], from = 0, to = 1, width = 0, height = 0, colours = {}, picked = -1, hovered = null;
let shapes = [];

async function unpacked(id) {
  const raw = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function span(us) {
  const v = Math.abs(us);
  if (v >= 6e7) return Math.floor(us / 6e7) + " min " + ((us % 6e7) / 1e6).toFixed(1) + " s";
  if (v >= 1e6) return (us / 1e6).toFixed(3) + " s";
  if (v >= 1e3) return (us / 1e3).toFixed(1) + " ms";
  return v ? us + " µs" : "0";
}

// --- layout ----------------------------------------------------------------------------------------------------------

function layout() {
  const stage = $("stage"), ratio = window.devicePixelRatio || 1;
  width = stage.clientWidth;
  const fixed = AXIS + FLOW + 3 * (CURVE + GAP) + GAP, rows = lanes.reduce((sum, l) => sum + Math.min(l.rows, ROWS_MAX), 0);
  const free = stage.clientHeight - fixed - lanes.length * GAP;
  const rowHeight = Math.max(2, Math.min(15, free / Math.max(1, rows)));
  let y = AXIS + FLOW + GAP;
  for (const lane of lanes) {
    lane.y = y;
    lane.h = Math.max(16, Math.min(lane.rows, ROWS_MAX) * rowHeight);
    y += lane.h + GAP;
  }
  height = Math.max(stage.clientHeight - 1, y + 3 * (CURVE + GAP));
  lanes.bottom = y;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw();
}

const x = (us) => LEFT + ((us - from) / (to - from)) * (width - LEFT);
const at = (px) => from + ((px - LEFT) / (width - LEFT)) * (to - from);

function place(bar) {
  const lane = lanes[bar.lane], h = Math.min(lane.h / lane.seen, 15);
  return [lane.y + bar.row * h, h];
}

function show(a, b) {
  const whole = RUN.meta.span, size = Math.min(Math.max(b - a, 20), whole * 1.04);
  const middle = (a + b) / 2;
  from = Math.min(Math.max(middle - size / 2, -0.02 * whole), 1.02 * whole - size);
  to = from + size;
  soon();
}

let waiting = false;
function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

// --- drawing ---------------------------------------------------------------------------------------------------------

function repaint() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "faint", "line", "band", "wait", "transfer", "compute", "delivery", "kv", "decode", "lost",
    "good", "policy", "pick", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]) colours[name] = style.getPropertyValue("--" + name);
}

function draw() {
  if (!RUN) return;
  const began = performance.now();
  pen.fillStyle = colours.paper;
  pen.fillRect(0, 0, width, height);
  pen.font = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  pen.textBaseline = "middle";
  grid();
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, AXIS, width - LEFT, height);
  pen.clip();
  flow();
  drawBars();
  happenings();
  curves();
  if (picked >= 0) outline();
  pen.restore();
  labels();
  window.drawn_ms = performance.now() - began;
}

function grid() {
  const step = nice((to - from) / Math.max(2, (width - LEFT) / 110));
  pen.strokeStyle = colours.line;
  pen.fillStyle = colours.faint;
  pen.textAlign = "center";
  for (const lane of lanes) {
    pen.fillStyle = colours.band;
    pen.fillRect(LEFT, lane.y, width - LEFT, lane.h);
  }
  pen.fillStyle = colours.faint;
  pen.beginPath();
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    const px = Math.round(x(t)) + 0.5;
    if (px < LEFT) continue;
    pen.moveTo(px, AXIS - 4);
    pen.lineTo(px, height);
    if (px < width - 24) pen.fillText(tickText(t, step), px, AXIS / 2);
  }
  pen.stroke();
}

function nice(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return power * [1, 2, 5, 10].find((m) => m * power >= rough);
}

function tickText(t, step) {
  if (t === 0) return "0";
  if (step >= 1e6) return t / 1e6 + " s";
  return step >= 1e3 ? (t / 1e6).toFixed(3) + " s" : (t / 1e3).toFixed(3) + " ms";
}

// Arrivals a pixel column (grey), and among them what was rejected, failed or cancelled (red).
function flow() {
  const columns = Math.ceil((width - LEFT) / 3), all = new Uint16Array(columns + 1), bad = new Uint16Array(columns + 1);
  const requests = RUN.requests;
  let most = 4;
  for (let i = 0; i < requests.at.length; i++) {
    const column = Math.floor((x(requests.at[i]) - LEFT) / 3);
    if (column < 0 || column > columns) continue;
    most = Math.max(most, ++all[column]);
    const ending = requests.ending[i];
    if (ending !== "finished" && ending !== "open") bad[column]++;
  }
  const scale = (FLOW - 14) / most, base = AXIS + FLOW - 2;
  pen.fillStyle = colours.faint;
  for (let c = 0; c <= columns; c++) if (all[c]) pen.fillRect(LEFT + 3 * c, base - all[c] * scale, 2.4, all[c] * scale);
  pen.fillStyle = colours.lost;
  for (let c = 0; c <= columns; c++) if (bad[c]) {
    const h = Math.max(3, bad[c] * scale);
    pen.fillRect(LEFT + 3 * c, base - h, 2.4, h);
  }
  pen.fillStyle = colours.faint;
  pen.textAlign = "right";
  pen.fillText("up to " + most, width - 6, AXIS + 7);
}

const PARTS = [["prefill", 0, "wait"], ["prefill", 1, "compute"], ["prefill", 2, "delivery"], ["decode", 0, "kv"], ["decode", 1, "decode"]];

// A row is drawn from left to right; what touches is one rectangle, so that there are never more than pixels.
function drawBars() {
  const begun = new Float64Array(lanes.slots), done = new Float64Array(lanes.slots), tops = [], heights = [];
  shapes = bars.filter((bar) => bar.parts[bar.parts.length - 1] >= from && bar.parts[0] <= to);
  for (const lane of lanes) lane.seen = 1;
  for (const bar of shapes) lanes[bar.lane].seen = Math.max(lanes[bar.lane].seen, bar.row + 1);
  for (const bar of shapes) [tops[bar.slot], heights[bar.slot]] = place(bar);
  for (const [role, part, colour] of PARTS) {
    pen.fillStyle = colours[colour];
    begun.fill(NaN);
    const flush = (slot) => {
      if (!Number.isNaN(begun[slot])) pen.fillRect(begun[slot], tops[slot], done[slot] - begun[slot], heights[slot] > 3 ? heights[slot] - 1 : heights[slot]);
    };
    for (const bar of shapes) {
      if (bar.role !== role || part + 1 >= bar.parts.length || bar.parts[part + 1] <= bar.parts[part]) continue;
      const a = x(bar.parts[part]), end = x(bar.parts[part + 1]), b = Math.max(end, a + 0.8), slot = bar.slot;
      if (b < LEFT || a > width || (end - a < 0.3 && colour !== "compute" && colour !== "decode")) continue;
      if (a > done[slot] + 0.9 || !(begun[slot] <= a)) {
        flush(slot);
        begun[slot] = a;
        done[slot] = b;
      } else if (b > done[slot]) done[slot] = b;
    }
    for (let slot = 0; slot < lanes.slots; slot++) flush(slot);
  }
  pen.fillStyle = colours.lost;
  for (const bar of shapes) if (bar.lost) {
    const [y, h] = place(bar), a = x(bar.parts[0]), b = x(bar.parts[bar.parts.length - 1]);
    pen.fillRect(a, y + h * 0.32, Math.max(b - a, 1.5), Math.max(1, h * 0.3));
  }
  pen.fillStyle = colours.transfer;
  for (const bar of shapes) if (bar.transfer) {
    const [y, h] = place(bar), a = x(bar.transfer[0]), b = x(bar.transfer[1]);
    if (b - a > 0.4) pen.fillRect(a, y + h * 0.62, Math.max(b - a, 1), Math.max(1, h * 0.3 - (h > 3 ? 1 : 0)));
  }
  details();
}

// Ends of chunks on prefill bars; on both, when KV of a layer became readable. Only where there is room for them.
function details() {
  const room = 3;
  for (const bar of shapes) {
    const size = x(bar.parts[bar.parts.length - 1]) - x(bar.parts[0]);
    if (size < 10 || (!bar.chunks.length && !bar.marks.length)) continue;
    const [y, h] = place(bar);
    if (h < room) continue;
    pen.fillStyle = colours.paper;
    for (const t of bar.chunks) pen.fillRect(x(t) - 0.75, y, 1.5, h - 1);
    pen.fillStyle = bar.role === "prefill" ? colours.transfer : colours.ink;
    let last = -9;
    for (const t of bar.marks) {
      const px = x(t);
      if (px - last < 1.5) continue;
      last = px;
      pen.fillRect(px - 0.5, y, 1, Math.max(2, h * 0.38));
    }
  }
}

function happenings() {
  for (const [t, kind, lane, text] of RUN.happenings) {
    const px = x(t);
    if (px < LEFT - 2 || px > width + 2) continue;
    const where = lane >= 0 ? lanes[lane] : null, y = where ? where.y : AXIS + 2, h = where ? where.h : FLOW - 4;
    const colour = { lost: "lost", joined: "good", policy: "policy", draining: "transfer", suspected: "transfer" }[kind];
    pen.fillStyle = colours[colour];
    pen.fillRect(px - 1, y, 2, h);
    pen.beginPath();
    pen.moveTo(px - 5, y);
    pen.lineTo(px + 5, y);
    pen.lineTo(px, y + 6);
    pen.fill();
  }
}

function curves() {
  const c = RUN.curves;
  let y = lanes.bottom;
  const rate = c.prompt.map((n, i) => (n ? (100 * c.cached[i]) / n : 0));
  const most = (list) => Math.max(1e-9, ...list.map((values) => values.reduce((a, b) => Math.max(a, b), 0)));
  const plots = [
    [c.queue, most(c.queue), (v) => span(Math.round(v))],
    [[...c.sequences, c.requests], most([...c.sequences, c.requests]), (v) => String(Math.round(v))],
    [[c.blocks], most([c.blocks]), (v) => Math.round(v) + " blocks"],
  ];
  for (const [series, top, words] of plots) {
    pen.fillStyle = colours.band;
    pen.fillRect(LEFT, y, width - LEFT, CURVE);
    series.forEach((values, i) => stroke(c.t, values, top, y, i === c.sequences.length && series.length > 1 && values === c.requests ? "ink" : "c" + (i % 8)));
    if (series[0] === c.blocks) stroke(c.t, rate, 100, y, "c2");
    pen.fillStyle = colours.faint;
    pen.textAlign = "right";
    pen.fillText(words(top), width - 6, y + 8);
    y += CURVE + GAP;
  }
}

function stroke(times, values, top, y, colour) {
  pen.strokeStyle = colours[colour];
  pen.lineJoin = "bevel";
  pen.beginPath();
  let last = -1e9, high = 0;
  for (let i = 0; i < times.length; i++) {
    if (times[i + 1] < from || times[i - 1] > to) continue;
    const px = x(times[i]);
    high = Math.max(high, values[i]);
    if (px - last < 2 && i + 1 < times.length) continue; // the highest of two pixels
    const py = y + CURVE - 2 - (high / top) * (CURVE - 14);
    if (last > -1e9) pen.lineTo(px, py); else pen.moveTo(px, py);
    last = px;
    high = 0;
  }
  pen.stroke();
}

function outline() {
  const arrived = Math.round(x(RUN.requests.at[picked]));
  pen.fillStyle = pen.strokeStyle = colours.pick;
  pen.fillRect(arrived - 1, AXIS + 6, 2, FLOW - 6);
  pen.lineWidth = 2;
  let before = null;
  for (const bar of bars) {
    if (bar.request !== picked) continue;
    const [y, h] = place(bar), a = x(bar.parts[0]), b = Math.max(x(bar.parts[bar.parts.length - 1]), a + 2);
    pen.strokeRect(a - 1, y - 1, b - a + 2, Math.max(h, 3) + 1);
    if (before && before.order === bar.order) {
      pen.beginPath();
      pen.setLineDash([4, 3]);
      pen.moveTo(before.x, before.y);
      pen.lineTo(a, y + h / 2);
      pen.stroke();
      pen.setLineDash([]);
    }
    before = { x: b, y: y + h / 2, order: bar.order };
  }
  pen.lineWidth = 1;
}

function labels() {
  pen.fillStyle = colours.paper;
  pen.fillRect(0, AXIS, LEFT - 1, height);
  pen.textAlign = "right";
  const put = (text, y, colour) => { pen.fillStyle = colours[colour || "ink"]; pen.fillText(text, LEFT - 8, y); };
  put("arrivals", AXIS + 18);
  put("rejected, failed", AXIS + 34, "lost");
  for (const lane of lanes) {
    put(lane.id, lane.y + Math.min(lane.h / 2, 9));
    if (lane.h > 26) put(lane.rows > 1 ? lane.rows + " at once" : "", lane.y + 22, "faint");
  }
  let y = lanes.bottom;
  for (const [one, two, colour, three] of [
    ["queue of each", "prefill worker", "ink"],
    ["requests", "sequences of each", "faint", "decode worker"],
    ["blocks in pools", "tokens found, %", "c2"],
  ]) {
    put(one, y + 12, one.startsWith("blocks") ? "c0" : "ink");
    put(two, y + 27, colour);
    if (three) put(three, y + 41, "faint");
    y += CURVE + GAP;
  }
}
