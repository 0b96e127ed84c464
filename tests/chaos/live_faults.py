"""What goes wrong in a live cluster: kills, stops, cuts, changes of role and a full disk, drawn one after another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from halfmoon.schemas.roles import ELASTIC_ROLES
from tests.chaos.cuts import Cut
from tests.chaos.live_load import Load
from tests.cluster.harness import Cluster, children

#: Between two faults there is at least so much.
PAUSE_S_MIN = 1.0
STOP_S_MAX = 8.0
#: One stop in so many lasts longer than every lease and deadline.
LONG_STOP_SHARE, LONG_STOP_S = 0.05, 65.0
CUT_S_MAX = 12.0
FULL_S_MAX = 6.0
CHANGE_S_MAX = 60.0


@dataclass
class Faults:
    """Strikes about every `every_s`. `disk`: the small file system that holds the cluster's files, if there is one."""

    cluster: Cluster
    load: Load
    draw: random.Random
    every_s: float
    disk: Path | None
    counts: Counter[str]

    async def strike(self, seconds: float) -> None:
        """One fault after another; those that last are undone after a while."""
        until = time.monotonic() + seconds
        lasting: list[asyncio.Task[None]] = []
        kinds: list[Callable[[str], Awaitable[asyncio.Task[None] | None]]] = [
            *[self._kill] * 8,
            *[self._stop] * 5,
            *[self._cut] * 5,
            *[self._change_role] * 3,
        ]
        if self.disk is not None:
            kinds += [self._fill] * 2
        while time.monotonic() < until:
            await asyncio.sleep(max(PAUSE_S_MIN, self.draw.expovariate(1 / self.every_s)))
            name = self.draw.choice(["nats-server", *self.cluster.names()])
            with contextlib.suppress(AssertionError, StopIteration, OSError):
                # It is just being started again.
                if (task := await self.draw.choice(kinds)(name)) is not None:
                    lasting.append(task)
        await asyncio.gather(*lasting)

    def _pid(self, name: str) -> int:
        return self.cluster.server_pid() if name == "nats-server" else self.cluster.pid(name)

    def _count(self, kind: str, name: str) -> None:
        role = name.rpartition("-")[0] if name[-1].isdigit() else name
        role = "store" if role.startswith("store") else role
        if role in ("frontend", "nats-server"):
            self.load.frontend_hit_at = time.monotonic()
        self.counts[f"{kind}: {role}"] += 1

    async def _kill(self, name: str) -> None:
        os.kill(self._pid(name), signal.SIGKILL)
        self._count("killed", name)

    async def _stop(self, name: str) -> asyncio.Task[None]:
        pid, long = self._pid(name), self.draw.random() < LONG_STOP_SHARE
        os.kill(pid, signal.SIGSTOP)
        self._count("stopped for long" if long else "stopped", name)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return self._later(name, LONG_STOP_S if long else self.draw.uniform(0.1, STOP_S_MAX), go_on)

    async def _cut(self, name: str) -> asyncio.Task[None]:
        """Every connection that it has now falls silent; new ones are not hindered."""
        pid, top = self._pid(name), self.cluster.process.pid
        cut = Cut(pid, [top, *(other for other in children(top) if other != pid)])
        self._count("cut off", name)
        return self._later(name, self.draw.uniform(1.0, CUT_S_MAX), cut.mend)

    async def _change_role(self, _: str) -> asyncio.Task[None] | None:
        """As an operator does; it may be refused, and whoever is to change may be killed while it finishes."""
        states = await self.cluster.conductors(1)
        workers = [node for node in states[0].nodes if node.role in ELASTIC_ROLES] if states else []
        if not workers:
            return None
        worker = self.draw.choice(workers)
        role = next(role for role in ELASTIC_ROLES if role != worker.role)
        program = [sys.executable, "-m", "halfmoon.cli.main", "role", worker.id, role]
        changing = await asyncio.create_subprocess_exec(
            *program,
            "--cluster",
            self.cluster.name,
            "--timeout-s",
            f"{CHANGE_S_MAX}",
            env=self.cluster.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        async def told() -> None:
            self._count("role not changed" if await changing.wait() else "role changed", worker.id)

        return asyncio.create_task(told())

    async def _fill(self, _: str) -> asyncio.Task[None]:
        """The disk of log, streams and output is full to the last byte."""
        assert self.disk is not None
        # Of its own: the disk may be struck again before this is undone.
        ballast = self.disk / f"ballast-{self.counts['disk full: nats-server']}"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        self._count("disk full", "nats-server")
        return self._later("nats-server", self.draw.uniform(1.0, FULL_S_MAX), lambda: ballast.unlink())

    def _later(self, name: str, after_s: float, undo: Callable[[], None]) -> asyncio.Task[None]:
        hit = name.startswith(("frontend", "nats-server"))
        self.load.lasting += hit

        async def wait() -> None:
            await asyncio.sleep(after_s)
            undo()
            if hit:
                self.load.frontend_hit_at = time.monotonic()
                self.load.lasting -= 1

        return asyncio.create_task(wait())


@contextlib.contextmanager
def small_disk(directory: Path, mib: int):  # type: ignore[no-untyped-def]
    """A file system of its own for a `with` block; None where this user may not mount one."""
    directory.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "halfmoon-chaos", str(directory)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        yield None
        return
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False)
