"""`python tests/chaos/exhaustion.py`: a real cluster under load runs out of one resource after another.

In each case a resource is taken away for some seconds and given back. Printed is what requests met meanwhile, and how
long full service took from the relief on: every process is there and an answer is right. A case fails above
`SERVICE_S_MAX`, at a wrong text, and at a request without an end. Root is needed: the cluster gets a /dev/shm and a
file system for its output that are its own, in a mount namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp

from tests.chaos.live_load import Load
from tests.cluster.harness import START_S, Cluster, running

FLAGS = ("--pool-mib", "192", "--ttft-slo-ms", "600000", "--tbt-slo-ms", "60000")
SHM_MIB = 1_000
DRY_S = 8.0
SERVICE_S_MAX = 10.0
IN_NAMESPACE = "HALFMOON_EXHAUSTION"
ROLES = ["decode"] * 2 + ["frontend"] + ["prefill"] * 2 + ["store"] * 4


class Machine:
    """The cluster's resources: each is away inside a `with` block."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @contextlib.contextmanager
    def descriptors(self, name: str) -> Iterator[None]:
        """No file descriptor is left to the process."""
        pid = self.cluster.pid(name)
        with self._limited(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd"))):
            yield

    @contextlib.contextmanager
    def memory(self, name: str) -> Iterator[None]:
        """No address space is left to the process."""
        pid = self.cluster.pid(name)
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        with self._limited(pid, resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE")):
            yield

    @contextlib.contextmanager
    def _limited(self, pid: int, kind: int, limit: int) -> Iterator[None]:
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (limit, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, kind, before)

    @contextlib.contextmanager
    def shared_memory(self, name: str) -> Iterator[None]:
        """/dev/shm is full, and a store agent that needs its pool anew is killed."""
        with filled(Path("/dev/shm")):
            self.cluster.kill(name)
            time.sleep(0.5)
            # What the agent let go of is taken as well: there is no room for its pool until the end.
            with filled(Path("/dev/shm"), "more"):
                yield

    @contextlib.contextmanager
    def output_disk(self, name: str) -> Iterator[None]:
        """The file system below the processes' output is full, and a process is killed: it must be started again."""
        with filled(self.cluster.directory / "output"):
            self.cluster.kill(name)
            yield


@contextlib.contextmanager
def filled(directory: Path, name: str = "ballast") -> Iterator[None]:
    """Full to the last byte."""
    ballast = directory / name
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    try:
        yield
    finally:
        ballast.unlink()


async def in_service(cluster: Cluster, load: Load) -> str:
    """What is still missing; "" when every process is there and an answer is right."""
    state = await cluster.status()
    roles = sorted(node["role"] for node in state["nodes"] if node["state"] == "ready")
    if roles != ROLES:
        return f"there are {roles}"
    async with aiohttp.ClientSession() as session:
        return await load.probe(session)


async def play(cluster: Cluster, load: Load, case: Callable[[], Any]) -> dict[str, Any]:
    """One case, under load: what requests met while the resource was away, and the time to full service."""
    load.frontend_hit_at = time.monotonic()
    loading = asyncio.create_task(load.run())
    await asyncio.sleep(1.0)
    with case():
        await asyncio.sleep(DRY_S)
    relief = time.monotonic()
    load.frontend_hit_at = relief
    missing, last = "not looked yet", ""
    asked = relief
    while missing and time.monotonic() - relief < START_S:
        asked = time.monotonic()
        try:
            missing = await in_service(cluster, load)
        except Exception as problem:  # a process that is just starting
            missing = f"{type(problem).__name__}: {problem}"
        last = missing or last
        if missing:
            await asyncio.sleep(0.1)
    # Service is there from when the request was asked that was served; how long it then took is the machine's affair.
    service_s = asked - relief
    load.stop()
    await loading
    return {
        "requests": dict(sorted(load.ended.items())),
        "service_s": round(service_s, 1),
        "last_missing": last,
        "wrong": [*load.wrong, *([] if not missing else [missing])],
    }


async def too_large(cluster: Cluster) -> dict[str, Any]:
    """A body beyond what NATS carries: one clear error, and the next request is served."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "moon " * 4_000_000, "max_tokens": 1}
        async with session.post(f"{cluster.http}/v1/completions", json=body) as reply:
            status, text = reply.status, (await reply.text())[:200]
    clear = 400 <= status < 500 and "error" in text
    return {"status": status, "said": text, "wrong": [] if clear else ["no clear error"]}


def refused(*flags: str) -> str:
    """What `halfmoon up` says where it cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.main", "up", "--cluster", "refused", *flags],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 1, (done.returncode, done.stderr[-500:])
    return done.stdout + done.stderr


def at_start() -> dict[str, dict[str, Any]]:
    """A /dev/shm that is too small from the beginning is refused by its name."""
    said = refused("--pool-mib", "4096")
    lines = [line for line in said.splitlines() if "/dev/shm" in line]
    return {"shared memory at start": {"said": lines[-1:], "wrong": [] if lines else [said[-300:]]}}


def tier_said(cluster: Cluster) -> dict[str, Any]:
    """The cluster serves without the SSD tier that its disk cannot hold, and says so."""
    lines = [line for line in cluster.output("store-prefill-0").splitlines() if "ssd" in line.lower()]
    return {"said": lines[-1:], "wrong": [] if lines else ["nothing is said of the SSD"]}


async def all_cases(cluster: Cluster, chosen: str) -> dict[str, dict[str, Any]]:
    machine, load = Machine(cluster), Load(cluster, random.Random(1), 2)
    await load.learn()
    cases: dict[str, Callable[[], Any]] = {
        "descriptors of the frontend": lambda: machine.descriptors("frontend-0"),
        "descriptors of a store agent": lambda: machine.descriptors("store-prefill-0"),
        "descriptors of a decode worker": lambda: machine.descriptors("decode-0"),
        "memory of a prefill worker": lambda: machine.memory("prefill-0"),
        "memory of a decode worker": lambda: machine.memory("decode-1"),
        "memory of the frontend": lambda: machine.memory("frontend-0"),
        "shared memory": lambda: machine.shared_memory("store-decode-0"),
        "disk of output": lambda: machine.output_disk("decode-0"),
    }
    found = {}
    for name, case in cases.items():
        if chosen in name:
            load = load.again()
            found[name] = await play(cluster, load, case)
            print(json.dumps({name: found[name]}), flush=True)
    found["payload"] = await too_large(cluster)
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
    mount("/dev/shm", SHM_MIB)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        os.environ["XDG_STATE_HOME"] = directory
        (scratch / "ssd").mkdir()
        mount(str(scratch / "ssd"), 64)
        try:
            found = at_start()
            tier = ("--ssd", str(scratch / "ssd"), "--ssd-bytes", "8000000000")
            with running(scratch, *FLAGS, *tier) as cluster:
                found["disk of the SSD tier"] = tier_said(cluster)
                found |= asyncio.run(all_cases(cluster, args.only))
        finally:
            subprocess.run(["umount", "-l", str(scratch / "ssd")], check=True)
    slow = [name for name, case in found.items() if case.get("service_s", 0) > SERVICE_S_MAX]
    wrong = {name: case["wrong"] for name, case in found.items() if case["wrong"]}
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(f"slower than {SERVICE_S_MAX:.0f} s: {slow}; wrong: {wrong}")
    return 1 if slow or wrong else 0


def mount(where: str, mib: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "halfmoon-test", where], check=True)


if __name__ == "__main__":
    sys.exit(main())
