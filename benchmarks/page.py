"""What the cluster's page costs who does not look at it: the control plane's figures with it open and closed,
by turns.

The cluster's engine computes nothing. Whoever looks is a process that reads the stream of views, as a browser
does, and draws nothing: drawing is done on another machine. Because others may share this one's cores, each
run with the page open stands beside one without it, and the ratio of the two is what is told; and of CPU,
which others do not take, how much the cluster's processes used for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from typing import Any
from urllib.parse import urlsplit

import uvloop
from clusters import ROOT, cluster, cpu_s, finish, parsed, parser, spread
from control_plane import ALONE, WARM, measure

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.replay.logfile import EventLine, LogFile
from halfmoon.conductor.view.service import ViewService
from halfmoon.schemas.codec import encode
from halfmoon.schemas.events import Stamped
from halfmoon.schemas.view import ViewRequest

#: Over what, tokens of the prompt, tokens of the answer.
CASES = (("nats", 8, 1), ("http", 128, 1), ("http", 128, 32))


def look(url: str, views: Synchronized[int], size: Synchronized[int]) -> None:
    """A process that has the page open."""

    async def read() -> None:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(f"GET /page/stream HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        while piece := await reader.read(1 << 18):
            views.value += piece.count(b"event: view")
            size.value += len(piece)

    uvloop.run(read())


@contextlib.contextmanager
def looking(url: str, watchers: int) -> Iterator[tuple[Synchronized[int], Synchronized[int]]]:
    views, size = multiprocessing.Value("q", 0), multiprocessing.Value("q", 0)
    processes = [
        multiprocessing.Process(target=look, args=(url, views, size), daemon=True) for _ in range(watchers)
    ]
    for process in processes:
        process.start()
    try:
        yield views, size
    finally:
        for process in processes:
            process.terminate()
            process.join()


def ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]], field: Any) -> dict[str, float]:
    """Open to closed, pair by pair."""
    return spread([field(opened) / field(closed) for closed, opened in pairs])


def conductor_cost(passes: int) -> dict[str, float]:
    """CPU of a conductor, by stepping over a recorded log: an event without any view, with the page closed,
    and open; and one answer. The least of some passes: what others do on the machine only adds."""
    lines = LogFile(ROOT / "tests" / "replay" / "golden" / "null.jsonl.zst").lines()
    events = [Stamped(seq=e.seq, at_ns=e.at_ns, event=e.event) for e in lines if isinstance(e, EventLine)]
    asked = ViewRequest(conductor_id="c", after_seq=1)
    took: dict[str, list[float]] = {"core": [], "closed": [], "open": [], "answer_ms": []}
    for _ in range(passes):
        for how in ("core", "closed", "open"):
            core = Core()
            viewing = ViewService(None, core, conductor_id="c")  # type: ignore[arg-type]
            if how == "open":
                viewing.view(asked)
            started = time.process_time()
            for stamped in events:
                if how != "core":
                    viewing.before(stamped)
                decisions = core.step(stamped)
                if how != "core":
                    viewing.after(stamped, decisions)
            took[how].append((time.process_time() - started) / len(events) * 1e6)
        started = time.process_time()
        encode(viewing.view(asked))
        took["answer_ms"].append((time.process_time() - started) * 1e3)
    return {
        "event_us": round(min(took["core"]), 2),
        "event_us_closed": round(min(took["closed"]), 2),
        "event_us_open": round(min(took["open"]), 2),
        "answer_ms": round(min(took["answer_ms"]), 2),
    }


def main() -> None:
    args_parser = parser(__doc__ or "")
    args_parser.add_argument("--seconds", type=float, default=3.0, help="of each throughput run")
    args_parser.add_argument("--pairs", type=int, default=5)
    args_parser.add_argument("--watchers", type=int, default=1)
    args_parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    args_parser.add_argument("--alone", type=int, default=ALONE, help="requests one at a time, in each run")
    args_parser.add_argument("--passes", type=int, default=9, help="over the log, of the conductor's cost")
    args = parsed(args_parser, seconds=2.0, pairs=1, cases=2, alone=20, passes=1)
    rows: list[dict[str, Any]] = []
    with (
        cluster("--engine", "null", "--admission", "none") as addresses,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        for case in CASES[: args.cases]:
            pairs, seen, moved, took = [], 0, 0, 0.0
            for number in range(args.pairs):
                found: dict[bool, dict[str, Any]] = {}
                for opened in (False, True) if number % 2 == 0 else (True, False):
                    with looking(addresses["http"], args.watchers if opened else 0) as (views, size):
                        time.sleep(1.0)  # the stream is open, or the lease of the last one runs out
                        if not opened:
                            time.sleep(5.0)
                        started = time.perf_counter()
                        before = views.value, size.value
                        used = cpu_s(addresses["pid"])
                        found[opened] = runner.run(measure(addresses, *case, args.seconds, args.alone))
                        requests = WARM + args.alone + found[opened]["first_token_ms_at_32"]["n"]
                        found[opened]["cpu_us"] = (cpu_s(addresses["pid"]) - used) / requests * 1e6
                        took += (time.perf_counter() - started) if opened else 0.0
                        seen, moved = seen + views.value - before[0], moved + size.value - before[1]
                pairs.append((found[False], found[True]))
            assert seen > args.pairs, "nobody looked"
            closed, opened_ones = zip(*pairs, strict=True)
            rows.append(
                {
                    "over": case[0], "prompt_tokens": case[1], "max_tokens": case[2], "pairs": args.pairs,
                    "watchers": args.watchers,
                    "first_token_p50_ms_at_1": [one["first_token_ms_at_1"]["p50"] for one in closed],
                    "first_token_p50_ms_at_1_open": [one["first_token_ms_at_1"]["p50"] for one in opened_ones],
                    "requests_per_s_at_32": [one["requests_per_s_at_32"] for one in closed],
                    "requests_per_s_at_32_open": [one["requests_per_s_at_32"] for one in opened_ones],
                    "cpu_us_a_request": [round(one["cpu_us"]) for one in closed],
                    "cpu_us_a_request_open": [round(one["cpu_us"]) for one in opened_ones],
                    "cpu_ratio": ratio(pairs, lambda one: one["cpu_us"]),
                    "first_token_ratio": ratio(pairs, lambda one: one["first_token_ms_at_1"]["p50"]),
                    "first_token_p99_ratio": ratio(pairs, lambda one: one["first_token_ms_at_1"]["p99"]),
                    "requests_per_s_ratio": ratio(pairs, lambda one: one["requests_per_s_at_32"]),
                    "views_a_second": round(seen / took / args.watchers, 2),
                    "bytes_a_view": round(moved / seen),
                }
            )  # fmt: skip
    lines = [
        f"{row['over']:>5} prompt {row['prompt_tokens']:>4} tokens, answer {row['max_tokens']:>2}: open to closed, "
        f"median of {row['pairs']} pairs: first token at one {row['first_token_ratio']['p50']:.2f} "
        f"({statistics.median(row['first_token_p50_ms_at_1']):.2f} ms closed), requests/s at 32 "
        f"{row['requests_per_s_ratio']['p50']:.2f} ({statistics.median(row['requests_per_s_at_32']):.0f}/s closed), "
        f"CPU a request {row['cpu_ratio']['p50']:.2f} "
        f"({statistics.median(row['cpu_us_a_request']):.0f} us closed); "
        f"{row['views_a_second']:.1f} views/s of {row['bytes_a_view']:,} bytes"
        for row in rows
    ]
    cost = conductor_cost(args.passes)
    lines.append(
        f"a conductor, CPU: {cost['event_us']:.1f} us an event alone, {cost['event_us_closed']:.1f} with the page "
        f"closed, {cost['event_us_open']:.1f} open; {cost['answer_ms']:.1f} ms an answer, of which there are 2 a second"
    )
    finish(args, {"rows": rows, "conductor": cost}, lines)


if __name__ == "__main__":
    main()
