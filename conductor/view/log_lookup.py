"""Looks up the history of one request in the log of a running cluster.

A request that the page follows is explained from memory. Any other one is looked up: its id has the time of its
arrival, the log is searched for that time, and a core of its own steps from the newest snapshot before it to its end,
in small turns so that live decisions hardly wait. One lookup runs at a time, and only a bounded way back.
"""

from __future__ import annotations

import asyncio
import datetime
import re

import msgspec

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerError
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.log_reading import log_start_seq, usable_snapshot
from halfmoon.conductor.replay.explain import DECODE_HEADS, PREFILL_HEADS, decided_rows, explained
from halfmoon.conductor.replay.histories import RequestHistories, RequestHistory
from halfmoon.conductor.replay.logfile import EventLine
from halfmoon.conductor.view.request_tracker import request_view
from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.view import Explained, Grounds

#: Events from the snapshot to the request, at most: some ten seconds of computing.
EVENTS_MAX = 300_000
#: How long after its arrival a request is still looked at.
LIFE_NS_MAX = 600 * SECOND_NS
#: Largest difference between a frontend's clock and the log's.
CLOCKS_NS = 5 * SECOND_NS
LOOK_UP_S = 45.0
#: Events in one turn: less than a millisecond.
TURN_EVENTS = 16
_ID = re.compile(r"^([0-9a-f]{12})[0-9a-f]{14}$")


class LogLookup:
    """`look_up` is for one at a time: more are refused, with the code `busy`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._busy = False

    async def look_up(self, request_id: str) -> Explained:
        """Raises PeerError: `not_found`, `too_old`, `busy`."""
        if self._busy:
            raise PeerError("busy", "another request is being looked up: try again")
        self._busy = True
        try:
            async with asyncio.timeout(LOOK_UP_S):
                return await self._look_up(request_id)
        except TimeoutError:
            raise PeerError("busy", f"it could not be looked up in {LOOK_UP_S:.0f} s") from None
        finally:
            self._busy = False

    async def _look_up(self, request_id: str) -> Explained:
        named = _ID.match(request_id)
        if named is None:
            raise PeerError(
                "not_found", "that is no id of a request: 26 hexadecimal digits, as in x-request-id"
            )
        arrived_ns = int(named[1], 16) * 1_000_000
        first, last = await self._bus.held(subjects.EVENTS_STREAM)
        begin = await self._first_since(arrived_ns - CLOCKS_NS, first, last)
        core = await usable_snapshot(self._bus, before=max(1, begin))
        after = core.seq if core is not None else await log_start_seq(self._bus) - 1
        if after < 0 or after < first - 1 or begin - after > EVENTS_MAX:
            raise PeerError(
                "too_old", "it is too far back; a saved log tells: halfmoon replay FILE --explain REQUEST"
            )
        core = core or Core()
        core.explain_requests = lambda name: name == request_id
        histories = RequestHistories(lambda name: name == request_id)
        if last > after:
            await self._step(core, histories, after, last, arrived_ns)
        history = histories.of.get(request_id)
        if history is None:
            raise PeerError("not_found", "the log has no such request")
        return story(history, core.state)

    async def _step(
        self, core: Core, histories: RequestHistories, after: int, last: int, arrived_ns: int
    ) -> None:
        steps = 0
        async for stamped in self._bus.events(after=after, last=last):
            decisions = core.step(stamped)
            histories.see(
                EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=stamped.event), decisions, core
            )
            steps += 1
            if steps % TURN_EVENTS == 0:
                await asyncio.sleep(0)
            ended = any(history.ending != "open" for history in histories.of.values())
            late = stamped.at_ns > arrived_ns + (LIFE_NS_MAX if histories.of else CLOCKS_NS)
            if ended or late or steps > 2 * EVENTS_MAX:
                return

    async def _first_since(self, at_ns: int, first: int, last: int) -> int:
        """Sequence of the first event at or after a time; `last + 1` when there is none."""
        low, high = first, last + 1
        while low < high:
            middle = (low + high) // 2
            if await self._time_of(middle) < at_ns:
                low = middle + 1
            else:
                high = middle
        return low

    async def _time_of(self, seq: int) -> int:
        message = await self._bus.jetstream.message(subjects.EVENTS_STREAM, seq=seq)
        if message is None:  # it has just expired: earlier than all that is there
            return 0
        at = datetime.datetime.fromisoformat(message.time[:19] + "+00:00")
        return int(at.timestamp()) * SECOND_NS


def story(history: RequestHistory, state: State) -> Explained:
    """All that is known of a request after the last event of `state`."""
    return Explained(
        request=request_view(history, state, {}),
        seq=history.seq,
        until_seq=state.seq,
        text=explained(history),
        prefill_heads=list(PREFILL_HEADS[1:]),
        decode_heads=list(DECODE_HEADS[1:]),
        grounds=[msgspec.convert(why, Grounds) for why in decided_rows(history)],
    )
