// Elements, lists that keep their rows, and numbers in words. All text goes in as text, never as markup.

export const $ = (id) => document.getElementById(id);

export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, props = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Children of `parent` become one for each item, in their order; those of known keys are kept and updated.
export function rows(parent, items, key, make, update) {
  const known = (parent.known ||= new Map()), seen = new Set();
  let before = null;
  for (const item of items) {
    const name = key(item);
    if (seen.has(name)) continue;
    seen.add(name);
    let row = known.get(name);
    if (!row) {
      row = make(item);
      known.set(name, row);
    }
    if (update) update(row, item);
    const place = before ? before.nextSibling : parent.firstChild;
    if (place !== row) parent.insertBefore(row, place);
    before = row;
  }
  for (const [name, row] of known) {
    if (!seen.has(name)) {
      known.delete(name);
      row.remove();
    }
  }
}

const plain = new Intl.NumberFormat("en-US"), compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const count = (n) => ((n || 0) < 100000 ? plain.format(Math.round(n || 0)) : compact.format(n));

export function span(us) {
  if (!us) return "0";
  if (us >= 9.95e6) return Math.round(us / 1e5) / 10 + " s";
  if (us >= 1e6) return (us / 1e6).toFixed(2) + " s";
  if (us >= 9950) return Math.round(us / 1e3) + " ms";
  return us >= 1e3 ? (us / 1e3).toFixed(1) + " ms" : Math.round(us) + " µs";
}

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < 4) { n /= 1000; unit++; }
  return (n >= 100 || !unit ? Math.round(n) : n.toFixed(1)) + " " + units[unit];
}

export function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  if (part < whole && percent > 99.9) return "99.9 %";
  return (percent >= 10 || percent === 0 ? Math.round(percent * 10) / 10 : percent.toFixed(1)) + " %";
}

export const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) + " %" : "–");

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return Math.round(seconds) + " s ago";
  return seconds < 5400 ? Math.round(seconds / 60) + " min ago" : Math.round(seconds / 3600) + " h ago";
}

export const clock = (ns) => new Date(ns / 1e6).toLocaleTimeString("en-GB", { hour12: false });

// A link to a request's explanation: it opens in place, and its address can be sent to somebody.
export function request(id) {
  return h("a", { href: "#request=" + encodeURIComponent(id), class: "request", title: "explain request " + id }, id.slice(-8));
}
