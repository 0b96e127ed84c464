"""Digest exchange: conductors say the digests of their states in the log and compare them, and save snapshots.

A snapshot is saved at some of the places where digests are compared, and only when ours was not refuted there. All
decisions up to that place are stored first, so a conductor that starts from it never has to make them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from halfmoon.bus import snapshots
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.bus.tasks import end_tasks
from halfmoon.conductor.code_version import code_version
from halfmoon.conductor.core.machine import SNAPSHOT_VERSION, Core
from halfmoon.conductor.live.agreement import Agreement, Verdict
from halfmoon.conductor.log_reading import digest_at
from halfmoon.schemas.codec import digest
from halfmoon.schemas.events import StateDigested

log = logging.getLogger(__name__)

#: How long the others have to say theirs before a difference is judged.
VOTE_S = 0.5
#: Digests from one snapshot to the next, and the number of snapshots that stay.
SNAPSHOT_DIGESTS = 2
SNAPSHOTS_KEPT = 3
SETTLE_S = 30.0


class Diverged(Exception):
    """This conductor's state is not the others', and it is for this one to stop."""


class DigestExchange:
    """The part of one conductor in the exchange. `failed` gets Diverged, once."""

    def __init__(self, bus: Bus, core: Core, *, conductor_id: str, incarnation: str) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus = bus
        self._core = core
        self._conductor_id = conductor_id
        self._incarnation = incarnation
        self._agreement = Agreement(conductor_id, incarnation, code_version())
        self._judging: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def compute(self, *, live: bool) -> None:
        """Compute the digest at the core's place in the log; `live`: the log has been read, so say it too."""
        core = self._core
        at_seq, snapshot = core.seq, core.snapshot()
        name = digest(snapshot)
        self._agreement.computed(at_seq, name)
        if not live:
            return
        event = StateDigested(
            conductor_id=self._conductor_id,
            incarnation=self._incarnation,
            code_version=code_version(),
            at_seq=at_seq,
            digest=name,
        )
        self._bus.append_soon(event, source_id=self._conductor_id)
        if at_seq // core.state.policy.digest_events % SNAPSHOT_DIGESTS == 0:
            self._spawn(self._save(at_seq, snapshot))

    def hear(self, event: StateDigested) -> bool:
        """Take a conductor's digest (ours too) from the log. True when it is known to differ from ours."""
        differs = self._agreement.heard(event)
        if differs and event.at_seq not in self._judging:
            self._judging.add(event.at_seq)
            self._spawn(self._judge(event.at_seq))
        return differs

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        self.failed.cancel()

    async def _judge(self, at_seq: int) -> None:
        await asyncio.sleep(VOTE_S)
        # A digest that comes later is judged anew.
        self._judging.discard(at_seq)
        agreement = self._agreement
        verdict = agreement.verdict(at_seq)
        differ = f"the conductors' states differ after event {at_seq}: {agreement.describe(at_seq)}"
        if verdict is Verdict.MINORITY:
            self._fail(f"{differ}; {self._conductor_id} is in the minority and stops deciding")
        elif verdict is Verdict.MAJORITY:
            log.error("%s; %s is in the majority and goes on", differ, self._conductor_id)
        elif verdict is Verdict.TIE:
            log.error("%s; %s reads the log again to see which is right", differ, self._conductor_id)
            await self._check_self(at_seq, differ)

    async def _check_self(self, at_seq: int, differ: str) -> None:
        ours = self._agreement.own(at_seq)
        try:
            again = await digest_at(self._bus, at_seq)
        except BusError as problem:
            log.error("the log cannot be read again now: %s", problem)
            return
        if again != ours:
            found = f"finds {again} there" if again else "does not reach back so far"
            self._fail(f"{differ}; a fresh reading of the log {found}: {self._conductor_id} stops deciding")
        elif self._agreement.yields(at_seq, self._core.state.code_version):
            self._fail(
                f"{differ}; {self._conductor_id} runs other code ({code_version()}) and stops deciding"
            )
        else:
            log.error(
                "%s; a fresh reading of the log agrees with %s, which goes on", differ, self._conductor_id
            )

    def _fail(self, reason: str) -> None:
        log.error("%s", reason)
        if not self.failed.done():
            self.failed.set_exception(Diverged(reason))

    async def _save(self, at_seq: int, snapshot: bytes) -> None:
        try:
            settled = await self._bus.settle(SETTLE_S)
            await asyncio.sleep(2 * VOTE_S)
            if settled and self._agreement.verdict(at_seq) in (Verdict.AGREED, Verdict.MAJORITY):
                await snapshots.save(
                    self._bus, at_seq, snapshot, version=SNAPSHOT_VERSION, code_version=code_version()
                )
                await snapshots.prune(self._bus, SNAPSHOTS_KEPT)
        except BusError as problem:
            log.warning("the state after event %d is not saved: %s", at_seq, problem)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
