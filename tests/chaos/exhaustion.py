"""`python tests/chaos/exhaustion.py`: a real cluster under load runs out of one resource after another.

In each case a resource is taken away for some seconds and given back; it is looked all the while that nothing of it
is left (`exhaustion_machine.py`). Printed is what requests met meanwhile, and how long full service took from the
relief on: every process is there and an answer is right. A case fails above `SERVICE_S_MAX`, where the resource was
not dry, at a wrong text, and at a request without an end. Root is needed: the cluster gets a /dev/shm and file systems
for its log, its output and its SSD tier that are its own, in a mount namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp

from benchmarks.measured import SERVING, beside, keep
from tests.chaos.exhaustion_clients import pending_bytes, too_large
from tests.chaos.exhaustion_machine import Machine, Shortage
from tests.chaos.live_load import Load
from tests.cluster.harness import Cluster, start
from tests.eventually import BOUND_S, Late, eventually

#: Until `halfmoon up` has said that it cannot start.
REFUSED_S = 180.0
FLAGS = ("--pool-mib", "192", "--ttft-slo-ms", "600000", "--tbt-slo-ms", "60000")
SHM_MIB, STATE_MIB, OUTPUT_MIB, SSD_MIB = 1_000, 512, 64, 400
TIER_BYTES = 64_000_000
CLIENTS = 3
DRY_S = 8.0
LOOK_S = 0.1
#: Of the looks at a resource, so many must have found nothing of it: a disk is full between two writes only.
DRY_SHARE = 0.9
SERVICE_S_MAX = 10.0
IN_NAMESPACE = "HALFMOON_EXHAUSTION"
ROLES = ["decode"] * 2 + ["frontend"] + ["prefill"] * 2 + ["store"] * 4
Case = Callable[[], AbstractContextManager[Shortage]]
Found = dict[str, Any]


async def in_service(cluster: Cluster, load: Load, tiers: Path) -> str:
    """What is still missing; "" when every process and tier is there and an answer is right."""
    state = await cluster.status()
    roles = sorted(node["role"] for node in state["nodes"] if node["state"] == "ready")
    if roles != ROLES:
        return f"there are {roles}"
    if (count := _tiers(tiers)) != ROLES.count("store"):
        return f"there are {count} files of the SSD tier"
    async with aiohttp.ClientSession() as session:
        return await load.probe(session)


def _tiers(directory: Path) -> int:
    """Files of the tier that have their size."""
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return sum(size > TIER_BYTES // 2 for size in sizes)


async def play(cluster: Cluster, load: Load, tiers: Path, name: str, case: Case) -> Found:
    """One case, under load: what requests met while the resource was away, and the time to full service.

    The resource is away for DRY_S, and until somebody has asked for some of it.
    """
    load.frontend_hit_at = time.monotonic()
    loading = asyncio.create_task(load.run())
    await eventually(lambda: load.ended, "the load's first request has ended")
    peace_s = await _peace_s(load)
    said = _Output(cluster)
    wrong: list[str] = []
    looks: list[str] = []
    relieved = asyncio.Event()
    asking: asyncio.Task[dict[str, int]] | None = None
    # A client that loses its server, or its frontend, may miss what was under way to it.
    cut_off = not name.rpartition(": ")[2].startswith(("store-", "prefill-", "decode-", "conductor-"))
    load.lasting += cut_off
    try:
        with case() as shortage:
            until = time.monotonic() + DRY_S
            asking = asyncio.create_task(_ask_anew(load, relieved))
            while time.monotonic() < until:
                looks.append(shortage.left())
                await asyncio.sleep(LOOK_S)
            await eventually(shortage.met, "somebody has asked for what is away")
    except (AssertionError, Late) as problem:
        wrong.append(str(problem))
    finally:
        relieved.set()
        load.lasting -= cut_off
    relief = time.monotonic()
    load.frontend_hit_at = relief
    dry = sum(not look for look in looks)
    if dry < DRY_SHARE * len(looks):
        wrong.append(f"there was {next(filter(None, looks))}")
    service_s, missing = await _service(cluster, load, tiers, relief, peace_s)
    load.stop()
    await loading
    return {
        "dry": f"{dry} of {len(looks)} looks in {DRY_S:.0f} s",
        "requests": dict(sorted(load.ended.items())),
        "new_connections": await asking if asking is not None else {},
        "said": said.new(),
        "peace_s": round(peace_s, 1),
        "service_s": round(service_s, 1),
        "last_missing": missing,
        "wrong": [*wrong, *load.wrong, *([missing] if service_s >= BOUND_S else [])],
    }


async def _ask_anew(load: Load, relieved: asyncio.Event) -> dict[str, int]:
    """What clients are told that come while the resource is away, each over a connection of its own."""
    told: Counter[str] = Counter()

    async def ask() -> str:
        async with aiohttp.ClientSession() as session:
            return await load.probe(session)

    relief = asyncio.create_task(relieved.wait())
    while not relieved.is_set():
        asking = asyncio.create_task(ask())
        await asyncio.wait({asking, relief}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            told[asking.result()[:80] or "served"] += 1
            await asyncio.sleep(0.5)
        else:
            told["waits until the relief"] += 1
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    await relief
    return dict(told)


async def _peace_s(load: Load) -> float:
    """How long a short request takes under this load while nothing is missing: the machine's affair."""
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        problem = await load.probe(session)
    assert not problem, problem
    return time.monotonic() - began


async def _service(
    cluster: Cluster, load: Load, tiers: Path, relief: float, peace_s: float
) -> tuple[float, str]:
    """(seconds to full service, what was missing last): until a request was asked that was served, and until its
    answer was there but for the time that it takes in peace.
    """
    asked, last = relief, ""

    async def served() -> bool:
        nonlocal asked, last
        asked = time.monotonic()
        try:
            missing = await in_service(cluster, load, tiers)
        except Exception as problem:  # a process that is just starting
            missing = f"{type(problem).__name__}: {problem}"
        last = missing or last
        return not missing

    try:
        await eventually(served, "full service", every_s=0.1)
    except Late:
        return BOUND_S, last or "an answer"
    return max(asked - relief, time.monotonic() - relief - peace_s), last


class _Output:
    """What `halfmoon up` says from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self._file = cluster.directory.parents[1] / f"{cluster.name}.out"
        self._start = self._file.stat().st_size

    def new(self) -> list[str]:
        """The first lines, without times and paths."""
        with self._file.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").splitlines()
        return [line.partition("] ")[2].partition(" Its output:")[0][:160] for line in lines[:4]]


def refused(*flags: str) -> str:
    """What `halfmoon up` says where it cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.main", "up", "--cluster", "refused", *flags],
        capture_output=True,
        text=True,
        timeout=REFUSED_S,
        check=False,
    )
    assert done.returncode == 1, (done.returncode, done.stderr[-500:])
    return done.stdout + done.stderr


def at_start() -> Found:
    """A /dev/shm that is too small from the beginning is refused by its name."""
    said = refused("--pool-mib", "4096")
    lines = [line for line in said.splitlines() if "/dev/shm" in line]
    return {"said": lines[-1:], "wrong": [] if lines else [said[-300:]]}


def cases_of(machine: Machine, tiers: Path) -> dict[str, Case]:
    directory = machine.cluster.directory
    cases: dict[str, Case] = {}
    for name in ("frontend-0", "store-prefill-0", "decode-0", "conductor-0", "nats-server"):
        cases[f"descriptors: {name}"] = lambda name=name: machine.descriptors(name)
    cases["descriptors: halfmoon up"] = lambda: machine.descriptors("halfmoon up", kill="decode-0")
    for name in ("frontend-0", "store-prefill-0", "prefill-0", "decode-1", "conductor-0", "nats-server"):
        cases[f"memory: {name}"] = lambda name=name: machine.memory(name)
    for name in ("frontend-0", "prefill-1", "decode-0"):
        cases[f"address space: {name}"] = lambda name=name: machine.address_space(name)
    cases["shared memory"] = lambda: machine.disk(Path("/dev/shm"), kill="store-decode-0")
    cases["disk of the log"] = lambda: machine.disk(directory / "nats")
    cases["disk of the SSD tier"] = lambda: machine.tier_disk(tiers)
    cases["disk of output"] = lambda: machine.disk(directory / "output", kill="decode-0")
    cases["threads and processes"] = lambda: machine.tasks(kill="decode-1")
    return cases


async def all_cases(cluster: Cluster, tiers: Path, chosen: str) -> dict[str, Found]:
    load = Load(cluster, random.Random(1), CLIENTS)
    await load.learn()
    found: dict[str, Found] = {}
    for name, case in cases_of(Machine(cluster), tiers).items():
        if chosen in name:
            load = load.again()
            try:
                found[name] = await play(cluster, load, tiers, name, case)
            except Exception as problem:  # the other cases' figures stand
                found[name] = {"wrong": [f"{type(problem).__name__}: {problem}"]}
            print(json.dumps({name: found[name]}), flush=True)
    for name, client in (("payload of NATS", too_large), ("pending bytes of NATS", pending_bytes)):
        if chosen in name:
            load = load.again()
            loading = asyncio.create_task(load.run())
            peace_s = await _peace_s(load)
            try:
                found[name] = await client(cluster)
            except Exception as problem:  # the other cases' figures stand
                found[name] = {"wrong": [f"{type(problem).__name__}: {problem}"]}
            service_s, missing = await _service(cluster, load, tiers, time.monotonic(), peace_s)
            load.stop()
            await loading
            found[name] |= {
                "requests": dict(sorted(load.ended.items())),
                "peace_s": round(peace_s, 1),
                "service_s": round(service_s, 1),
                "last_missing": missing,
            }
            found[name]["wrong"] += load.wrong
            print(json.dumps({name: found[name]}), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the figures as JSON")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    args = parser.parse_args()
    if IN_NAMESPACE not in os.environ:
        if os.geteuid():
            print("exhaustion: skipped, since only root may give the cluster file systems of its own")
            return 0
        again = ["unshare", "-m", sys.executable, *sys.argv]
        return subprocess.run(again, env={**os.environ, IN_NAMESPACE: "1"}, check=False).returncode
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # a client tells of each lost connection
    with tempfile.TemporaryDirectory() as scratch:
        found = in_small_places(Path(scratch), args.only)
    slow = {
        name: case["service_s"] for name, case in found.items() if case.get("service_s", 0) > SERVICE_S_MAX
    }
    wrong = {name: case["wrong"] for name, case in found.items() if case["wrong"]}
    figures = {
        "service_s_max": SERVICE_S_MAX,
        "slower": slow,
        "wrong": wrong,
        "cases": found,
        "beside": beside(*SERVING),
    }
    if args.out is not None:
        keep(args.out, figures)
    print(f"{len(found)} cases; slower than {SERVICE_S_MAX:.0f} s: {slow}; wrong: {wrong}")
    return 1 if slow or wrong else 0


def in_small_places(scratch: Path, chosen: str) -> dict[str, Found]:
    """Every case, in file systems of its own."""
    name = f"dry{uuid.uuid4().hex[:8]}"
    state, tiers = scratch / "state", scratch / "ssd"
    output = state / "halfmoon" / name / "output"
    places = {Path("/dev/shm"): SHM_MIB, state: STATE_MIB, output: OUTPUT_MIB, tiers: SSD_MIB}
    os.environ["XDG_STATE_HOME"] = str(state)
    for place, mib in places.items():
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "halfmoon-test", str(place)], check=True
        )
    try:
        found = {"shared memory at start": at_start()} if chosen in "shared memory at start" else {}
        cluster = start(state, *FLAGS, "--ssd", str(tiers), "--ssd-bytes", str(TIER_BYTES), name=name)
        try:
            found |= asyncio.run(all_cases(cluster, tiers, chosen))
        finally:
            status = cluster.stop()
        found["end"] = {"wrong": [*cluster.left_behind(), *([f"status {status}"] if status else [])]}
    finally:
        for place in reversed(places):
            subprocess.run(["umount", "-l", str(place)], check=False)
    return found


if __name__ == "__main__":
    sys.exit(main())
