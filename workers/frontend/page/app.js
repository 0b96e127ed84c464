// Puts the page together: the stream, its state in the header, the verdict, and each panel's own module.
import { $, ago, count, say } from "/page/dom.js";
import { Stream } from "/page/stream.js";
import { showTiles } from "/page/tiles.js";
import { showCluster, showLinks } from "/page/cluster.js";
import { showRequests } from "/page/requests.js";
import { listenEvents, showEvents } from "/page/events.js";
import { listenStory } from "/page/request_panel.js";
import { verdict } from "/page/verdict.js";

const KEY = "halfmoon-key";
let last = null, lastAt = 0, connection = "connecting", trouble = "";
const key = () => sessionStorage.getItem(KEY) || "";

function show(view) {
  trouble = view.state === "live" ? "" : view.state;
  if (view.state === "live") {
    last = view;
    lastAt = performance.now();
    $("main").hidden = false;
    say($("model"), view.model);
    document.title = "halfmoon – " + view.model;
    render(view);
  }
  showConnection();
}

function render(view) {
  const { level, headline, more } = verdict(view);
  $("verdict").className = level;
  say($("verdict").firstElementChild, headline);
  say($("verdict").lastElementChild, more);
  showTiles(view);
  showCluster(view);
  showRequests(view);
  showEvents(view);
  document.body.dataset.views = (+document.body.dataset.views || 0) + 1;
}

// What the header says of the way from the cluster to here; what is old is shown as old.
function showConnection() {
  const age = last ? (performance.now() - lastAt) / 1000 : 0, old = last ? "; this is of " + ago(Math.max(2, age)) : "";
  let state = "live", text = last ? count(last.conductors.length) + (last.conductors.length === 1 ? " conductor" : " conductors") : "connecting";
  if (connection === "lost") [state, text] = ["lost", "reconnecting" + old];
  else if (connection === "resting") [state, text] = ["lost", "resting while the tab is hidden" + old];
  else if (connection === "key") [state, text] = ["lost", "a key is wanted"];
  else if (trouble === "no NATS") [state, text] = ["lost", "the frontend has lost NATS" + old];
  else if (trouble === "no conductor") [state, text] = ["lost", "no conductor answers" + old];
  else if (!last) [state, text] = ["wait", "connecting"];
  else text = "live · " + text;
  $("link").className = state;
  say($("link").lastElementChild, text);
  $("main").classList.toggle("stale", state === "lost");
  document.body.dataset.state = state;
}

function onState(state, text) {
  connection = state;
  $("key").hidden = state !== "key";
  if (state === "key") {
    say($("key-why"), key() ? "That key does not do: " + text + "." : "This frontend asks for an API key.");
    $("main").hidden = true;
    $("key-value").focus();
  }
  showConnection();
}

const stream = new Stream("/page/stream", key, show, onState);
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key-value").value.trim());
  $("key-value").value = "";
  stream.again(0);
});
listenEvents();
listenStory(key);
setInterval(showConnection, 1000);
let resized = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => last && showLinks(last));
}).observe($("map"));
