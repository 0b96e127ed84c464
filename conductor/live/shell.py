"""The live shell: the log in, decisions out, timers, status. All thought is in the core.

Its guarantees, and their reasons:

- A decision leaves only after the event that caused it is stored: events are read from the stream.
- Decisions leave in order, and are stored in that order: so when the stream holds decision (seq, position),
  it holds all before it, whichever conductor published them. A conductor that starts therefore steps over the
  log in silence up to the newest stored decision and publishes later ones. Others that run at the same time
  publish the same under the same identities, and the stream drops the second copy.
- A timer is appended under a name made of its key and time, so that all conductors' timers are one event. It
  fires only when the log that was there at the start has been read: an old timer may have fired long ago,
  further on.
- Timers go by the time of the log: that of the newest event, and on from there by this process's monotonic
  clock. So a wrong wall clock does no harm, and after a silence (the bus was down) nothing is due before
  something was heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError, BusOverloaded
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.tracing import Tracing
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live.bootstrap import bootstrap_core
from halfmoon.conductor.live.digest_exchange import DigestExchange
from halfmoon.conductor.live.metrics import Tally
from halfmoon.conductor.live.spans import decided
from halfmoon.conductor.live.timers import Timers
from halfmoon.conductor.log_reading import TURN_EVENTS, check_gap, check_version
from halfmoon.conductor.view.service import ViewService
from halfmoon.conductor.view.status import conductor_status
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    ChangeRole,
    Decision,
    EndMove,
    FailRequest,
    MoveKv,
    Ordered,
    RejectRequest,
    ReleaseOrder,
    ReplicateBlocks,
    SetTimer,
    StartDecode,
    StartMixed,
    StartPrefill,
    StartStage,
)
from halfmoon.schemas.events import ClusterConfigured, Stamped, StateDigested, TimerFired
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus, StatusRequest
from halfmoon.schemas.view import BlocksLocated, LocateBlocks

log = logging.getLogger(__name__)

TIMER_RETRY_S = 0.5
OVERLOAD_WAIT_S = 1.0


def target(decision: Decision) -> str:
    """The process that a decision is for."""
    match decision:
        case (
            StartPrefill()
            | StartDecode()
            | StartMixed()
            | StartStage()
            | MoveKv()
            | EndMove()
            | CancelOrder()
            | ChangeRole()
        ):
            return decision.worker_id
        case ReleaseOrder() | ReplicateBlocks():
            return decision.node_id
        case RejectRequest() | FailRequest():
            return decision.frontend_id
        case AnnounceYourself():
            return decision.target_id
        case SetTimer():
            raise AssertionError(("a timer is never published", decision))


class Shell:
    """One conductor on one bus."""

    def __init__(
        self,
        bus: Bus,
        core: Core,
        *,
        conductor_id: str,
        after: int | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.core = core
        self._tracing = tracing
        self._after = core.seq if after is None else after
        self.caught_up = asyncio.Event()
        #: Sees every event with its decisions.
        self.after_step: Callable[[Stamped, list[Decision]], None] | None = None
        self.tally = Tally()
        self._bus = bus
        self._conductor_id = conductor_id
        self._timers = Timers(core.timers)
        self._timers_changed = asyncio.Event()
        #: Time of the log, and the monotonic clock when it was that.
        self._heard: tuple[int, int] | None = None
        #: Identity of the newest decision that was stored before we started.
        self._published = (0, -1)
        self.view_service = ViewService(bus, core, conductor_id=conductor_id)
        self._digests = DigestExchange(
            bus, core, conductor_id=conductor_id, incarnation=uuid.uuid4().hex[:16]
        )

    async def run(self) -> None:
        last = await self._bus.last_decision()
        if last is not None:
            self._published = (last.cause_seq, last.position)
        for name in (self._conductor_id, subjects.CONDUCTORS):
            await self._bus.serve(subjects.status(name), StatusRequest, self._status)
        await self.view_service.serve()
        timers = asyncio.create_task(self._fire_timers())
        following = asyncio.create_task(self._follow())
        try:
            done, _ = await asyncio.wait(
                {following, timers, self._digests.failed}, return_when=asyncio.FIRST_COMPLETED
            )
            for future in done:
                future.result()
        finally:
            await end_tasks([following, timers])
            await self._digests.stop()

    async def _follow(self) -> None:
        # The log's last message may be no event, and nothing need come behind it.
        goal = await self._bus.last_seq()
        await self._read(self._bus.events(after=self._after, last=goal))
        self._catch_up()
        # Not before: what it does not know yet would be told as being nowhere.
        await self._bus.serve(subjects.locate(), LocateBlocks, self._locate, queue=subjects.CONDUCTORS)
        after = max(self._after, self.core.seq, goal)
        await self._read(self._bus.events(after=after))

    async def _read(self, events: AsyncIterator[Stamped]) -> None:
        turn = 0
        async for stamped in events:
            event, before = stamped.event, self.core.seq
            if stamped.seq > before + 1 and before:
                await check_gap(self._bus, before)
            if isinstance(event, ClusterConfigured):
                check_version(event)
            self.view_service.before(stamped)
            began_ns = time.time_ns() if self._tracing is not None else 0
            started_ns = time.perf_counter_ns()
            decisions = self.core.step(stamped)
            if live := self.caught_up.is_set():
                self.tally.stepped(type(event).__name__, time.perf_counter_ns() - started_ns, decisions)
            if isinstance(event, TimerFired):
                self._timers.fired(event.key, event.at_ns)
            elif isinstance(event, StateDigested):
                self.tally.digest_mismatches += self._digests.hear(event) and live
            for position, decision in enumerate(decisions):
                await self._carry_out(stamped.seq, position, decision)
            self.view_service.after(stamped, decisions)
            if self._tracing is not None and decisions and live:
                decided(self._tracing, self.core, stamped, decisions, began_ns, self._conductor_id)
            self._heard = (self.core.state.at_ns, time.monotonic_ns())
            every = self.core.state.policy.digest_events
            if stamped.seq // every > before // every:
                self._digests.compute(live=live)
            if self.after_step is not None:
                self.after_step(stamped, decisions)
            turn += 1
            if turn % TURN_EVENTS == 0:
                await asyncio.sleep(0)

    async def _carry_out(self, cause_seq: int, position: int, decision: Decision) -> None:
        if isinstance(decision, SetTimer):
            self._timers.set(decision.key, decision.at_ns)
            self._timers_changed.set()
        elif (cause_seq, position) > self._published:
            ordered = Ordered(cause_seq=cause_seq, position=position, decision=decision)
            while True:
                try:
                    self._bus.order_soon(ordered, target_id=target(decision))
                    return
                # The bus is away: read no further until it has taken the waiting decisions.
                except BusOverloaded:
                    await self._bus.flush(OVERLOAD_WAIT_S)

    def _catch_up(self) -> None:
        self.caught_up.set()
        self.view_service.caught_up = True
        if self._heard is None:
            self._heard = (self.core.state.at_ns, time.monotonic_ns())
        log.info("conductor %s has read the log up to %d", self._conductor_id, self.core.seq)

    def _now_ns(self) -> int:
        assert self._heard is not None
        at_ns, clock_ns = self._heard
        return at_ns + time.monotonic_ns() - clock_ns

    async def _fire_timers(self) -> None:
        await self.caught_up.wait()
        while True:
            self._timers_changed.clear()
            next_ns = self._timers.next_ns()
            wait_s = None if next_ns is None else max(0, next_ns - self._now_ns()) / 1e9
            if wait_s != 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._timers_changed.wait(), wait_s)
                continue
            for key, at_ns in self._timers.pop_due(self._now_ns()):
                await self._fire(key, at_ns)

    async def _fire(self, key: str, at_ns: int) -> None:
        if self.core.timers.get(key) != at_ns:
            return  # the core has forgotten it
        event = TimerFired(key=key, at_ns=at_ns)
        while True:
            try:
                await self._bus.append(event, source_id=self._conductor_id, message_id=f"timer-{key}-{at_ns}")
                return
            except BusError as problem:
                log.warning("timer %s is not stored yet: %s", key, problem)
                await asyncio.sleep(TIMER_RETRY_S)

    def _locate(self, request: LocateBlocks) -> BlocksLocated:
        return BlocksLocated(nodes=self.core.state.index.nodes_with(request.block_keys, request.besides))

    def _status(self, request: StatusRequest) -> ConductorStatus:
        return conductor_status(
            self.core,
            conductor_id=self._conductor_id,
            caught_up=self.caught_up.is_set(),
            unstored_ns=int(self._bus.unstored_s * SECOND_NS),
            with_digest=request.digest,
        )


async def run(
    bus: Bus,
    *,
    conductor_id: str,
    policy: Policy,
    checked: bool = False,
    started: Callable[[Shell], None] | None = None,
    tracing: Tracing | None = None,
) -> None:
    """Conduct until cancelled, or until the bus is closed.

    `policy` counts only when the log is empty. `started` is given the shell, to wait for `caught_up` or to set
    `after_step`. Raises LogUnreadable, Diverged (this conductor is to stop deciding), and BusError when the bus does
    not answer at the start.
    """
    core, after = await bootstrap_core(bus, conductor_id, policy, checked=checked)
    shell = Shell(bus, core, conductor_id=conductor_id, after=after, tracing=tracing)
    if started is not None:
        started(shell)
    await shell.run()
