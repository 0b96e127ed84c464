// The stream of views: server-sent events read by `fetch`, because a key can then go in a header. It connects again by
// itself, soon at first, and rests while nobody sees the page.

const SILENT_MS = 5000, WAITS_MS = [300, 1000, 2000, 4000], REST_MS = 30000;

export class Stream {
  // `onView(view)`, `onState(state, text)`: "live", "lost", "key" (a key is wanted), "resting".
  constructor(url, key, onView, onState) {
    Object.assign(this, { url, key, onView, onState, tries: 0, ended: false, resting: false });
    document.addEventListener("visibilitychange", () => this.seen());
    window.addEventListener("online", () => this.again(0));
    this.connect();
  }

  async connect() {
    clearTimeout(this.timer);
    const control = (this.control = new AbortController());
    this.heard(control);
    let reason = "the stream ended";
    try {
      const key = this.key(), headers = key ? { authorization: "Bearer " + key } : {};
      const response = await fetch(this.url, { headers, signal: control.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        const told = await response.json();
        this.stop(control);
        return this.onState("key", told.error.message);
      }
      if (!response.ok) throw new Error("the frontend answers " + response.status);
      await this.read(response.body.getReader(), control);
    } catch (problem) {
      reason = problem.name === "AbortError" ? "nothing came for a while" : problem.message;
    }
    if (control !== this.control || this.resting) return;
    this.onState("lost", reason);
    this.again(WAITS_MS[Math.min(this.tries++, WAITS_MS.length - 1)] * (0.75 + Math.random() / 2));
  }

  async read(reader, control) {
    const decoder = new TextDecoder();
    let text = "";
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      this.heard(control);
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (!data) continue;
        this.tries = 0;
        this.onState("live", "");
        this.onView(JSON.parse(data));
      }
    }
  }

  // A connection that says nothing is taken for dead.
  heard(control) {
    clearTimeout(this.watch);
    this.watch = setTimeout(() => control.abort(), SILENT_MS);
  }

  stop(control) {
    clearTimeout(this.watch);
    clearTimeout(this.timer);
    this.control = null;
    control?.abort();
  }

  again(wait) {
    if (this.resting) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.stop(this.control);
      this.connect();
    }, wait);
  }

  seen() {
    clearTimeout(this.rest);
    if (document.visibilityState === "hidden") {
      this.rest = setTimeout(() => {
        this.resting = true;
        this.stop(this.control);
        this.onState("resting", "");
      }, REST_MS);
    } else if (this.resting) {
      this.resting = false;
      this.connect();
    }
  }
}
