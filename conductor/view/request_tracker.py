"""Follows some requests one by one for the cluster's page: their stages, and the grounds of every decision on them.

They are chosen by a rate, so that following costs the same at 2 and at 2,000 requests a second. Some of those that are
followed have a place on the page, which they keep until a little after their end.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Order
from halfmoon.conductor.core.step_output import explain_all, explain_none
from halfmoon.conductor.replay.histories import PlacementAttempt, RequestHistories, RequestHistory
from halfmoon.conductor.replay.logfile import EventLine, SnapshotLine
from halfmoon.conductor.replay.timeline import decode_bar, prefill_bar
from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import DecodeStarted, PrefillFinished, RequestArrived, Stamped
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.view import RequestView, Stage, Stretch

#: Least time from one followed request to the next.
FOLLOW_EVERY_NS = SECOND_NS // 10
HISTORIES_KEPT = 128
PLACES = 14
#: How long one that ended keeps its place; when others wait for it.
LINGER_NS = 20 * SECOND_NS
LINGER_NS_MIN = 3 * SECOND_NS
#: A request whose prefill ended this long ago has joined a batch; for requests that began before anybody looked.
HANDOVER_NS_MAX = SECOND_NS
STRETCHES_MAX = 24
#: With more requests than this, those that a lost worker had are placed again without noting why.
EXPLAINED_AGAIN_MAX = 200


class RequestTracker:
    """`before` and `after` each step of `core`; made when somebody looks, dropped when nobody does."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._next_ns = 0
        self._next_id = ""
        #: Those that are open already have places first, without their grounds.
        begun = dict.fromkeys(islice(core.state.requests, PLACES))
        self.histories = RequestHistories(
            lambda name: name in begun or name in self.histories.of or name == self._next_id
        )
        self.histories.see(SnapshotLine(seq=core.seq, snapshot=b""), (), core)
        begun.clear()
        self._places: dict[str, RequestHistory] = dict(self.histories.of)
        #: Orders that have joined a batch.
        self._decoding: dict[str, bool] = {}

    def before(self, stamped: Stamped) -> None:
        """Decide whether this request will be followed: then the core notes the grounds of its decisions."""
        event = stamped.event
        self._next_id = ""
        if not isinstance(event, RequestArrived):  # a placement now is one that was lost
            few = len(self._core.state.requests) <= EXPLAINED_AGAIN_MAX
            self._core.explain_requests = explain_all if few else explain_none
            return
        if stamped.at_ns >= self._next_ns:
            self._next_ns = stamped.at_ns + FOLLOW_EVERY_NS
            self._next_id = event.request_id
        self._core.explain_requests = lambda name: name == self._next_id

    def after(self, stamped: Stamped, decisions: Iterable[Decision]) -> None:
        event = stamped.event
        if isinstance(event, DecodeStarted) or (isinstance(event, PrefillFinished) and event.decodes):
            self._decoding[event.order_id] = True
        self.histories.see(
            EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=event), decisions, self._core
        )
        if self._next_id in self.histories.of:
            self._begin(self.histories.of[self._next_id])

    def _begin(self, history: RequestHistory) -> None:
        while len(self.histories.of) > HISTORIES_KEPT:
            oldest = next(name for name in self.histories.of if name not in self._places)
            self.histories.forget(oldest)
        if history.ending == "open":
            self._leave()
            if len(self._places) < PLACES:
                self._places[history.arrived.request_id] = history

    def _leave(self) -> None:
        """Requests that ended give up their places: after a while, or at once when no place is free."""
        now_ns = self._core.state.server_ns
        ended = [(history.end_ns, name) for name, history in self._places.items() if history.ending != "open"]
        for end_ns, name in sorted(ended):
            linger_ns = LINGER_NS_MIN if len(self._places) >= PLACES else LINGER_NS
            if now_ns > end_ns + linger_ns:
                del self._places[name]

    def requests(self) -> list[RequestView]:
        """The requests with a place: first those in flight, oldest first, then those that ended, newest first."""
        self._leave()
        histories = sorted(
            self._places.values(),
            key=lambda history: (history.ending != "open", -history.end_ns, history.arrived_ns, history.seq),
        )
        return [request_view(history, self._core.state, self._decoding) for history in histories]

    def stages(self) -> dict[str, int]:
        """The number of requests in each stage: all of them, followed or not."""
        state = self._core.state
        self._decoding = {order_id: True for order_id in self._decoding if order_id in state.orders}
        found = {
            "waiting": len(state.parked),
            "queued": 0,
            "transfer": 0,
            "prefill": 0,
            "handover": 0,
            "decode": 0,
        }
        for order in state.orders.values():
            found[stage_of(order, state, self._decoding)] += 1
        return found


def stage_of(order: Order, state: State, decoding: dict[str, bool]) -> Stage:
    """The stage as the conductor believes it to be: workers report a stage when it is over."""
    now_ns = state.at_ns
    if order.phase == "decode":
        begun = order.order_id in decoding or now_ns - order.prefill.end_ns > HANDOVER_NS_MAX
        return "decode" if begun else "handover"
    worker = state.workers.get(order.prefill_id)
    duty = worker.prompts if worker is not None else None
    if duty is None or next(iter(duty.orders), "") != order.order_id:
        return "queued"
    loading_ns = order.predicted.transfer_ns if order.prefill.fetch_node_id else 0
    return "transfer" if now_ns - max(duty.head_since_ns, order.placed_ns) < loading_ns else "prefill"


def request_view(history: RequestHistory, state: State, decoding: dict[str, bool]) -> RequestView:
    """A request as the page draws it."""
    arrived = history.arrived
    request_id = arrived.request_id
    last = history.attempts[-1] if history.attempts else None
    request = state.requests.get(request_id)
    order = state.orders.get(request.order_id) if request is not None else None
    stage: Stage = "waiting" if order is None else stage_of(order, state, decoding)
    done, then = history.finished, last.prefilled if last is not None else None
    return RequestView(
        request_id=request_id,
        stage=stage if history.ending == "open" else "ended",
        ending=history.ending,
        arrived_ns=history.arrived_ns,
        end_ns=history.end_ns,
        prompt_tokens=arrived.prompt_tokens,
        max_tokens=arrived.max_tokens,
        prefill_id=last.order.worker_id if last is not None else "",
        decode_id=last.order.decode_worker_id if last is not None else "",
        cached_tokens=then.cached_local_tokens + then.cached_fetched_tokens if then is not None else 0,
        similar_tokens=then.similar.tokens if then is not None and then.similar is not None else 0,
        placements=len(history.attempts),
        ttft_ns=done.ttft_ns if done is not None else 0,
        tbt_ns=done.tbt_ns if done is not None else 0,
        ttft_slo_ns=arrived.ttft_slo_ns or state.policy.ttft_slo_ns,
        tbt_slo_ns=arrived.tbt_slo_ns or state.policy.tbt_slo_ns,
        reason=history.reason[:512],
        stretches=_stretches(history, stage, state.server_ns),
    )


def _stretches(history: RequestHistory, stage: Stage, now_ns: int) -> list[Stretch]:
    """Stretches from the first placement on; gaps between them are waits."""
    found: list[Stretch] = []
    for attempt in history.attempts[-4:]:
        if found and attempt.at_ns > found[-1][2]:
            found.append(("waiting", found[-1][2], attempt.at_ns))
        found += _of_order(attempt, stage if attempt is history.attempts[-1] else "queued", now_ns)
    if history.ending == "open" and stage == "waiting":
        begin_ns = found[-1][2] if found else history.arrived_ns
        found.append(("waiting", begin_ns, max(begin_ns, now_ns)))
    return found[-STRETCHES_MAX:]


def _of_order(attempt: PlacementAttempt, stage: Stage, now_ns: int) -> list[Stretch]:
    begin, *ends = prefill_bar(0, attempt, 0, now_ns).parts
    if not attempt.prefill_end_ns:  # not done, or lost
        lost = attempt.end_ns and attempt.lost
        return [("lost" if lost else stage if stage in ("transfer", "prefill") else "queued", begin, ends[0])]
    if len(ends) == 1:  # done before anybody looked
        computed = ends[0]
        found: list[Stretch] = [("prefill", begin, computed)]
    else:
        computes, computed, _ = ends
        transfer_ns = attempt.prefilled.transfer_ns if attempt.prefilled is not None else 0
        loads = max(begin, computes - transfer_ns)
        found = [("queued", begin, loads), ("transfer", loads, computes), ("prefill", computes, computed)]
    decode = decode_bar(0, attempt, 0, now_ns)
    if decode is None:
        return found
    _, joined, end = decode.parts
    if stage == "decode" and not attempt.decode_start_ns and attempt.finished is None:
        joined = ends[-1]
    joined = max(joined, computed)
    found.append(("handover", computed, joined))
    found.append(("lost" if attempt.lost else "decode", joined, max(joined, end)))
    return [stretch for stretch in found if stretch[2] > stretch[1]]
