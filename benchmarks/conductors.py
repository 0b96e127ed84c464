"""What keeping conductors alike costs: digests of the state, and starting late, from the log and from a
snapshot.

A log as of a busy cluster (requests with answers, blocks, heartbeats) lies in a real nats-server; a conductor
reads it, with digests and without. At the end its state has 16,384 ended requests and as many blocks as asked
for.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from clusters import finish, parsed, parser, spread

from halfmoon.bus import snapshots
from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.conductor.code_version import LOG_VERSION, code_version
from halfmoon.conductor.core.machine import SNAPSHOT_VERSION, Core
from halfmoon.conductor.live import shell
from halfmoon.schemas import subjects
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import (
    BlocksStored,
    ClusterConfigured,
    Event,
    FrontendJoined,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    Stamped,
    StoreJoined,
    WorkerHeartbeat,
    WorkerJoined,
)
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Layout, Policy

HOUR_NS = 3600 * SECOND_NS
NEVER = 1_000_000
LAYOUT = Layout(
    model="m", model_fingerprint="f", layers=10, kv_heads=1, head_dim=25, block_tokens=100, dtype="bfloat16"
)
PROFILE = CostProfile(prefill_base_ns=1_000_000, prefill_per_token_ps=1_000_000, decode_base_ns=1_000_000)


def members() -> list[Event]:
    found: list[Event] = [FrontendJoined(frontend_id="f0", incarnation="i")]
    for role in ("prefill", "decode"):
        for number in range(4):
            name = f"{role[0]}{number}"
            found.append(
                WorkerJoined(
                    worker_id=name,
                    role=role,  # type: ignore[arg-type]
                    node_id=f"n-{name}",
                    incarnation="i",
                    layout=LAYOUT,
                    kv_blocks=100_000,
                    context_tokens_max=100_000,
                    batch_max=64,
                    profile=PROFILE,
                )
            )
            found.append(
                StoreJoined(
                    node_id=f"n-{name}", incarnation="i", host="h", layout=LAYOUT, slots=100_000, endpoints=[]
                )
            )
    return found


async def write_log(bus: Bus, requests: int, blocks: int, digest_events: int) -> None:
    """Each request is answered before the next one comes; the core that we step beside says by whom."""
    policy = Policy(
        heartbeat_ns=HOUR_NS, lost_after_ns=2 * HOUR_NS, digest_events=digest_events, admission="none"
    )
    core, at_seq = Core(), 0

    def say(event: Event) -> Any:
        nonlocal at_seq
        at_seq += 1
        bus.append_soon(event, source_id=subjects.SUPERVISOR)  # who may speak for every process
        return core.step(Stamped(seq=at_seq, at_ns=at_seq * 1_000_000, event=event))

    say(ClusterConfigured(code_version=code_version(), log_version=LOG_VERSION, policy=policy))
    for event in members():
        say(event)
    key = 0
    for number in range(requests):
        keys = b"".join((key + place).to_bytes(16, "big") for place in range(blocks // requests))
        key += blocks // requests
        request = f"{number:032d}"
        start, _ = say(
            RequestArrived(
                request_id=request, frontend_id="f0", prompt_tokens=1_000, max_tokens=100, block_keys=keys
            )
        )
        answer = {"order_id": start.order_id, "request_id": request}
        prefill = start.worker_id
        say(PrefillFinished(**answer, worker_id=prefill, queue_ns=0, transfer_ns=0, compute_ns=2_000_000))
        say(BlocksStored(node_id=f"n-{prefill}", incarnation="i", block_keys=keys))
        say(WorkerHeartbeat(worker_id=prefill, incarnation="i"))
        finished = RequestFinished(
            **answer, worker_id=start.decode_worker_id, finish_reason="length", completion_tokens=100
        )
        say(finished)
        if number % 1_000 == 0:
            await bus.flush(30)
    assert await bus.flush(30)


async def read_log(url: str) -> tuple[float, Core]:
    """Seconds until a conductor that starts now has caught up, and its core."""
    bus = await Bus.connect(BusConfig(url=url), name="late")
    shells: list[shell.Shell] = []
    started = time.perf_counter()
    task = asyncio.create_task(shell.run(bus, conductor_id="late", policy=Policy(), started=shells.append))
    while not shells or not shells[0].caught_up.is_set():
        if task.done():
            task.result()
        await asyncio.sleep(0.001)
    took = time.perf_counter() - started
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not bus.invalid, f"{bus.invalid} events were passed over"
    await bus.close(flush_s=30)
    return took, shells[0].core


async def once(requests: int, blocks: int, repeats: int) -> dict[str, Any]:
    every = Policy().digest_events
    row: dict[str, Any] = {"requests": requests, "blocks": blocks, "digest_events": every}
    times: dict[int, list[float]] = {}
    for digest_events in (NEVER, every):
        with tempfile.TemporaryDirectory() as directory:
            server = EmbeddedServer.start(Path(directory))
            try:
                bus = await Bus.connect(BusConfig(url=server.url), name="writer")
                await write_log(bus, requests, blocks, digest_events)
                row["events"] = events = await bus.last_seq()
                await read_log(server.url)  # publishes the decisions; later ones pass over them in silence
                times[digest_events] = [(await read_log(server.url))[0] for _ in range(repeats)]
                if digest_events == every:
                    _, core = await read_log(server.url)
                    digests = []
                    for _ in range(10):
                        begun = time.perf_counter()
                        core.digest()
                        digests.append((time.perf_counter() - begun) * 1e3)
                    row["digest_ms"] = spread(digests)
                    snapshot = core.snapshot()
                    row["snapshot_bytes"] = len(snapshot)
                    await snapshots.save(
                        bus, core.seq, snapshot, version=SNAPSHOT_VERSION, code_version="bench"
                    )
                    row["start_from_snapshot_s"] = spread(
                        [(await read_log(server.url))[0] for _ in range(repeats)]
                    )
                await bus.close()
            finally:
                server.stop()
    row["start_from_log_s"] = spread(times[every])
    row["event_us"] = statistics.median(times[NEVER]) / events * 1e6
    row["digest_us_an_event"] = row["digest_ms"]["p50"] * 1e3 / every
    row["digest_share"] = row["digest_us_an_event"] / row["event_us"]
    return row


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--requests", type=int, default=17_000)
    options.add_argument("--blocks", type=int, nargs="*", default=[10_000, 100_000])
    options.add_argument("--repeats", type=int, default=3)
    args = parsed(options, requests=300, blocks=[1_000], repeats=1)
    rows, lines = [], []
    for blocks in args.blocks:
        row = uvloop.run(once(args.requests, max(blocks, args.requests), args.repeats))
        rows.append(row)
        lines.append(
            f"{row['events']:,} events, {row['blocks']:,} blocks: a start from the log takes "
            f"{row['start_from_log_s']['p50']:.2f} s ({row['event_us']:.0f} µs an event), from a snapshot of "
            f"{row['snapshot_bytes']:,} bytes {row['start_from_snapshot_s']['p50'] * 1e3:.0f} ms; a digest "
            f"{row['digest_ms']['p50']:.1f} ms, {100 * row['digest_share']:.2f} % of the time of "
            f"{row['digest_events']:,} events"
        )
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
