"""Child processes of `halfmoon up`: started, watched, started again, ended. None outlives the parent.

The kernel kills every child when the parent dies (PR_SET_PDEATHSIG), so `kill -9` of `halfmoon up` leaves no
process. A child that dies is announced at once (the conductor need not wait for its heartbeat to lapse) and
started again with a growing pause. Each is forked from a process that has its modules, and of a worker the model, where
there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from halfmoon.bus.embedded import die_with_parent
from halfmoon.cli.local.fork_messages import ForkedKind, ForkRequest
from halfmoon.cli.local.forked import ForkedProcess, ForkServerLost, ForkServers, end
from halfmoon.cli.local.output_log import OutputLog, lines_of
from halfmoon.schemas.roles import WORKER_ROLES, ProcessRole

PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 2.0
#: Pause between two attempts where the machine gives no process: each costs next to nothing.
LAUNCH_PAUSE_S = 0.5
STEADY_S = 30.0


@dataclass
class Child:
    """One process of the cluster. `name` is its id on the bus as well."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | ForkedProcess | None = None
    started_at: float = 0.0
    pause_s: float = PAUSE_S_MIN
    restarts: int = 0
    watcher: asyncio.Task[None] | None = None

    @property
    def role(self) -> ProcessRole:
        """The command that it runs."""
        role: ProcessRole = self.command[0]  # type: ignore[assignment]
        return role

    @property
    def forked_kind(self) -> ForkedKind:
        return "worker" if self.role in WORKER_ROLES else "other"


class Supervisor:
    """`on_death(child, status)` is called at each death that was not asked for."""

    def __init__(
        self,
        on_death: Callable[[Child, int], None],
        on_line: Callable[[Child, str], None],
        fork_servers: ForkServers | None = None,
    ) -> None:
        self.children: dict[str, Child] = {}
        self._on_death = on_death
        self._on_line = on_line
        self._stopping: set[str] = set()
        self._fork_servers = fork_servers or ForkServers()
        self._ending = False

    async def start(self, child: Child) -> None:
        """One that is forked is launched by its watcher: others need not wait until its model is loaded."""
        self.children[child.name] = child
        if child.forked_kind not in self._fork_servers.running:
            await self._launch(child)
        child.watcher = asyncio.create_task(self._watch(child))

    async def _launch(self, child: Child) -> None:
        child.started_at = time.monotonic()
        if (server := self._fork_servers.running.get(child.forked_kind)) is not None:
            try:
                model = self._fork_servers.model if child.forked_kind == "worker" else None
                child.process = await server.fork(ForkRequest(child.command, child.environment, model))
            except ForkServerLost:
                if self._ending:
                    raise
                self._fork_servers.close(child.forked_kind)
                self._on_line(child, "warning: there is nothing to fork it from: it starts by itself")
            else:
                return
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "halfmoon.cli.main",
            *child.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **child.environment, "PYTHONUNBUFFERED": "1"},
            preexec_fn=die_with_parent,
            # Ctrl-C goes to the terminal's whole process group; children end by SIGTERM only, in a drain's order.
            start_new_session=True,
        )

    async def _launch_again(self, child: Child) -> bool:
        """Try until the machine gives descriptors, memory and a process. False: the supervisor stops meanwhile."""
        said = ""
        while child.name not in self._stopping:
            try:
                await self._launch(child)
                _kill_unknown(child)
                if child.name in self._stopping:  # there was nothing to signal before
                    _signal(child, signal.SIGTERM)
                return True
            except ForkServerLost:
                return False
            except (OSError, RuntimeError, MemoryError) as problem:  # RuntimeError: no thread can be started
                _kill_unknown(child)
                if (why := str(problem) or type(problem).__name__) != said:
                    said = why
                    self._on_line(child, f"warning: cannot be started now: {why}")
                await asyncio.sleep(LAUNCH_PAUSE_S)
        return False

    async def _watch(self, child: Child) -> None:
        if child.process is None and not await self._launch_again(child):
            return
        while True:
            process = child.process
            assert process is not None
            assert process.stdout is not None
            with contextlib.closing(OutputLog(child.log)) as log:
                async for line in lines_of(process.stdout):
                    log.write(line)
                    self._on_line(child, line)
            status = await process.wait()
            if child.name in self._stopping:
                return
            self._on_death(child, status)
            if time.monotonic() - child.started_at > STEADY_S:
                child.pause_s = PAUSE_S_MIN
            await asyncio.sleep(child.pause_s)
            child.pause_s = min(PAUSE_S_MAX, child.pause_s * 2)
            # Once more: `stop` finds no process to signal during the pause, and waits for this watcher.
            if child.name in self._stopping:
                return
            child.restarts += 1
            if not await self._launch_again(child):
                return

    async def stop(self, names: list[str], *, within_s: float) -> None:
        """End these children together: SIGTERM, then SIGKILL when time is over."""
        self._stopping.update(names)
        chosen = [self.children[name] for name in names if name in self.children]
        for child in chosen:
            _signal(child, signal.SIGTERM)
        watchers = [child.watcher for child in chosen if child.watcher]
        if watchers:
            _, late = await asyncio.wait(watchers, timeout=within_s)
            if late:
                self.kill(names)
                await asyncio.wait(watchers, timeout=5)
        for child in chosen:
            if child.watcher:
                child.watcher.cancel()

    def end_launches(self) -> None:
        """The cluster is to stop: what waits to be forked is not started any more."""
        self._ending = True
        self._fork_servers.close()

    def kill(self, names: list[str] | None = None) -> None:
        for name in names or list(self.children):
            self._stopping.add(name)
            if name in self.children:
                _signal(self.children[name], signal.SIGKILL)


def _kill_unknown(child: Child) -> None:
    """Ends processes that began as this child and are not watched: there was no thread or descriptor left for that."""
    known = child.process.pid if child.process is not None else 0
    with contextlib.suppress(OSError):  # no descriptor to look with: at the next attempt
        for task in Path("/proc/self/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if pid != known and words[3 : 3 + len(child.command)] == child.command:
                    end(pid)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)
