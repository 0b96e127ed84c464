"""Keeps the nats-server of `halfmoon up` alive: started again when it dies, and when it lives and stores nothing.

After one write to a full disk nats-server stores nothing more in that stream, without an answer, until it is started
again, however much room there is by then. So it is started again when there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable

from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.errors import BusError, BusUnreachable
from halfmoon.bus.tasks import end_tasks
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.live.bootstrap import bootstrap_core
from halfmoon.conductor.log_reading import LogUnreadable
from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus, StatusRequest

#: Between two looks at nats-server.
LOOK_S = 0.1
#: Between two attempts to start it, when it does not stay.
PAUSE_S_MAX = 1.0
#: Between two looks at whether it stores, and for an answer to that.
ASK_S = 1.0
#: Heartbeats are stored every second: with nothing new for this time the server does not store.
UNSTORED_S = 10.0
#: It is not started again for this reason before it had this time to prove itself.
TRIAL_S = 20.0
#: With less than this, writing has failed or is about to.
FULL_BYTES = 1 << 20


async def begin_log(bus: Bus, policy: Policy) -> None:
    """Appends the log's first event, with `policy`, where there is none. Raises OptionInvalid for a log that cannot be
    read, and BusError.
    """
    try:
        await bootstrap_core(bus, "up", policy)
    except LogUnreadable as problem:
        raise OptionInvalid(str(problem)) from None


class LogServer:
    """`run` is a task for as long as the cluster runs. `free_bytes_min`: with less free, frontends take nothing new."""

    def __init__(self, server: EmbeddedServer, say: Callable[[str], None], *, free_bytes_min: int) -> None:
        self.server = server
        self._say = say
        self._free_bytes_min = free_bytes_min
        self._pause_s = LOOK_S
        self._started_at = time.monotonic()
        #: Last sequence of the event log, and when it was seen to have moved.
        self._moved = (0, time.monotonic())
        self._was_full = False
        self._low = False
        self._told_unstored = False
        #: Processes have joined: their heartbeats are to be stored.
        self.expects_events = False

    async def run(self, bus: Bus) -> None:
        """Endless."""
        watching = asyncio.create_task(self._watch(bus))
        try:
            while True:
                await asyncio.sleep(self._pause_s)
                if (status := self.server.process.poll()) is not None:
                    await self._start_again(status)
                elif time.monotonic() - self._started_at > TRIAL_S:
                    self._pause_s = LOOK_S
        finally:
            await end_tasks([watching])

    async def _start_again(self, status: int) -> None:
        """At the same address, and every process reconnects by itself."""
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        output = self.server.directory / "nats.log"
        self._say(f"nats-server died ({how}); it is started again. Its output: {output}")
        self._started_at = time.monotonic()
        self._moved = (0, self._started_at)
        self._was_full = False
        try:
            self.server.launch_again()
            await asyncio.to_thread(self.server.wait)
        except (
            BusUnreachable,
            OSError,
            RuntimeError,
            MemoryError,
        ) as problem:
            # No file, thread or memory for it.
            self._say(str(problem))
            self._pause_s = min(PAUSE_S_MAX, self._pause_s * 2)

    async def _watch(self, bus: Bus) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            free_bytes = self._look_at_disk()
            unstored_s = await self._unstored_s(bus)
            if unstored_s > UNSTORED_S and not self._told_unstored:
                self._say(f"nats-server has stored nothing for {unstored_s:.0f} s; new requests are refused")
            self._told_unstored = unstored_s > UNSTORED_S
            # The server does not report the streams that failed while the disk was full; unused ones fail later.
            if free_bytes > max(FULL_BYTES, self._free_bytes_min) and (
                self._was_full or (self._told_unstored and time.monotonic() - self._started_at > TRIAL_S)
            ):
                self._say("nats-server stores nothing though there is room: it is killed and started again")
                self._was_full = False
                self._started_at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.server.process.pid, signal.SIGKILL)

    def _look_at_disk(self) -> int:
        """Bytes free where the log is; 0 where that is not to be seen."""
        try:
            free_bytes = shutil.disk_usage(self.server.directory).free
        except OSError:
            return 0
        self._was_full = self._was_full or free_bytes < FULL_BYTES
        if (low := free_bytes < self._free_bytes_min) != self._low:
            self._low = low
            left = f"the disk of the event log has {free_bytes >> 20} MiB left"
            self._say(f"{left}; new requests are refused" if low else f"{left}: requests are taken again")
        return free_bytes

    async def _unstored_s(self, bus: Bus) -> float:
        """Time for which nothing was stored: no event, or no message of conductors that wait for it."""
        with contextlib.suppress(BusError):
            if (last_seq := await bus.last_seq()) != self._moved[0] or not self.expects_events:
                self._moved = last_seq, time.monotonic()
        conductors_s = 0.0
        with contextlib.suppress(BusError):
            answer = await bus.request(
                subjects.status(subjects.CONDUCTORS), StatusRequest(), ConductorStatus, timeout_s=ASK_S
            )
            conductors_s = answer.unstored_ns / SECOND_NS
        return max(time.monotonic() - self._moved[1], conductors_s)
