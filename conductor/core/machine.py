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

from halfmoon.conductor.core import membership, moves, order_events, orders, roles, weights
from halfmoon.conductor.core.explanation import Explanation, MoveGrounds, RoleGrounds, explain_supposed
from halfmoon.conductor.core.invariants import check
from halfmoon.conductor.core.placement.policies import check_known
from halfmoon.conductor.core.reconcile import reconcile_orders
from halfmoon.conductor.core.state.block_index import BlockIndex, IndexImage
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.log_clock import log_time_ns
from halfmoon.conductor.core.state.slow_places import judge_places
from halfmoon.conductor.core.state.versions import of_these_weights
from halfmoon.conductor.core.step_learning import learn_step
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
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged

#: Version of the state in snapshots. Another version is not restored: the log is replayed instead.
SNAPSHOT_VERSION = 11
#: Events after which a request that waits for lenders may find room.
_MAY_END_AN_ORDER = (DecodeFailed, DecodeRefused, PrefillFailed, RequestCancelled, RequestFinished)
#: Events by which a role may be wanted: a request, or another policy for those that there are.
_SHOWS_LOAD = (RequestArrived, PolicyChanged)


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
        kind = type(stamped.event)
        if kind is ClusterConfigured:
            # Another log begins. Nothing of an earlier one may decide in it: a replay begins here, and would differ.
            self.state = State(index=BlockIndex())
        state = self.state
        at_ns = log_time_ns(state, stamped.at_ns)
        membership.bridge_silence(state, at_ns)
        state.seq = stamped.seq
        state.at_ns = max(state.at_ns, at_ns)
        state.orders_now = 0
        # A silent log proves nothing of its members, but one with nothing but timers does: see `bridge_silence`.
        state.timers_in_row = state.timers_in_row + 1 if kind is TimerFired else 0
        out = StepOutput(self.explain_requests)
        _apply(state, stamped.event, out)
        if state.orders_now:
            moves.keep_planning(state, out)
        if kind in _SHOWS_LOAD:
            roles.keep_looking(state, out)
        self.notes, self.move_notes, self.role_notes = out.notes, out.moves, out.roles
        if self.checked:
            check(state)
        return out

    def explain(self, request: RequestArrived, at_ns: int) -> Explanation:
        """The grounds of the decision that `request` would get now; changes nothing.

        `random` draws by the place in the log: here, by the next one. The grounds of real decisions are in `notes`.
        """
        return explain_supposed(self.state, of_these_weights(self.state, request), at_ns)

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
    # The cases are tried one by one: frequent events come first.
    match event:
        case RequestArrived():
            event = of_these_weights(state, event)
            if event.request_id not in state.requests and event.request_id not in state.finished:
                orders.accept_or_reject(state, event, out)
            elif event.answer_lost and event.request_id in state.finished:
                orders.accept_again(state, event, out)
        case RequestCancelled():
            if event.request_id in state.requests:
                orders.cancel(state, state.requests[event.request_id], out)
        case (
            PrefillFinished()
            | RequestFinished()
            | DecodeStarted()
            | StageFinished()
            | PrefillFailed()
            | DecodeRefused()
            | DecodeFailed()
            | KvMoved()
            | KvMoveRefused()
        ):
            order_events.apply(state, event, out)
        case WorkerHeartbeat():
            _worker_heartbeat(state, event, out)
        case BlocksStored() | BlocksEvicted() | TierLost() | StoreInventory():
            membership.blocks_reported(state, event)
        case StoreHeartbeat():
            membership.store_heartbeat(state, event, out)
        case WorkerJoined():
            membership.worker_joined(state, event, out)
        case WorkerDraining():
            membership.worker_draining(state, event, out)
        case WorkerLeft():
            membership.worker_left(state, event.worker_id, event.incarnation, out)
        case StoreSuspected():
            membership.store_suspected(state, event)
        case StoreJoined():
            membership.store_joined(state, event, out)
        case StoreLeft():
            membership.store_left(state, event.node_id, event.incarnation)
        case FrontendHeartbeat():
            membership.frontend_heartbeat(state, event, out)
        case FrontendJoined():
            membership.frontend_joined(state, event, out)
        case FrontendLeft():
            membership.frontend_left(state, event.frontend_id, event.incarnation, out)
        case TimerFired():
            _timer_fired(state, event, out)
        case ClusterConfigured():
            check_known(event.policy)
            state.policy, state.code_version = event.policy, event.code_version
        case PolicyChanged():
            moves.policy_changed(state, event, out)
        case RoleWanted():
            roles.role_wanted(state, event, out)
        case PlacementsPaused():
            weights.placements_paused(state, event, out)
        case WeightsChanged():
            weights.weights_changed(state, event)
        case StateDigested():
            pass
        case _:
            assert_never(event)
    if type(event) in _MAY_END_AN_ORDER:
        orders.place_borrowers(state, out)


def _worker_heartbeat(state: State, event: WorkerHeartbeat, out: StepOutput) -> None:
    worker = membership.worker_heartbeat(state, event, out)
    if worker is not None:
        learn_step(state, worker, event)
        judge_places(state, worker, event)
        reconcile_orders(state, worker, event, out)


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
