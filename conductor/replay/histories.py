"""The history of each request, put together from the events and decisions of a replay.

Times are ns of the log. An order's bars are laid out from its end: the worker's event has its times of waiting, loading
and computing, the log has the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from halfmoon.conductor.core.explanation import Explanation, MoveGrounds, RoleGrounds
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.replay.logfile import EventLine, Line, ProgressLine, SnapshotLine
from halfmoon.conductor.replay.verify import Replay
from halfmoon.schemas.decisions import (
    CancelOrder,
    Decision,
    FailRequest,
    RejectRequest,
    ReleaseOrder,
    StartDecode,
    StartMixed,
    StartPrefill,
)
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    FrontendJoined,
    FrontendLeft,
    KvMoved,
    KvMoveRefused,
    PrefillFailed,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    TimerFired,
)
from halfmoon.schemas.kv import KvLoaded, TransferFailed

#: Events after which requests may be gone without a word.
_MAY_CANCEL = (RequestCancelled, FrontendLeft, FrontendJoined, TimerFired)

Ending = Literal["open", "finished", "rejected", "failed", "cancelled"]


class Mark(msgspec.Struct):
    """KV of one layer of some blocks became readable: at the decode node, or (loaded) at the prefill node."""

    at_ns: int
    layer: int
    first_block: int
    blocks: int
    loaded: bool


class PlacementAttempt(msgspec.Struct, kw_only=True):
    """One placement of a request, and its later history. Times of 0 did not come."""

    order: StartPrefill
    seq: int
    at_ns: int
    prefilled: PrefillFinished | None = None
    finished: RequestFinished | None = None
    prefill_end_ns: int = 0
    decode_start_ns: int = 0
    wait_ns: int = 0
    end_ns: int = 0
    #: Why it was over before its time; "" when it was not.
    lost: str = ""
    marks: list[Mark] = []


class MoveHistory(msgspec.Struct, kw_only=True):
    """A part of the request that was to go to a lender while it was decoded. `end_ns` 0: no answer came."""

    grounds: MoveGrounds
    end_ns: int = 0
    moved_bytes: int = 0
    #: Why it came to nothing; "" when it did not.
    refused: str = ""


class RequestHistory(msgspec.Struct, kw_only=True, rename={"attempts": "placed"}):
    """One request, from its arrival to its end."""

    arrived: RequestArrived
    seq: int
    arrived_ns: int
    attempts: list[PlacementAttempt] = []
    why: list[Explanation] = []
    moves: list[MoveHistory] = []
    ending: Ending = "open"
    end_ns: int = 0
    #: How it finished, or why it did not.
    reason: str = ""
    finished: RequestFinished | None = None
    rejected: RejectRequest | None = None


class RequestHistories:
    """Collects histories: `see` every line of a replay, in order, with the core that has just stepped over it.

    Only of requests that are `wanted`, by their ids.
    """

    def __init__(self, wanted: Callable[[str], bool] = lambda _: True) -> None:
        self._wanted = wanted
        self.of: dict[str, RequestHistory] = {}
        #: Changes of role by load, made or advised.
        self.roles: list[RoleGrounds] = []
        self._orders: dict[str, tuple[RequestHistory, PlacementAttempt]] = {}
        #: Requests that have not ended.
        self._open: dict[str, RequestHistory] = {}

    def see(self, line: Line, decisions: Iterable[Decision], core: Core) -> None:
        match line:
            case ProgressLine():
                self._progress(line)
            case EventLine():
                self._event(line, core)
                for note in core.notes:
                    if note.request_id in self.of:
                        self.of[note.request_id].why.append(note)
                self.roles += core.role_notes
                for grounds in core.move_notes:
                    if grounds.request_id in self.of:
                        self.of[grounds.request_id].moves.append(MoveHistory(grounds=grounds))
                for decision in decisions:
                    self._decision(decision, line, core)
                if isinstance(line.event, _MAY_CANCEL):
                    gone = [
                        history
                        for request_id, history in self._open.items()
                        if request_id not in core.state.requests
                    ]
                    for history in gone:
                        self._end(history, "cancelled", line.at_ns, getattr(line.event, "reason", ""))
            case SnapshotLine():
                self._begun(core)
            case _:
                pass

    def _begun(self, core: Core) -> None:
        """Take over the requests that were open before the log begins."""
        state = core.state
        for request_id, request in state.requests.items():
            if not self._wanted(request_id):
                continue
            history = RequestHistory(arrived=request.event, seq=0, arrived_ns=request.arrived_ns)
            self.of[request_id] = self._open[request_id] = history
            order = state.orders.get(request.order_id)
            if order is not None:
                start = StartPrefill(
                    order_id=order.order_id,
                    request_id=request_id,
                    frontend_id=request.event.frontend_id,
                    worker_id=order.prefill_id,
                    decode_worker_id=order.answerer_id,
                    decode_node_id=order.decode_node_id or order.prefill_node_id,
                    prompt_tokens=request.event.prompt_tokens,
                    predicted=order.predicted,
                )
                attempt = PlacementAttempt(order=start, seq=order.placed_seq, at_ns=order.placed_ns)
                if order.phase == "decode":
                    attempt.prefill_end_ns = order.prefill.end_ns
                history.attempts.append(attempt)
                self._orders[order.order_id] = (history, attempt)

    def _progress(self, line: ProgressLine) -> None:
        progress = line.progress
        known = self._orders.get(progress.order_id)
        if known is not None and not isinstance(progress, TransferFailed):
            loaded = isinstance(progress, KvLoaded)
            end = progress.layer + (1 if isinstance(progress, KvLoaded) else progress.layers)
            known[1].marks += [
                Mark(line.at_ns, layer, progress.first_block, progress.blocks, loaded)
                for layer in range(progress.layer, end)
            ]

    def _event(self, line: EventLine, core: Core) -> None:
        event = line.event
        match event:
            case RequestArrived() if self._wanted(event.request_id):
                history = self.of.get(event.request_id)
                if history is None:
                    history = RequestHistory(arrived=event, seq=line.seq, arrived_ns=line.at_ns)
                    self.of[event.request_id] = self._open[event.request_id] = history
                elif history.ending != "open" and event.request_id in core.state.requests:
                    # Sent again, and taken again.
                    history.ending, history.end_ns, history.reason = "open", 0, ""
                    self._open[event.request_id] = history
            case PrefillFinished() | DecodeStarted() | RequestFinished():
                self._answered(event, line.at_ns)
            case PrefillFailed() | DecodeFailed() | DecodeRefused():
                known = self._orders.get(event.order_id)
                if known is not None and event.order_id not in core.state.orders:
                    self._over(
                        known[1], line.at_ns, f"{type(event).__name__} {event.worker_id}: {event.reason}"
                    )
            case KvMoved() | KvMoveRefused() if event.request_id in self.of:
                for move in self.of[event.request_id].moves:
                    if move.grounds.plan_id == event.plan_id and not move.end_ns:
                        move.end_ns = line.at_ns
                        if isinstance(event, KvMoved):
                            move.moved_bytes = event.moved_bytes
                        else:
                            move.refused = event.reason
            case _:
                pass

    def _answered(self, event: PrefillFinished | DecodeStarted | RequestFinished, at_ns: int) -> None:
        history, attempt = self._orders.get(event.order_id, (None, None))
        if history is None or attempt is None:
            return
        # The prefill of an answer of one token is reported behind the answer's end.
        late = isinstance(event, PrefillFinished) and attempt.finished is not None
        if attempt.end_ns and not late:
            return
        worker_id = (
            attempt.order.worker_id if isinstance(event, PrefillFinished) else attempt.order.decode_worker_id
        )
        if event.worker_id != worker_id:
            return
        match event:
            case PrefillFinished():
                attempt.prefilled, attempt.prefill_end_ns = event, at_ns
                if event.decodes:
                    attempt.decode_start_ns = at_ns
            case DecodeStarted():
                attempt.decode_start_ns, attempt.wait_ns = at_ns, event.wait_ns
            case RequestFinished():
                attempt.end_ns = at_ns
                history.finished = attempt.finished = event
                self._end(history, "finished", at_ns, event.finish_reason)

    def _decision(self, decision: Decision, line: EventLine, core: Core) -> None:
        match decision:
            case StartPrefill() | StartDecode() | StartMixed() | RejectRequest() | FailRequest() if (
                not self._wanted(decision.request_id)
            ):
                pass
            case StartDecode():
                if decision.resumes:
                    self._gone_on(decision, line)
            case StartPrefill():
                self._placed(decision, line)
            case StartMixed():
                self._placed(_both_halves(decision), line)
            case CancelOrder() | ReleaseOrder():
                known = self._orders.get(decision.order_id)
                # One that goes on may be taken back from a lender that should hold nothing of it any more.
                if known is not None and decision.order_id not in core.state.orders:
                    self._over(known[1], line.at_ns, f"taken back on {type(line.event).__name__}")
            case RejectRequest():
                history = self.of[decision.request_id]
                history.rejected = decision
                self._end(history, "rejected", line.at_ns, f"{decision.reason}: {decision.message}")
            case FailRequest():
                self._end(self.of[decision.request_id], "failed", line.at_ns, decision.message)
            case _:
                pass

    def _placed(self, order: StartPrefill, line: EventLine) -> None:
        history = self.of[order.request_id]
        if history.attempts:
            why = history.why[-1].lost_reason if history.why else "placed again"
            self._over(history.attempts[-1], line.at_ns, why)
        attempt = PlacementAttempt(order=order, seq=line.seq, at_ns=line.at_ns)
        history.attempts.append(attempt)
        self._orders[order.order_id] = (history, attempt)

    def _gone_on(self, order: StartDecode, line: EventLine) -> None:
        """Another decode worker goes on where one is gone: an attempt without a prefill."""
        history = self.of[order.request_id]
        earlier = history.attempts[-1].order
        self._over(history.attempts[-1], line.at_ns, f"{order.worker_id} goes on with its KV")
        start = msgspec.structs.replace(
            earlier, order_id=order.order_id, decode_worker_id=order.worker_id, decode_node_id=""
        )
        attempt = PlacementAttempt(order=start, seq=line.seq, at_ns=line.at_ns, prefill_end_ns=line.at_ns)
        history.attempts.append(attempt)
        self._orders[order.order_id] = (history, attempt)

    def forget(self, request_id: str) -> None:
        """Nothing more of it is noted."""
        history = self.of.pop(request_id)
        self._open.pop(request_id, None)
        for attempt in history.attempts:
            self._orders.pop(attempt.order.order_id, None)

    @staticmethod
    def _over(attempt: PlacementAttempt, at_ns: int, why: str) -> None:
        if not attempt.end_ns:
            attempt.end_ns, attempt.lost = at_ns, why
        elif attempt.lost.startswith("taken back") and why:
            # A later report is the more precise one.
            attempt.lost = why

    def _end(self, history: RequestHistory, ending: Ending, at_ns: int, reason: str) -> None:
        history.ending, history.end_ns, history.reason = ending, at_ns, reason
        self._open.pop(history.arrived.request_id, None)
        if history.attempts:
            self._over(history.attempts[-1], at_ns, reason if ending != "finished" else "")


def _both_halves(order: StartMixed) -> StartPrefill:
    """An order of a mixed worker as one of a pair that is the same worker twice."""
    return StartPrefill(
        order_id=order.order_id,
        request_id=order.request_id,
        frontend_id=order.frontend_id,
        worker_id=order.worker_id,
        decode_worker_id=order.worker_id,
        decode_node_id=order.worker_id,
        prompt_tokens=order.prompt_tokens,
        local_blocks=order.local_blocks,
        fetches=order.fetches,
        predicted=order.predicted,
    )


def request_histories(replay: Replay) -> RequestHistories:
    """The histories in all of a log."""
    found = RequestHistories()
    for line, decisions in replay:
        found.see(line, decisions, replay.core)
    return found
