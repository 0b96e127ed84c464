"""A window of the last two minutes, second by second, for the cluster's page.

Kept always, so that the page shows the minutes before it is opened. The core's counters are noted at the start of each
second, and only figures that the core does not count are added up here: times of requests that finished, bytes that
moved, requests that were refused, events of processes. Bounded whatever the load: a sample of the times, the last few
of the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.objectives import slo_ns
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.replay.timeline import happened
from halfmoon.conductor.view.status import request_counts
from halfmoon.schemas.decisions import Decision, FailRequest, Prediction, RejectRequest
from halfmoon.schemas.events import (
    FrontendJoined,
    FrontendLeft,
    PolicyChanged,
    PrefillFinished,
    RequestFinished,
    RoleWanted,
    Stamped,
    StoreJoined,
    StoreLeft,
    StoreSuspected,
    TierLost,
    TimerFired,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.status import RequestCounts
from halfmoon.schemas.view import LinkUse, Refused, Series, Spread, Told
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged

SECONDS = 120
#: Length of the window, and the time over which a link's speed is a mean.
WINDOW_S = 60
LINK_S = 10
#: Times of finished requests that are kept of one second.
SAMPLES_MAX = 64
REFUSED_KEPT = 20
HAPPENED_KEPT = 40

_OF_PROCESSES = frozenset(
    (
        WorkerJoined,
        WorkerDraining,
        WorkerLeft,
        FrontendJoined,
        FrontendLeft,
        PolicyChanged,
        PlacementsPaused,
        WeightsChanged,
        RoleWanted,
        TimerFired,
        StoreJoined,
        StoreLeft,
        StoreSuspected,
        TierLost,
    )
)


class _Second(msgspec.Struct):
    """One second; `start`: the core's counts before it."""

    at_s: int
    begun: RequestCounts
    finished: int = 0
    ttft_met: int = 0
    tbt_met: int = 0
    ttfts_ns: list[int] = []
    tbts_ns: list[int] = []
    #: Source, destination.
    moved: dict[tuple[str, str], int] = {}


class RecentWindow:
    """`before` and `after` each step of `core`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._seconds: deque[_Second] = deque(maxlen=SECONDS)
        self._now = _Second(0, RequestCounts())
        self._slo_ns = (0, 0)
        self.refused: deque[Refused] = deque(maxlen=REFUSED_KEPT)
        self.happened: deque[Told] = deque(maxlen=HAPPENED_KEPT)

    def before(self, stamped: Stamped) -> None:
        """Note the SLO of a request that finishes, which the step will forget."""
        at_s = stamped.at_ns // SECOND_NS
        if at_s > self._now.at_s:
            self._now = _Second(at_s, request_counts(self._core.state))
            self._seconds.append(self._now)
        event = stamped.event
        if type(event) is RequestFinished:
            self._slo_ns = _slo_ns(self._core.state, event)

    def after(self, stamped: Stamped, decisions: Iterable[Decision]) -> None:
        event, now = stamped.event, self._now
        kind = type(event)
        if isinstance(event, RequestFinished):
            ttft_slo_ns, tbt_slo_ns = self._slo_ns
            if ttft_slo_ns:
                now.ttft_met += event.ttft_ns <= ttft_slo_ns
                now.tbt_met += event.tbt_ns <= tbt_slo_ns
                _sample(now.ttfts_ns, now.finished, event.ttft_ns)
                _sample(now.tbts_ns, now.finished, event.tbt_ns)
                now.finished += 1
        elif isinstance(event, PrefillFinished):
            self._moved(event)
        elif kind in _OF_PROCESSES:
            for found in happened(event, stamped.at_ns, {}, self._core):
                self.happened.append(
                    Told(seq=stamped.seq, at_ns=found.at_ns, kind=found.kind, words=found.text)
                )
        for decision in decisions:
            if isinstance(decision, RejectRequest | FailRequest):
                self._refuse(decision, stamped.at_ns)

    def _moved(self, event: PrefillFinished) -> None:
        """To the prefill worker's node, and from it to the decode worker's, which the order names."""
        state, moved = self._core.state, self._now.moved
        worker = state.workers.get(event.worker_id)
        order = state.orders.get(event.order_id)
        if worker is None:
            return
        if event.fetch_node_id and event.fetched_bytes:
            link = (event.fetch_node_id, worker.node_id)
            moved[link] = moved.get(link, 0) + event.fetched_bytes
        if order is not None and event.pushed_bytes:
            link = (worker.node_id, order.decode_node_id)
            moved[link] = moved.get(link, 0) + event.pushed_bytes

    def _refuse(self, decision: RejectRequest | FailRequest, at_ns: int) -> None:
        reason, predicted = "failed", Prediction()
        if isinstance(decision, RejectRequest):
            reason, predicted = decision.reason, decision.predicted
        self.refused.append(
            Refused(
                request_id=decision.request_id,
                at_ns=at_ns,
                reason=reason,
                message=decision.message,
                ttft_ns=predicted.ttft_ns,
                tbt_ns=predicted.tbt_ns,
            )
        )

    # --- for the page ---------------------------------------------------------------------------------------

    def recent(self) -> RequestCounts:
        """The core's counts over the last `WINDOW_S`."""
        seconds = self._last(WINDOW_S)
        now = request_counts(self._core.state)
        return _difference(now, seconds[0].begun) if seconds else RequestCounts()

    def spreads(self) -> tuple[Spread, Spread]:
        """TTFT and TBT of requests that finished in the last `WINDOW_S`."""
        seconds = self._last(WINDOW_S)
        finished = sum(second.finished for second in seconds)
        return (
            _spread([ns for s in seconds for ns in s.ttfts_ns], finished, sum(s.ttft_met for s in seconds)),
            _spread([ns for s in seconds for ns in s.tbts_ns], finished, sum(s.tbt_met for s in seconds)),
        )

    def links(self) -> list[LinkUse]:
        whole: dict[tuple[str, str], int] = {}
        lately: dict[tuple[str, str], int] = {}
        for second in self._last(WINDOW_S):
            for link, moved_bytes in second.moved.items():
                whole[link] = whole.get(link, 0) + moved_bytes
                if second.at_s > self._now.at_s - LINK_S:
                    lately[link] = lately.get(link, 0) + moved_bytes
        return [
            LinkUse(source=a, destination=b, moved_bytes=moved, bytes_s=lately.get((a, b), 0) // LINK_S)
            for (a, b), moved in sorted(whole.items(), key=lambda item: (-item[1], item[0]))
        ]

    def series(self) -> Series:
        last_s = self._now.at_s
        of = {second.at_s: second for second in self._seconds}
        begun = [*self._seconds, _Second(last_s + 1, request_counts(self._core.state))]
        ends = {one.at_s: two.begun for one, two in pairwise(begun)}
        quiet = _Second(0, RequestCounts())
        places = range(last_s - SECONDS + 1, last_s + 1)
        seconds = [of.get(at_s, quiet) for at_s in places]
        counts = [_difference(ends[at_s], of[at_s].begun) if at_s in of else quiet.begun for at_s in places]
        return Series(
            last_s=last_s,
            arrived=[count.arrived for count in counts],
            finished=[count.finished for count in counts],
            rejected=[sum(count.rejected.values()) for count in counts],
            failed=[count.failed for count in counts],
            ttft_p50_us=[_at(second.ttfts_ns, 50) for second in seconds],
            ttft_p99_us=[_at(second.ttfts_ns, 99) for second in seconds],
            tbt_p50_us=[_at(second.tbts_ns, 50) for second in seconds],
            tbt_p99_us=[_at(second.tbts_ns, 99) for second in seconds],
        )

    def _last(self, seconds: int) -> list[_Second]:
        """Those of the last `seconds` seconds in which something was heard."""
        return [second for second in self._seconds if second.at_s > self._now.at_s - seconds]


def _slo_ns(state: State, event: RequestFinished) -> tuple[int, int]:
    """(0, 0): an answer that comes late, or twice."""
    request = state.requests.get(event.request_id)
    if request is None or request.order_id != event.order_id:
        return 0, 0
    return slo_ns(state, request.event)


def _sample(kept: list[int], number: int, value: int) -> None:
    """The last `SAMPLES_MAX` of a second."""
    if len(kept) < SAMPLES_MAX:
        kept.append(value)
    else:
        kept[number % SAMPLES_MAX] = value


def _at(values_ns: Sequence[int], percent: int) -> int:
    """The percentile, in us; 0 of nothing."""
    return (
        sorted(values_ns)[min(len(values_ns) - 1, len(values_ns) * percent // 100)] // 1_000
        if values_ns
        else 0
    )


def _spread(values_ns: list[int], finished: int, met: int) -> Spread:
    return Spread(
        finished=finished,
        met=met,
        p50_us=_at(values_ns, 50),
        p90_us=_at(values_ns, 90),
        p99_us=_at(values_ns, 99),
    )


def _difference(now: RequestCounts, then: RequestCounts) -> RequestCounts:
    """A log that began anew counts from 0."""
    fields: dict[str, int | dict[str, int]] = {}
    for name in RequestCounts.__struct_fields__:
        after, before = getattr(now, name), getattr(then, name)
        if isinstance(after, dict):
            more = {reason: count - before.get(reason, 0) for reason, count in after.items()}
            fields[name] = {reason: count for reason, count in more.items() if count > 0}
        else:
            fields[name] = max(0, after - before)
    return msgspec.convert(fields, RequestCounts)
