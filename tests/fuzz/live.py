"""`python tests/fuzz/live.py --seconds 60`: a real cluster whose NATS subjects are told nonsense, by every role's
credentials, while clients ask it.

First *broken* messages on every subject that a role may publish to (`live_inputs`): all requests of the clients are
answered meanwhile, each with the right text. Then *lies*, which readers may believe: every request ends, and once the
processes have been asked to join again the cluster serves as before. All along no process dies or is started anew, none
leaves a traceback, and what they write stays short; at the end all conductors have the same state, no request and no
lease is open, and memory, files and threads of each process have not grown. The log that nonsense was written into
replays identically.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp

from halfmoon.conductor.code_version import code_version
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.decisions import AnnounceYourself, Ordered
from halfmoon.schemas.events import Event, Stamped
from halfmoon.schemas.kv import KvMessage
from tests.bus.permission_table import Process
from tests.chaos.live import replayed
from tests.chaos.live_load import Load
from tests.cluster.harness import Cluster, children, start
from tests.fuzz.live_inputs import Known, Place, broken, lie, places_of
from tests.fuzz.live_watch import Grown, Outputs
from tests.fuzz.raw_connection import RawConnection

CONDUCTORS = 2
#: A client that names no `max_tokens` gets all of the context: one that just holds the clients' longest prompt.
CONTEXT = ("--max-model-len", "2560")
FLAGS = (
    "--conductors",
    str(CONDUCTORS),
    "--prefill",
    "1",
    "--decode",
    "2",
    "--lend",
    "--pool-mib",
    "128",
    *CONTEXT,
)
PATIENCE = ("--ttft-slo-ms", "600000", "--tbt-slo-ms", "60000")
CLIENTS = 2
#: Inputs between two looks at what processes wrote; at most so many a second, so that clients are answered beside them.
LOOK_INPUTS = 100
INPUTS_S = 400.0
#: Until everything that was begun has ended. An answer that fills the context takes a slow machine (120 ms a step) five
#: minutes, and lies about its worker may have had it begin a second time; no lease of a store agent lasts so long.
REST_S = 900.0
#: A large message, or one that is cut short, takes a busy server a while.
PATIENCE_S = 2.0
Make = Callable[[random.Random, Known, Place], bytes]


class Found(Exception):
    """What must not be; the text is for a person."""


@dataclass
class Attack:
    """Sends inputs of one kind for some time, from a thread of its own."""

    cluster: Cluster
    known: Known
    outputs: Outputs
    make: Make
    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def run(
        self, draw: random.Random, places: dict[str, dict[str, list[Place]]], seconds: float, inputs: int
    ) -> None:
        """Raises Found, with the inputs since the last look in a file."""
        connections = {
            name: RawConnection(
                self.cluster.nats, self.cluster.config(name).nkey_seed_file, patience_s=PATIENCE_S
            )
            for name in places
        }
        began, recent = time.monotonic(), list[bytes]()
        try:
            while time.monotonic() - began < seconds and self.outcomes.total() < inputs:
                name = draw.choice(list(places))
                place = draw.choice(places[name][draw.choice(list(places[name]))])
                content = self.make(draw, self.known, place)
                if not content:
                    continue
                recent.append(content)
                self.outcomes[connections[name].send(content)] += 1
                self.sent[place.process.role] += 1
                if len(recent) >= LOOK_INPUTS:
                    self._look(recent)
                    recent = []
                    ahead_s = self.outcomes.total() / INPUTS_S - (time.monotonic() - began)
                    time.sleep(max(0.0, ahead_s))
            time.sleep(0.5)
            self._look(recent)
        finally:
            for connection in connections.values():
                connection.close()

    def _look(self, recent: list[bytes]) -> None:
        if problem := self.outputs.problem():
            file = Path(tempfile.gettempdir()) / f"halfmoon-fuzz-live-{os.getpid()}"
            file.write_bytes(b"".join(recent))
            raise Found(f"after one of the {len(recent)} messages in {file}: {problem}")


def processes_of(cluster: Cluster) -> list[Process]:
    """Everybody who has a key."""
    found = []
    for file in (cluster.directory / "credentials").glob("*.nk"):
        name = file.stem
        role = {"up": "supervisor"}.get(name, name.rsplit("-", 1)[0].partition("-")[0])
        node = name.removeprefix("store-") if role in ("store", "prefill", "decode") else ""
        found.append(Process(name, role, node=node))
    return sorted(found, key=lambda process: process.name)


async def insider(cluster: Cluster, processes: list[Process]) -> Known:
    """What somebody knows who has read all streams."""
    nodes = sorted({process.node for process in processes if process.node})
    workers = [process.name for process in processes if process.role in ("prefill", "decode")]
    endings = {
        "worker_id": workers, "lender_id": workers, "node_id": nodes, "frontend_id": ["frontend-0"],
        "conductor_id": ["conductor-0", "conductor-1"], "target_id": [*workers, *nodes, "frontend-0"],
        "request_id": [], "order_id": [], "incarnation": [],
    }  # fmt: skip
    known = Known({name: list(values) for name, values in endings.items()})
    streams = (
        (subjects.EVENTS_STREAM, Event),
        (subjects.DECISIONS_STREAM, Ordered),
        (subjects.KV_STREAM, KvMessage),
    )
    for stream, kind in streams:
        for seq, _, payload in await cluster.raw(stream):
            with contextlib.suppress(MessageInvalid):  # nonsense of ours
                known.learn([decode(payload, kind)])
            if kind is Event:
                known.last_seq = seq
    return known


async def service(cluster: Cluster, load: Load) -> str:
    """What is still missing or held; "" when all is well."""
    async with aiohttp.ClientSession() as session:
        if problem := await load.probe(session):
            return problem
    conductors = await cluster.conductors(CONDUCTORS)
    if len(conductors) < CONDUCTORS or len({(state.seq, state.digest) for state in conductors}) > 1:
        return f"conductors: {[(state.conductor_id, state.seq, state.digest) for state in conductors]}"
    if conductors[0].requests_in_flight:
        return f"{conductors[0].requests_in_flight} requests are under way"
    held = {
        node: (
            status.holds,
            status.slots_reserved,
            status.slots_leased,
            status.slots_condemned,
            status.pushes_open,
        )
        for node, status in (await cluster.stores()).items()
    }
    return f"held: {held}" if any(map(any, held.values())) else ""


async def come_to_rest(cluster: Cluster, load: Load, seconds: float) -> float:
    """How long it took. Raises Found."""
    began = time.monotonic()
    while True:
        try:
            missing = await service(cluster, load)
        except Exception as problem:  # who does not answer is not there yet
            missing = f"{type(problem).__name__}: {problem}"
        if not missing:
            return time.monotonic() - began
        if time.monotonic() - began > seconds:
            raise Found(f"{seconds:.0f} s afterwards: {missing}\n{await still_open(cluster)}")
        await asyncio.sleep(0.5)


async def still_open(cluster: Cluster) -> str:
    """Requests that conductors know, each with its order: what a core makes of the log."""
    core = Core()
    for seq, at_ns, payload in await cluster.raw(subjects.EVENTS_STREAM):
        with contextlib.suppress(MessageInvalid):
            event = decode(payload, Event)
            core.step(Stamped(seq=seq, at_ns=at_ns, event=event))
    return "\n".join(
        f"{request} {core.state.orders.get(request.order_id)}" for request in core.state.requests.values()
    )[:4000]


async def join_again(cluster: Cluster, processes: list[Process]) -> None:
    """A conductor's order to everybody of whom lies may be believed."""
    bus = await cluster.bus("conductor-0")
    seq = await bus.last_seq(subjects.EVENTS_STREAM)
    for process in processes:
        if process.role in ("prefill", "decode", "frontend", "store"):
            target = process.node if process.role == "store" else process.name
            order = AnnounceYourself(role=process.role, target_id=target)  # type: ignore[arg-type]
            ordered = Ordered(cause_seq=seq, position=1_000, decision=order)
            await bus.nc.publish(subjects.decision(target, "AnnounceYourself"), encode(ordered))
    await bus.nc.flush()
    await bus.close()


async def play(cluster: Cluster, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The figures. Raises Found."""
    draw, processes = random.Random(args.seed), processes_of(cluster)
    ids = [*{process.name for process in processes} | {process.node for process in processes if process.node}]
    places = places_of(processes, sorted([*ids, subjects.CONDUCTORS]))
    load, outputs = Load(cluster, draw, CLIENTS, steady=True), Outputs(cluster)
    await load.learn()
    pids = sorted(children(cluster.process.pid))
    grown, figures = Grown(cluster.process.pid), dict[str, Any]()
    for name, make, strict in (("broken", broken, True), ("lies", lie, False)):
        load = load.again()
        known = await insider(cluster, processes)
        attack = Attack(cluster, known, outputs, make)
        loading = asyncio.create_task(load.run())
        try:
            await asyncio.to_thread(attack.run, draw, places, args.seconds / 2, args.inputs // 2)
        finally:
            load.stop()
            await loading
        bad = load.wrong if strict else [each for each in load.wrong if each.startswith("never ended")]
        unanswered = {how: count for how, count in load.ended.items() if strict and how != "finished"}
        if bad or unanswered:
            raise Found(f"{name}: of the clients' requests: {bad} {unanswered}")
        if not strict:
            await join_again(cluster, processes)
        rest_s = await come_to_rest(cluster, load, REST_S)
        if (now := sorted(children(cluster.process.pid))) != pids:
            raise Found(f"{name}: processes were {pids} and are {now}")
        figures[name] = {
            "inputs": attack.outcomes.total(),
            "by_role": dict(sorted(attack.sent.items())),
            "outcomes": dict(attack.outcomes),
            "requests": dict(load.ended),
            "at_rest_s": round(rest_s, 1),
        }
        if strict:
            figures["replay"] = await asyncio.to_thread(replayed, cluster, scratch)
            grown.warm()
    if problem := outputs.problem() or grown.problem():
        raise Found(problem)
    return figures | {"lines_written": dict(outputs.lines), "held": grown.figures()}


def on_a_cluster(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The figures of one that stops by itself and leaves nothing. Raises Found."""
    state = scratch / "state"
    state.mkdir()
    cluster = start(state, *FLAGS, *PATIENCE)
    try:
        figures = asyncio.run(play(cluster, args, scratch))
    finally:
        status = cluster.stop()
        if args.keep is not None:
            shutil.copytree(state, args.keep, dirs_exist_ok=True)
    if left := [*cluster.left_behind(), *([f"status {status}"] if status else [])]:
        raise Found(f"at the end: {left}")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of inputs, both kinds together")
    parser.add_argument("--inputs", type=int, default=1 << 40, help="at most so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="what the processes wrote is copied there")
    args = parser.parse_args()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    figures: dict[str, Any] = {"code_version": code_version(), "seed": args.seed}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            figures |= on_a_cluster(args, Path(scratch))
        except (Found, AssertionError) as problem:
            print(json.dumps(figures), f"FOUND: {problem}", sep="\n")
            return 1
    print(json.dumps(figures), "nothing was found", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
