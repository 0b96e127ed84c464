"""The core: `step(stamped event) -> decisions`, a deterministic function of the log.

Rules, which `tests/conductor/test_purity.py` enforces for this module and all of ours that it imports: no
clock, no randomness, no environment, no I/O, no logging, no asyncio, no iteration over a set, no `hash()` or
`id()`. ns, bytes and tokens are integers. Every choice is a total order that ends in an id. State is changed
in place, and only within a step. A late, repeated or unknown event changes nothing but the place in the log. Replay
answers "why?" (`explain`), so nothing is logged.

The contract with a shell:
- Events come in the order of the log, each once; `seq` grows (it may skip).
- Decisions leave only after the event that caused them is stored, under the identity (seq, position in the
  list).
- `SetTimer(key, at_ns)` is for the shell: it appends `TimerFired(key, at_ns)` to the log when the time has
  come. Setting a timer again replaces it. A timer that fires twice, late, or without having been set is
  harmless; after `restore`, `timers` are those that are set.
"""

# The idea is state machine replication: equal machines that read an equal log are in equal states. The form is that of
# etcd's raft, where a pure core hands instructions to a shell. This core is simpler than raft, because JetStream has
# already agreed on the order of events: nothing here votes, leads or retries. It is harder in one way. Raft replicates
# the bytes of a command, while every conductor computes decisions anew, so a single use of a clock, a hash or the order
# of a set would let two conductors disagree. Hence the rules above, and the digests that conductors compare.
#
# Turned down:
# - A leader that decides while others stand by: its death is a pause, and its second life a split brain. Here all
#   decide, under the same identity, and the stream drops the second copy.
# - Decisions in the log beside events: a replay would then compare nothing, it would only read.
# - A table from event to handler: `match` with `assert_never` is the same table, and mypy finds a forgotten event.
#
# In doubt: two versions of this code may decide differently on one log. Digests find that and the minority stops;
# nothing merges the two states.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec

from halfmoon.conductor.core import booking, membership, moves, orders, roles
from halfmoon.conductor.core.corrections import answer_seen, prefill_seen
from halfmoon.conductor.core.explanation import Explanation, MoveGrounds, RoleGrounds, explain_supposed
from halfmoon.conductor.core.invariants import check
from halfmoon.conductor.core.loans import end_loans, kv_move_refused, kv_moved
from halfmoon.conductor.core.placement.policies import check_known
from halfmoon.conductor.core.reconcile import reconcile_orders
from halfmoon.conductor.core.state.block_index import BlockIndex, IndexImage
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import (
    Answers,
    Link,
    answer_class,
    learn_answer,
    measured_link,
)
from halfmoon.conductor.core.state.log_clock import log_time_ns
from halfmoon.conductor.core.state.records import Half, Order
from halfmoon.conductor.core.state.slow_places import judge_places
from halfmoon.conductor.core.step_learning import learn_prefill, learn_step
from halfmoon.conductor.core.step_output import Explains, StepOutput, explain_none
from halfmoon.schemas.codec import digest, one_line
from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import (
    BlocksEvicted,
    BlocksStored,
    ClusterConfigured,
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    Event,
    FrontendHeartbeat,
    FrontendJoined,
    FrontendLeft,
    KvMoved,
    KvMoveRefused,
    PolicyChanged,
    PrefillFailed,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RoleWanted,
    StageFinished,
    Stamped,
    StateDigested,
    StoreHeartbeat,
    StoreInventory,
    StoreJoined,
    StoreLeft,
    StoreSuspected,
    TierLost,
    TimerFired,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)

#: Version of the state in snapshots. Another version is not restored: the log is replayed instead.
SNAPSHOT_VERSION = 7
#: Events after which a request that waits for lenders may find room.
_MAY_END_AN_ORDER = (DecodeFailed, DecodeRefused, PrefillFailed, RequestCancelled, RequestFinished)


class SnapshotInvalid(ValueError):
    """Not a snapshot of this version of the core."""


class _Snapshot(msgspec.Struct, array_like=True):
    version: int
    state: State


class Core:
    """See the module. `checked` runs the invariants after every step."""

    def __init__(self, *, checked: bool = False) -> None:
        self.state = State(index=BlockIndex())
        self.checked = checked
        #: The requests whose placements are explained, and the last step's notes on them.
        self.explain_requests: Explains = explain_none
        self.notes: list[Explanation] = []
        self.move_notes: list[MoveGrounds] = []
        self.role_notes: list[RoleGrounds] = []

    @property
    def seq(self) -> int:
        """Sequence of the last event; 0 before the first."""
        return self.state.seq

    @property
    def timers(self) -> Mapping[str, int]:
        """Timers that are set: key to time, ns of the log."""
        return self.state.timers

    def step(self, stamped: Stamped) -> list[Decision]:
        """The decisions that `stamped` makes necessary, in order.

        Raises PolicyMissing for a policy of another package that is not here: this core can go no further.
        """
        assert stamped.seq > self.seq, ("the log ran backwards", stamped.seq, self.seq)
        if isinstance(stamped.event, ClusterConfigured):
            # Another log begins. Nothing of an earlier one may decide in it: a replay begins here, and would differ.
            self.state = State(index=BlockIndex())
        state = self.state
        at_ns = log_time_ns(state, stamped.at_ns)
        membership.bridge_silence(state, at_ns)
        state.seq = stamped.seq
        state.at_ns = max(state.at_ns, at_ns)
        state.orders_now = 0
        # A silent log proves nothing of its members, but one with nothing but timers does: see `bridge_silence`.
        state.timers_in_row = state.timers_in_row + 1 if isinstance(stamped.event, TimerFired) else 0
        out = StepOutput(self.explain_requests)
        _apply(state, stamped.event, out)
        if state.orders_now:
            moves.keep_planning(state, out)
        if isinstance(stamped.event, RequestArrived | PolicyChanged):
            roles.keep_looking(state, out)
        self.notes, self.move_notes, self.role_notes = out.notes, out.moves, out.roles
        if self.checked:
            check(state)
        return out

    def explain(self, request: RequestArrived, at_ns: int) -> Explanation:
        """The grounds of the decision that `request` would get now; changes nothing.

        `random` draws by the place in the log: here, by the next one. The grounds of real decisions are in `notes`.
        """
        return explain_supposed(self.state, request, at_ns)

    def digest(self) -> str:
        """Names the whole state; equal for equal logs, whatever the process."""
        return digest(self.snapshot())

    def snapshot(self) -> bytes:
        return _encoder.encode(_Snapshot(SNAPSHOT_VERSION, self.state))

    @classmethod
    def restore(cls, snapshot: bytes, *, checked: bool = False, examined: bool = False) -> Core:
        """A core that goes on as the one that made `snapshot` would. Raises SnapshotInvalid, PolicyMissing.

        `examined`: the invariants are tried on it, for one that comes from a file and not from a conductor.
        """
        try:
            restored = _decoder.decode(snapshot)
        except (msgspec.DecodeError, ValueError, RecursionError) as problem:
            raise SnapshotInvalid(one_line(problem)) from None
        if restored.version != SNAPSHOT_VERSION:
            raise SnapshotInvalid(f"version {restored.version}, not {SNAPSHOT_VERSION}")
        core = cls(checked=checked)
        core.state = restored.state
        check_known(core.state.policy)
        if examined:
            try:
                check(core.state)
            except (AssertionError, LookupError) as problem:
                raise SnapshotInvalid(f"its parts contradict each other: {str(problem)[:200]}") from None
        return core


def _encode_index(value: Any) -> Any:
    assert isinstance(value, BlockIndex), value
    return msgspec.msgpack.encode(value.image())


def _decode_index(kind: type, value: Any) -> Any:
    assert kind is BlockIndex, kind
    return BlockIndex.from_image(msgspec.msgpack.decode(value, type=IndexImage))


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_index)
_decoder = msgspec.msgpack.Decoder(_Snapshot, dec_hook=_decode_index)


def _apply(state: State, event: Event, out: StepOutput) -> None:
    match event:
        case BlocksStored():
            if membership.known_store(state, event.node_id, event.incarnation):
                state.index.add(event.node_id, event.block_keys, event.tier)
        case BlocksEvicted():
            if membership.known_store(state, event.node_id, event.incarnation):
                _evicted(state, event)
        case RequestArrived():
            if event.request_id in state.finished:
                if event.answer_lost:
                    orders.accept_again(state, event, out)
            elif event.request_id not in state.requests:
                orders.accept_or_reject(state, event, out)
        case PrefillFinished():
            _prefill_finished(state, event)
        case StageFinished():
            booking.stage_finished(state, event)
        case DecodeStarted() | KvMoved() | KvMoveRefused():
            _decode_goes_on(state, event, out)
        case StateDigested():
            pass
        case RequestFinished():
            _request_finished(state, event, out)
        case WorkerHeartbeat():
            _worker_heartbeat(state, event, out)
        case StoreHeartbeat():
            membership.store_heartbeat(state, event, out)
        case FrontendHeartbeat():
            membership.frontend_heartbeat(state, event, out)
        case TimerFired():
            _timer_fired(state, event, out)
        case PrefillFailed() | DecodeFailed():
            _half_failed(state, event, out)
        case DecodeRefused():
            _decode_refused(state, event, out)
        case RequestCancelled():
            _request_cancelled(state, event, out)
        case StoreInventory():
            membership.store_inventory(state, event)
        case TierLost():
            if membership.known_store(state, event.node_id, event.incarnation):
                state.index.forget_tier(event.node_id, event.tier)
        case StoreSuspected():
            membership.store_suspected(state, event)
        case WorkerJoined():
            membership.worker_joined(state, event, out)
        case WorkerDraining():
            membership.worker_draining(state, event, out)
        case WorkerLeft():
            membership.worker_left(state, event.worker_id, event.incarnation, out)
        case StoreJoined():
            membership.store_joined(state, event, out)
        case StoreLeft():
            membership.store_left(state, event.node_id, event.incarnation)
        case FrontendJoined():
            membership.frontend_joined(state, event, out)
        case FrontendLeft():
            membership.frontend_left(state, event.frontend_id, event.incarnation, out)
        case ClusterConfigured():
            check_known(event.policy)
            state.policy, state.code_version = event.policy, event.code_version
        case PolicyChanged():
            moves.policy_changed(state, event, out)
        case RoleWanted():
            roles.role_wanted(state, event, out)
        case _:
            assert_never(event)
    if isinstance(event, _MAY_END_AN_ORDER):
        orders.place_borrowers(state, out)


def _timer_fired(state: State, event: TimerFired, out: StepOutput) -> None:
    if state.timers.get(event.key) != event.at_ns:
        # Late, repeated, or set by an older log: every conductor appends the same timer.
        return
    del state.timers[event.key]
    kind, subject = event.key.split(":")[:2]
    if kind == "lost":
        membership.loss_timer_fired(state, event.key, event.at_ns, out)
    elif kind == "unplaced":
        orders.end_waiting(state, state.requests[subject], out)
    elif event.key == moves.TIMER:
        moves.plan_moves(state, out)
    elif event.key == roles.TIMER:
        roles.plan_roles(state, out)


def _answered(state: State, order_id: str, request_id: str, worker_id: str, half: Half) -> Order | None:
    """The order that an answer is about; None when it is late, repeated or unknown."""
    order = state.orders.get(order_id)
    if order is None or order.request_id != request_id:
        return None
    match half:
        case "prefill":
            return order if order.prefill_id == worker_id and order.phase == "prefill" else None
        case "decode":
            return order if order.decode_id == worker_id else None
        case _:
            assert_never(half)


def _prefill_finished(state: State, event: PrefillFinished) -> None:
    order = _answered(state, event.order_id, event.request_id, event.worker_id, "prefill")
    if order is None:
        # An answer of one token may have ended it already.
        if event.order_id not in state.orders:
            learn_prefill(state, event, event.prompt_tokens, of_request=event.prompt_tokens)
        return
    permille = prefill_seen(state, order, event)
    booking.free_prefill(state, order)
    order.prefill.end_ns = state.at_ns
    request = state.requests[order.request_id]
    # In an older log only the request has the prompt's length; placed once more, it has tokens of its answer on top.
    known = event.prompt_tokens or (request.event.prompt_tokens if request.placements == 1 else 0)
    learn_prefill(state, event, known, of_request=request.event.prompt_tokens, permille=permille)
    _know_prompt(state, order)
    if event.fetch_node_id and event.fetch_node_id in state.stores:
        links = state.ssd_links if order.prefill.fetch_ssd else state.links
        sharing = order.prefill.fetch_sharing if order.prefill.fetch_node_id == event.fetch_node_id else 1
        _learn_link(
            state,
            links,
            order.prefill_node_id,
            event.fetch_node_id,
            event.fetched_bytes,
            event.fetch_ns,
            sharing,
        )
    worker = state.workers.get(event.worker_id)
    least = worker.block_bytes if worker is not None and state.policy.links_by_blocks else 0
    if event.pushed_bytes >= least:
        _learn_link(
            state,
            state.links,
            order.decode_node_id,
            order.prefill_node_id,
            event.pushed_bytes,
            event.push_ns,
            1,
        )


def _know_prompt(state: State, order: Order) -> None:
    """The order's prompt was computed whole: its KV may stand in for others."""
    event = state.requests[order.request_id].event
    if event.sketch and not order.prefill.similar:
        state.similar.add(event)


def _learn_link(
    state: State,
    links: dict[str, dict[str, Link]],
    destination: str,
    source: str,
    moved_bytes: int,
    took_ns: int,
    sharing: int,
) -> None:
    if destination not in state.stores:
        return
    known = links.get(destination, {}).get(source)
    link = measured_link(known, moved_bytes, took_ns, sharing, state.at_ns)
    if link is not None:
        links.setdefault(destination, {})[source] = link
        if links is state.links:
            state.loads.link_measured(destination, source, link)


def _evicted(state: State, event: BlocksEvicted) -> None:
    state.index.discard(event.node_id, event.block_keys, event.tier)
    if state.policy.copies_price == "displaced":
        state.displaced.evict(state.index, event.block_keys, state.loads.pool_blocks)


def _worker_heartbeat(state: State, event: WorkerHeartbeat, out: StepOutput) -> None:
    worker = membership.worker_heartbeat(state, event, out)
    if worker is not None:
        learn_step(state, worker, event)
        judge_places(state, worker, event)
        reconcile_orders(state, worker, event, out)


def _request_finished(state: State, event: RequestFinished, out: StepOutput) -> None:
    order = _answered(state, event.order_id, event.request_id, event.worker_id, "decode")
    if order is None:
        return
    prefill_seen(state, order, None)
    _know_prompt(state, order)
    answer_seen(state, order, event)
    booking.free_prefill(state, order)
    booking.free_decode(state, order)
    end_loans(state, order, out)
    del state.orders[order.order_id]
    request = state.requests[order.request_id]
    request.order_id = ""
    orders.end(state, request)
    state.counters.finished += 1
    if event.finish_reason != "abort":
        kind = answer_class(request.event.max_tokens)
        learn_answer(
            state.answers.setdefault(kind, Answers()),
            min(event.completion_tokens, request.event.max_tokens),
            event.decode_ns,
        )


def _decode_goes_on(state: State, event: DecodeStarted | KvMoved | KvMoveRefused, out: StepOutput) -> None:
    order = _answered(state, event.order_id, event.request_id, event.worker_id, "decode")
    if order is None:
        return
    match event:
        case DecodeStarted():
            order.decode.running = True
        case KvMoved():
            if kv_moved(state, order, event):
                orders.place_borrowers(state, out)
        case KvMoveRefused():
            if kv_move_refused(state, order, event, out):
                orders.place_borrowers(state, out)
        case _:
            assert_never(event)


def _half_failed(state: State, event: PrefillFailed | DecodeFailed, out: StepOutput) -> None:
    half: Half
    failed = event.worker_id
    match event:
        case PrefillFailed():
            half = "prefill"
            failed = event.stage_id or event.worker_id
        case DecodeFailed():
            half = "decode"
        case _:
            assert_never(event)
    order = _answered(state, event.order_id, event.request_id, event.worker_id, half)
    if order is None:
        return
    request = state.requests[order.request_id]
    booking.withdraw(state, order, out, prefill_runs=half != "prefill", decode_runs=half != "decode")
    if event.retryable:
        orders.avoid(request, failed)
        orders.place(state, request, event.reason, out, event.refusal)
    else:
        orders.fail(state, request, event.reason, out, event.refusal)


def _decode_refused(state: State, event: DecodeRefused, out: StepOutput) -> None:
    order = _answered(state, event.order_id, event.request_id, event.worker_id, "decode")
    if order is None:
        return
    state.counters.wasted_prefills += 1
    request = state.requests[order.request_id]
    booking.withdraw(state, order, out, prefill_runs=True, decode_runs=False)
    # After the first placement the client may have tokens, so a refusal would break an answer that has begun.
    if request.placements > 1:
        orders.avoid(request, event.worker_id)
        orders.place(state, request, event.reason, out)
    else:
        orders.reject_placed(state, request, "decode_refused", event.reason, event.predicted_tbt_ns, out)


def _request_cancelled(state: State, event: RequestCancelled, out: StepOutput) -> None:
    request = state.requests.get(event.request_id)
    if request is None:
        return
    if request.order_id:
        booking.withdraw(state, state.orders[request.order_id], out, prefill_runs=True, decode_runs=True)
    orders.end(state, request)
    state.counters.cancelled += 1
