"""What a tier under another engine (`halfmoon.store.adapters.tier`) costs that engine's scheduler, a step.

A real nats-server, a real store agent in a process of its own, and a loop that asks as vLLM's scheduler does: in each
step every chunk of the requests that wait, until the first that is not known or not there; then a load of what was
found, a store of what was not; and the ends of jobs. Nothing is computed: a step is a pause of `--step-ms`, and what
counts is the time that the tier's calls take within it (goal: 1 ms at p99). Beside it, after the tier has ended, the
same pauses with a loop of Python in between that is as long: what the machine alone does to such a step.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import finish, parsed, parser
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.store.adapters.tier import StoreTier, TierOptions

#: A block's bytes, the rows of the engine's memory, the chunks of a prompt: 2,000 tokens by 32.
ROW, ROWS, CHUNKS = 64 * 4096, 2048, 62
#: Prompts that come again and again; the store has room for most of them.
PROMPTS, POOL_MIB = 24, 512


class Request:
    def __init__(self, number: int, rows: range) -> None:
        self.name = f"r{number}"
        self.keys = [b"%d-%d" % (number % PROMPTS, chunk) for chunk in range(CHUNKS)]
        self.rows = rows
        self.found = 0


class Scheduler:
    """As many requests as there are rows for; each looks up, loads, stores what is missing, and ends."""

    def __init__(self, tier: StoreTier) -> None:
        self._tier = tier
        self._room = deque(range(first, first + CHUNKS) for first in range(0, ROWS - CHUNKS, CHUNKS))
        self._waiting: list[Request] = []
        self._jobs: dict[int, tuple[Request, bool]] = {}
        self._requests = self._job_ids = 0
        self.lookups = self.loaded = self.stored = 0

    def step(self, arrivals: int) -> None:
        for _ in range(min(arrivals, len(self._room))):
            self._waiting.append(Request(self._requests, self._room.popleft()))
            self._requests += 1
        self._waiting = [request for request in self._waiting if not self._scheduled(request)]
        for job in self._tier.finished():
            request, load = self._jobs.pop(job.job_id)
            self.loaded, self.stored = (
                self.loaded + load * len(job.moved),
                self.stored + (not load) * len(job.moved),
            )
            if load and request.found < CHUNKS:
                self._submit(request, slice(request.found, CHUNKS), load=False)
            else:
                self._tier.forget(request.name)
                self._room.append(request.rows)
        self._tier.flush()
        self._tier.counts()

    def _scheduled(self, request: Request) -> bool:
        while request.found < CHUNKS:
            self.lookups += 1
            there = self._tier.lookup(request.keys[request.found], request.name)
            if there is None:
                # vLLM asks for all chunks of a prompt before it waits, so that they go in one exchange.
                for key in request.keys[request.found + 1 :]:
                    self.lookups += 1
                    self._tier.lookup(key, request.name)
                request.found = 0
                return False
            if not there:
                break
            request.found += 1
        load = request.found > 0
        self._submit(request, slice(0, request.found) if load else slice(0, CHUNKS), load=load)
        return True

    def _submit(self, request: Request, part: slice, *, load: bool) -> None:
        self._job_ids += 1
        self._jobs[self._job_ids] = (request, load)
        self._tier.submit(self._job_ids, request.keys[part], request.rows[part], load=load)


def timed(work: Callable[[], None], steps: int, step_ms: float) -> tuple[list[float], list[float]]:
    """Microseconds of time, and of this thread's CPU, of each step."""
    took_us, cpu_us = [], []
    for _ in range(steps):
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        work()
        took_us.append((time.perf_counter_ns() - began) / 1e3)
        cpu_us.append((time.thread_time_ns() - cpu) / 1e3)
        time.sleep(step_ms / 1e3)
    return took_us, cpu_us


def spin(cpu_us: float) -> None:
    until = time.thread_time_ns() + cpu_us * 1e3
    while time.thread_time_ns() < until:
        pass


def measure(steps: int, step_ms: float, arrivals: int, row_blocks: int) -> dict[str, Any]:
    node = f"b{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer.start(Path(directory))
        words = ["--nats", server.url, "--cluster", node, "--node", node, "--data-port", "-1"]
        size = ["--block-bytes", f"{ROW // row_blocks}", "--pool-mib", f"{POOL_MIB}"]
        agent = subprocess.Popen([sys.executable, "-m", "halfmoon.cli.main", "store", *words, *size])
        try:
            rows = np.ones((ROWS, ROW), np.uint8)
            options = TierOptions.of({"nats": server.url, "node": node, "connect_s": 60.0})
            tier = StoreTier(rows, options, namespace=b"benchmark")
            tier.start()
            try:
                scheduler = Scheduler(tier)
                took_us, cpu_us = timed(lambda: scheduler.step(arrivals), steps, step_ms)
            finally:
                tier.close()
            alone_us, _ = timed(lambda: spin(float(np.median(cpu_us))), steps, step_ms)
        finally:
            agent.terminate()
            agent.wait(30)
            server.stop()

    def spread(values: list[float]) -> dict[str, float]:
        points = {"p50": 50, "p99": 99, "p99_9": 99.9, "max": 100}
        return {name: round(float(np.percentile(values, at)), 1) for name, at in points.items()}

    counts = {"lookups": scheduler.lookups, "loaded": scheduler.loaded, "stored": scheduler.stored}
    kinds = {"step_us": took_us, "step_cpu_us": cpu_us, "alone_us": alone_us}
    return {**{name: spread(values) for name, values in kinds.items()}, "steps": steps, **counts}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=3000)
    options.add_argument("--step-ms", type=float, default=10.0)
    options.add_argument(
        "--arrivals", type=int, default=1, help="requests a step, while there is room for them"
    )
    options.add_argument(
        "--row-blocks",
        type=int,
        choices=[1, 2, 4, 8, 16, 32, 64],
        default=1,
        help="blocks of the store in a row",
    )
    args = parsed(options, steps=50)
    found = measure(args.steps, args.step_ms, args.arrivals, args.row_blocks)
    lines = [
        f"{name} a step: {', '.join(f'{at} {value:,.0f}' for at, value in found[key].items())} us"
        for name, key in (("time", "step_us"), ("CPU", "step_cpu_us"), ("a loop alone, time", "alone_us"))
    ]
    lines.append(
        f"{found['steps']:,} steps: {found['lookups']:,} lookups, {found['loaded']:,} rows loaded,"
        f" {found['stored']:,} stored"
    )
    shape = {"block_bytes": ROW, "row_blocks": args.row_blocks}
    finish(args, {"step_ms": args.step_ms, "arrivals": args.arrivals, **shape, **found}, lines)


if __name__ == "__main__":
    main()
