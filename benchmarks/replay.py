"""How fast a log replays, and how the page of a run with 10,000 requests loads and redraws in a browser.

The log is that of a simulated cluster (8 prefill, 8 decode workers) under Mooncake's conversation trace,
12,031 requests: their block keys are as many as in practice. The browser is measured when Playwright and a
Chromium are there.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from clusters import ROOT, finish, parsed, parser

from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.logfile import FORMAT, Header, Line, LogFile, LogWriter, lines_of_step
from halfmoon.conductor.replay.page import page
from halfmoon.conductor.replay.timeline import timeline
from halfmoon.conductor.replay.verify import Replay, verify
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.profiles import load_profile
from halfmoon.conductor.simulation.trace import Arrival, faster, read_trace
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.policy import Policy

TRACE = ROOT / "benchmarks" / "traces" / "conversation_trace.jsonl.zst"


def record(path: Path, requests: list[Arrival], *, speed: float) -> None:
    policy = Policy(ttft_slo_ns=30_000_000_000, tbt_slo_ns=100_000_000)
    world = World(ClusterShape(prefill=8, decode=8), policy, load_profile("a800"))
    lines: list[Line] = []
    world.after_step = lambda stamped, decisions: lines.extend(lines_of_step(stamped, decisions))
    world.run(faster(requests, speed), sample_ns=10_000_000_000)
    header = Header(
        format=FORMAT, saved_by="simulation", cluster="simulated", first_seq=1, last_seq=world.events
    )
    with LogWriter(path, header) as out:
        for line in lines:
            out.write(line)


def browser(path: Path, picked: int) -> dict[str, Any]:
    """What a headless Chromium takes: until everything is drawn, for a redraw at several
    zooms, and for the story of request `picked`."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        return {}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        tab = chromium.new_page(viewport={"width": 1500, "height": 900})
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        started_s = time.monotonic()
        tab.goto(path.as_uri())
        tab.wait_for_function("window.loaded_ms !== undefined", timeout=120_000)
        load_s = time.monotonic() - started_s
        redraw_ms = {
            f"zoom {zoom}": tab.evaluate(
                "(zoom) => { const s = RUN.meta.span; from = s / 2 - s / zoom / 2; to = s / 2 + s / zoom / 2; draw();"
                " const a = performance.now(); for (let i = 0; i < 5; i++) { draw(); pen.getImageData(0, 0, 1, 1); }"
                " return Math.round((performance.now() - a) / 5 * 10) / 10; }",
                zoom,
            )
            for zoom in (1, 4, 16, 64, 256)
        }
        started_s = time.monotonic()
        tab.evaluate(f"pick({picked})")
        tab.wait_for_function(f"window.told === {picked}")
        story_s = time.monotonic() - started_s
        chromium.close()
    assert asked == [path.as_uri()], asked
    return {"load_s": round(load_s, 2), "redraw_ms": redraw_ms, "first_story_s": round(story_s, 2)}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--requests", type=int, default=None, help="only the first so many of the trace")
    args = parsed(options, rounds=1, requests=1_000)
    requests = read_trace(TRACE)[: args.requests]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "log.jsonl.zst"
        record(path, requests, speed=1.5)
        log = LogFile(path)
        runs, cpu_s = [], []
        for _ in range(args.rounds):
            before_s = time.process_time()
            runs.append(verify(log))
            cpu_s.append(time.process_time() - before_s)
        assert all(run.identical for run in runs)
        started_s = time.monotonic()
        text = page(timeline(Replay(log, explain_requests=explain_all)), title="benchmark")
        page_s = time.monotonic() - started_s
        html = Path(scratch) / "run.html"
        html.write_text(text)
        result = {
            "events": runs[0].events,
            "decisions": runs[0].decisions,
            "events_per_s": [run.events_per_s for run in runs],
            "events_per_s_median": int(statistics.median(run.events_per_s for run in runs)),
            "events_per_cpu_s_median": int(runs[0].events / statistics.median(cpu_s)),
            "file_bytes": path.stat().st_size,
            "page": {
                "requests": len(requests),
                "bytes": len(text.encode()),
                "made_in_s": round(page_s, 2),
                **browser(html, len(requests) // 2),
            },
        }
    shown = result["page"]
    lines = [
        f"{result['events']:,} events, {result['decisions']:,} decisions, identical; "
        f"{result['events_per_s_median']:,} events/s, "
        f"{result['events_per_cpu_s_median']:,} a second of CPU (medians of {args.rounds})",
        f"page: {shown['bytes']:,} bytes, made in {shown['made_in_s']} s",
        f"browser: loaded in {shown.get('load_s', '(not measured)')} s; redraws in ms: {shown.get('redraw_ms', '-')}",
    ]
    finish(args, result, lines)


if __name__ == "__main__":
    main()
