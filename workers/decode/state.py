"""The decode machine: events in, actions out. Pure: no clock, no thread, no connection, no tensor.

    order ─▶ waiting ─▶ running ─▶ ended          Each arrow to "ended" may also start at waiting or swapped.
                          │  ▲
                          ▼  │
                         swapped

`orders` has the orders that wait, run and end, and their blocks; `batch` decides the compute thread's next work.
"""

# The form is that of dask's worker and of h11: a stimulus comes in, instructions go out, and a shell obeys them. The
# worker was once threads and tasks around shared state. Much then depended on the order in which a copy, a step and a
# cancellation ended, and a test could only hope to meet that order. Now tests draw the interleavings and check the
# invariants after each event, and worlds of chaos play whole clusters of this very machine.
#
# It is simpler than dask's, because a worker has one kind of task and no dependencies between tasks. It is harder where
# threads share memory with it: a step, a copy or a swap that has begun cannot be taken back. So an order that ends in
# the middle of one is forgotten at once and its blocks are freed later (`Orders._free_unless_busy`).
#
# Turned down:
# - A preempted sequence that is computed again, as vLLM does: KV of generated tokens that is computed as a prompt has
#   other bits, and feeding them through decode again takes a step each. Blocks move to host memory instead.
# - Actions that return a value: each ends in an event of its own, so that the machine never waits.
# - One class for all of it: admission, lenders, moves and the batch change for different reasons.
#
# In doubt: `on` hands `now_ns` and `out` to `Orders` as attributes, not as arguments. That saves a parameter in forty
# methods, and makes it possible to read the time of an older event by mistake.

from __future__ import annotations

from typing import assert_never

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.policy import Layout
from halfmoon.workers.attention.events import HoldAsked, HoldLoaded
from halfmoon.workers.decode import invariants
from halfmoon.workers.decode.actions import Action
from halfmoon.workers.decode.batch import Batch
from halfmoon.workers.decode.deliveries import resend_reply
from halfmoon.workers.decode.events import (
    DecodeOrdered,
    EngineIdled,
    Event,
    KvHeard,
    LayersCopied,
    LeaseConfirmed,
    MemoryLost,
    MoveEnded,
    MoveOrdered,
    OutputShared,
    PartHeld,
    PartNotHeld,
    StepEnded,
    StepFailed,
    SwappedIn,
    SwappedOut,
    TailPushed,
    TokensPushed,
)
from halfmoon.workers.decode.orders import Orders
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    AnswerResend,
    OrderCancelled,
    ResendRequested,
    TokensTaken,
    WorkerStopped,
)


class DecodeState:
    """See the module. `has_store`: the KV comes through a pool (an engine that computes nothing has none).

    `eos_ids` are the model's end tokens. Anybody may read the state; only `on` changes it (and `heartbeat`, the step
    figures).
    """

    def __init__(
        self,
        *,
        worker_id: str,
        node_id: str = "",
        incarnation: str,
        layout: Layout,
        kv_blocks: int,
        batch_max: int,
        profile: CostProfile,
        has_store: bool = True,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.worker_id, self.incarnation = worker_id, incarnation
        self.orders = Orders(
            worker_id=worker_id,
            node_id=node_id,
            incarnation=incarnation,
            layout=layout,
            kv_blocks=kv_blocks,
            profile=profile,
            has_store=has_store,
            eos_ids=eos_ids,
        )
        self.batch = Batch(self.orders, batch_max)

    def on(self, event: Event) -> list[Action]:
        """The actions that follow from `event`: to be done in this order, before the next event."""
        orders, batch = self.orders, self.batch
        orders.now_ns, orders.wall_ns = event.at_ns, event.wall_ns
        orders.out = []
        match event:
            case EngineIdled():
                batch.next_work()
            case StepEnded():
                batch.after_step(event.tokens, event.step_ns, event.waits_ns)
            case KvHeard():
                orders.hear(event.author_id, event.message)
            case StepFailed():
                batch.step_failed(event.worker_id, event.reason, event.hold)
            case HoldAsked():
                orders.holds.ask(event.ask_id, event.request, orders.out)
            case HoldLoaded():
                orders.hold_loaded(event.hold, event.problem)
            case TailPushed():
                orders.tail_pushed(event.order_id, event.problem)
            case PartHeld():
                orders.part_held(event.order_id, event.worker_id, event.hold, event.plan_id)
            case PartNotHeld():
                orders.part_not_held(event.order_id, event.worker_id, event.reason, event.plan_id)
            case MoveOrdered():
                orders.moves.begin(event.order, orders.open.get(event.order.order_id), orders.out)
            case MoveEnded():
                orders.end_move(event.plan_id)
            case TokensPushed():
                orders.pushed(event.moved_bytes, event.problem)
            case LayersCopied():
                orders.copied(event.copy_id, event.problem)
            case DecodeOrdered():
                orders.begin(event.order)
            case TokensTaken():
                orders.take(event.order_id, event.reply)
            case OrderCancelled():
                orders.cancel(event.order_id)
            case SwappedOut():
                batch.swapped_out(event.held)
            case SwappedIn():
                batch.swapped_in()
            case LeaseConfirmed():
                orders.lease_ended(event.order_id, held=event.held)
            case OutputShared():
                orders.shared(event.order_id)
            case ResendRequested():
                known = orders.known(event.request.order_id)
                orders.out.append(AnswerResend(resend_reply(known, event.request, self.worker_id)))
            case MemoryLost():
                orders.lose_memory()
            # The conductor knows this worker no more, and has placed its orders elsewhere: none of them may go on here.
            case AnnounceRequested():
                orders.drop_all()
                orders.out.append(Announce())
            case WorkerStopped():
                orders.stopped = True
                orders.drop_all()
            case _:
                assert_never(event)
        return orders.out

    @property
    def kv_blocks_used(self) -> int:
        """Blocks of the engine's cache."""
        return self.orders.blocks_used

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat:
        """How the worker is; the step figures begin again. `obeyed_seq`: cause of the newest decision it was fed."""
        orders = self.orders
        steps, step_ns, sequences, context = orders.times.take()
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=len(orders.waiting) + len(orders.swapped),
            running=len(orders.running),
            kv_blocks_used=self.kv_blocks_used,
            steps=steps,
            step_ns=step_ns,
            step_sequences=sequences,
            step_context_tokens=context,
            orders=[*orders.open, *orders.holds.order_ids()],
            lacking=orders.lacking(),
            obeyed_seq=obeyed_seq,
            places=orders.place_times.take(),
        )

    def validate(self) -> None:
        """Raises AssertionError, with values, when an invariant does not hold."""
        invariants.check(self.orders, self.batch.size_max)
