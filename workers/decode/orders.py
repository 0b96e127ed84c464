"""The orders of the decode machine: their tokens, their KVCache, their admission, their end. Pure.

An order waits for its tokens (from the frontend), its KV (`TransferOpened` names slots of the node's pool, `KvReady`
names the layers of blocks that are readable there; they are copied into the engine's cache while the batch steps) and
its first token (`PrefillResult`). Then the SLO is checked once more, the first token is delivered, and the sequence is
ready to join the batch. Exactly one of RequestFinished, DecodeRefused and DecodeFailed answers an order, unless it was
cancelled.

Source: Mooncake (FAST'25), section 3 (double check before decode).
"""

# The paper is short on this: KV streams to the decode instance while prefill goes on, and the request joins the batch
# when all is there. The work is in the word "when". Tokens, KV and first token come from three processes over three
# paths, in any order, and even before the order itself. So nothing here is a sequence of waits: each arrival is noted,
# and `_advance` does whatever has become possible.
#
# Turned down:
# - Copying only when all KV is in the pool: the copy of a long prompt would come on top of its prefill.
# - Cache blocks that a waiting order keeps until it runs: running sequences would be swapped out for KV that nobody
#   attends to yet. So a waiting order may lose its blocks, and copies again from the pool (`batch`).
# - Trust in any author: each store agent and each prefill worker may write to this worker, so KV progress counts only
#   from the order's own.
#
# In doubt: the double check refuses after a prefill was paid for. It is worth that only while the conductor's
# prediction is worse than the step times measured here; `wasted_prefills` counts how often it happens.

from __future__ import annotations

from collections import OrderedDict, deque
from typing import assert_never

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import DecodeFailed, DecodeRefused, DecodeStarted, RequestFinished
from halfmoon.schemas.kv import KvMessage, KvReady, PrefillResult, TransferFailed, TransferOpened
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.attention.holds import Holds
from halfmoon.workers.decode.actions import Action, CopyLayers, EndSpan, Release, Wake
from halfmoon.workers.decode.deliveries import deliveries_of
from halfmoon.workers.decode.generated_blocks import generated_blocks, shares_generated
from halfmoon.workers.decode.lenders import Lenders, borrows_of, holds_under
from halfmoon.workers.decode.moves import Moves
from halfmoon.workers.decode.sequence import DecodeSequence, Stage
from halfmoon.workers.decode.step_times import PlaceTimes, StepTimes
from halfmoon.workers.finished_orders import FinishedOrders
from halfmoon.workers.machines import Report, TakeTokens, refusal
from halfmoon.workers.model.block_allocator import BlockAllocator

#: KV messages may overtake their StartDecode order (another stream): those of this many orders are kept.
EARLY_ORDERS_MAX = 256
#: A request that ends with its first token lets the last layers of its KV arrive (they join the pool).
LAST_LAYERS_NS = SECOND_NS // 2
#: The KV progress that counts here: a fetch is waited for as a whole, and a promise is of KV between engines.
OfDecode = TransferOpened | KvReady | TransferFailed | PrefillResult


class Orders:
    """See the module. Every order that is not answered yet, by its stage; and the blocks of all of them.

    `now_ns`, `wall_ns` and `out` are of the event that is being handled: the actions go to `out`, in order.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        node_id: str,
        incarnation: str,
        layout: Layout,
        kv_blocks: int,
        profile: CostProfile,
        has_store: bool,
        eos_ids: frozenset[int],
    ) -> None:
        self.worker_id, self.layout, self.has_store = worker_id, layout, has_store
        self.lenders = Lenders(worker_id, node_id, layout.block_tokens)
        self.blocks = BlockAllocator(kv_blocks)
        self.holds = Holds(layout, self.blocks, incarnation)
        self.moves = Moves(worker_id, layout, self.blocks)
        self.times, self.place_times = StepTimes(profile), PlaceTimes(layout, profile)
        #: Every order not yet answered; each is in one of `waiting`, `running` and `swapped`, or is `moving_in`.
        self.open: dict[str, DecodeSequence] = {}
        self.waiting: OrderedDict[str, DecodeSequence] = OrderedDict()
        self.running: list[DecodeSequence] = []
        self.swapped: deque[DecodeSequence] = deque()
        #: Sequences that the compute thread and the copy thread work on: they keep their blocks until these are done.
        self.in_step: list[DecodeSequence] = []
        self.moving_out: DecodeSequence | None = None
        self.moving_in: DecodeSequence | None = None
        self.copies: dict[int, tuple[DecodeSequence, int]] = {}
        self.sharing: dict[str, DecodeSequence] = {}
        self.pushing: dict[str, DecodeSequence] = {}
        self.finished = FinishedOrders[DecodeSequence]()
        #: By order, each with its author.
        self.early: OrderedDict[str, list[tuple[str, OfDecode]]] = OrderedDict()
        #: The compute thread waits for Wake.
        self.asleep = True
        self.stopped = False
        self.now_ns = self.wall_ns = 0
        self.out: list[Action] = []
        self._eos_ids = eos_ids
        self._copy_id = 0

    @property
    def blocks_used(self) -> int:
        """Blocks of the engine's cache."""
        return self.blocks.num_blocks - self.blocks.free_blocks

    def known(self, order_id: str) -> DecodeSequence | None:
        """An order that is open, or finished not long ago."""
        return self.open.get(order_id) or self.finished.get(order_id)

    def lacking(self) -> list[str]:
        """Orders whose first token, or some of whose KV, has yet to be heard of."""
        return [
            order_id
            for order_id, sequence in self.waiting.items()
            if not sequence.order.resumes
            and (sequence.result is None or (self.has_store and not sequence.kv.announced))
        ]

    def leased(self) -> list[str]:
        """Orders that have slots of the node's pool, and have yet to copy from them: their leases must not end."""
        return [
            order_id
            for order_id, sequence in self.open.items()
            if sequence.kv.opened and not sequence.released
        ]

    # --- an order arrives -----------------------------------------------------------------------------------

    def begin(self, order: StartDecode) -> None:
        """Nothing, if it is known already."""
        if self.stopped or self.known(order.order_id) is not None:
            return
        sequence = DecodeSequence(order, self.layout, self.now_ns)
        self.open[order.order_id] = self.waiting[order.order_id] = sequence
        self.out.append(TakeTokens(order.frontend_id, order.request_id, order.order_id))
        for author_id, message in self.early.pop(order.order_id, ()):
            self._on_kv(sequence, author_id, message)

    def take(self, order_id: str, reply: TakeReply | None) -> None:
        """Note the frontend's answer; None: it does not answer."""
        sequence = self.open.get(order_id)
        if sequence is None or sequence.taken:
            return
        if reply is None or reply.gone:
            self._fail(sequence, refusal(reply), retryable=reply is None)
            return
        sequence.take(reply, self._eos_ids)
        if sequence.order.resumes:
            self._resume(sequence)
        self._advance(sequence)

    def _resume(self, sequence: DecodeSequence) -> None:
        """It goes on after the tokens that its client has."""
        if not sequence.replay:
            self._fail(sequence, "nothing was delivered that could be gone on from", retryable=True)
            return
        sequence.go_on(self.now_ns, self.wall_ns)
        # The client has every token, and only the report of the end was lost.
        if sequence.finish_reason:
            self.finish(sequence)

    def hear(self, author_id: str, message: KvMessage) -> None:
        """KV progress of an order that is open, or yet to come."""
        if not isinstance(message, OfDecode):
            return
        sequence = self.open.get(message.order_id)
        if sequence is not None:
            self._on_kv(sequence, author_id, message)
        elif message.order_id not in self.finished:
            self._keep_early(author_id, message)

    def _keep_early(self, author_id: str, message: OfDecode) -> None:
        self.early.setdefault(message.order_id, []).append((author_id, message))
        while len(self.early) > EARLY_ORDERS_MAX:
            self.early.popitem(last=False)

    def _on_kv(self, sequence: DecodeSequence, author_id: str, message: OfDecode) -> None:
        order = sequence.order
        told_by = order.prefill_worker_id if isinstance(message, PrefillResult) else order.prefill_node_id
        # Every store agent and every prefill worker may write to this worker, and knows its orders.
        # "" is an order of an older log, which does not name the two.
        if told_by not in ("", author_id):
            return
        match message:
            case TransferOpened() | KvReady():
                if self.has_store:
                    sequence.kv.note(message)
            case PrefillResult():
                if message.engine_kv is not None:
                    reason = f"{author_id} is an engine: its KV comes to adapters alone"
                    self._fail(sequence, reason, retryable=False)
                    return
                sequence.result = message
                sequence.result_ns = sequence.result_ns or self.now_ns
                if spare := sequence.leave_out(self.layout):
                    self.blocks.free(spare)
                    self.blocks_freed()
            case TransferFailed():
                self._fail(sequence, f"transfer: {message.reason}", retryable=True)
                return
            case _:
                assert_never(message)
        self._advance(sequence)

    def _advance(self, sequence: DecodeSequence) -> None:
        """Do whatever has become possible for a waiting sequence."""
        if sequence.stage is not Stage.WAITING:
            return
        if sequence.taken and sequence.result is not None and not sequence.output:
            if not self._admit(sequence):
                return
            self._emit_first(sequence)
            if sequence.finish_reason:
                self.finish(sequence)
                return
        # A swapped sequence comes first: nothing new takes blocks before it is back.
        if sequence.kv.opened and not sequence.loaded and (sequence.table or not self.swapped):
            self._load(sequence)
        if sequence.loaded:
            # Released before the sequence runs: pushes of other prompts need the slots.
            self._release(sequence)
        elif sequence.parts:
            self.lenders.ask_all(sequence, self.now_ns, self.out)
            self.lenders.push_tail(sequence, self.pushing, self.out)
        if sequence.ready:
            sequence.ready_ns = sequence.ready_ns or self.now_ns
            sequence.ready_wall_ns = sequence.ready_wall_ns or self.wall_ns
            self._wake()

    def _admit(self, sequence: DecodeSequence) -> bool:
        """The double check: would the batch still hold this request's SLO, by the step times of here and now?"""
        # A request that was placed before may have tokens at its client: it is never refused.
        order = sequence.order
        if sequence.slo_checked or order.placement > 1 or not order.tbt_slo_ns:
            return True
        sequence.slo_checked = True
        context = sum(running.length for running in self.running) + sequence.prompt_tokens
        predicted_ns = self.times.predict(len(self.running) + 1, context)
        if predicted_ns <= order.tbt_slo_ns:
            return True
        self._end(sequence)
        self._end_span(sequence, error="over the SLO")
        self.report(
            DecodeRefused(
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=self.worker_id,
                reason=f"a step would take {predicted_ns // 1_000_000} ms, over the SLO",
                predicted_tbt_ns=predicted_ns,
            )
        )
        return False

    def _emit_first(self, sequence: DecodeSequence) -> None:
        assert sequence.result is not None
        first = sequence.next_known() or sequence.result.first
        if sequence.add(first, self.now_ns):
            self.out += deliveries_of([(sequence, 0)], self.worker_id)

    # --- its KV ---------------------------------------------------------------------------------------------

    def _load(self, sequence: DecodeSequence) -> None:
        """Start copying the readable layers that are not copied yet, unless the cache has no room for the prompt."""
        kv = sequence.kv
        if not kv.readable:
            return
        if not sequence.table:
            own = kv.blocks - kv.away
            if not self.blocks.can_allocate(own):
                return
            sequence.place(self.blocks.allocate(own))
        places = kv.start()
        if places:
            kv.copying += 1
            self._copy_id += 1
            self.copies[self._copy_id] = (sequence, len(places))
            table = sequence.table
            copies = tuple((layer, kv.slots[block], table[block]) for layer, block in places)
            blocks = sorted({block for _, block in places})
            epochs = tuple((kv.slots[block], kv.epochs[block]) for block in blocks)
            last, tokens = divmod(sequence.order.prompt_tokens, self.layout.block_tokens)
            tail = (kv.slots[last], tokens) if tokens and last in blocks else (-1, 0)
            self.out.append(CopyLayers(self._copy_id, copies, epochs, tail))

    def part_held(self, order_id: str, worker_id: str, hold: int, plan_id: str) -> None:
        """A lender has a part, or room for one that moves."""
        if plan_id:
            self.moves.held(order_id, plan_id, hold)
            return
        sequence = self.open.get(order_id)
        if sequence is not None and self.lenders.held(sequence, worker_id, hold):
            self._advance(sequence)

    def part_not_held(self, order_id: str, worker_id: str, reason: str, plan_id: str) -> None:
        """A lender has no part. It is asked again for a while, unless the part is here and stays."""
        if plan_id:
            self.moves.not_held(order_id, plan_id, reason, self.out)
            return
        sequence = self.open.get(order_id)
        if sequence is not None and not self.lenders.not_held(sequence, worker_id, self.now_ns, self.out):
            self._fail(sequence, f"lender {worker_id}: {reason}", retryable=True)

    def tail_pushed(self, order_id: str, problem: str) -> None:
        """A PushTail is done: nothing of the sequence is wanted here."""
        sequence = self.pushing.pop(order_id)
        if sequence.stage is Stage.ENDED:
            self._free_unless_busy(sequence)
        elif problem:
            self._fail(sequence, f"the end of its prompt: {problem}", retryable=True)
        else:
            sequence.tail_due = False
            self.free(sequence)
            self._advance(sequence)

    def lose_lender(self, worker_id: str, reason: str, hold: int) -> None:
        """Fail the sequences of the batch that the lender has parts of, or only the one with its part under `hold`."""
        lost = [sequence for sequence in self.running if borrows_of(sequence, worker_id)]
        # A hold that no sequence has fails them all: else the same step would be repeated for ever.
        for sequence in [one for one in lost if holds_under(one, worker_id, hold)] or lost:
            self._fail(sequence, f"lender {worker_id}: {reason}", retryable=True)

    def copied(self, copy_id: int, problem: str) -> None:
        """A CopyLayers is done."""
        sequence, count = self.copies.pop(copy_id)
        kv = sequence.kv
        kv.copying -= 1
        kv.copied += count
        if sequence.stage is Stage.ENDED:
            self._free_unless_busy(sequence)
        elif problem:
            self._fail(sequence, f"its KV: {problem}", retryable=True)
        else:
            self._advance(sequence)

    def lose_memory(self) -> None:
        """The pool is empty: KV on its way through it is lost, KV of running sequences is not."""
        for sequence in list(self.waiting.values()):
            if not sequence.loaded:
                self._fail(sequence, "the node's store agent restarted", retryable=True)
        # KV that overtook its order: its slots will be given to other orders.
        for order_id, messages in self.early.items():
            kept = [each for each in messages if not isinstance(each[1], TransferOpened | KvReady)]
            self.early[order_id] = kept

    # --- the end of an order --------------------------------------------------------------------------------

    def finish(self, sequence: DecodeSequence) -> None:
        """Its last token is out."""
        result = sequence.result
        assert result is not None
        self._end_span(sequence)
        self.report(sequence.finished(self.worker_id, result, self.now_ns))
        self.finished.keep(sequence)
        if self.has_store and shares_generated(sequence, self.layout):
            self._share_output(sequence)
        self._end(sequence)

    def _fail(self, sequence: DecodeSequence, reason: str, *, retryable: bool) -> None:
        if sequence.stage is Stage.ENDED:
            return
        self._end(sequence)
        self._end_span(sequence, error=reason)
        self.report(
            DecodeFailed(
                order_id=sequence.order_id,
                request_id=sequence.order.request_id,
                worker_id=self.worker_id,
                reason=reason[:500],
                retryable=retryable,
            )
        )

    def cancel(self, order_id: str) -> None:
        """The conductor withdraws the order: nothing answers it."""
        self.early.pop(order_id, None)
        if (sequence := self.open.get(order_id)) is not None:
            self._drop(sequence)
        if self.holds.drop(order_id, self.out):
            self.blocks_freed()

    def drop_all(self) -> None:
        """Cancel every order, and hold nothing for others."""
        for sequence in list(self.open.values()):
            self._drop(sequence)
        self.holds.drop_all(self.out)

    def hold_loaded(self, number: int, problem: str) -> None:
        """A LoadHold is done."""
        if self.holds.loaded(number, problem, self.out):
            self.blocks_freed()

    def end_move(self, plan_id: str) -> None:
        """A move to this worker came to nothing."""
        if self.holds.end_move(plan_id, self.out):
            self.blocks_freed()

    def pushed(self, moved_bytes: int, problem: str) -> None:
        """A PushTokens is done."""
        if self.moves.pushed(moved_bytes, problem, self.out):
            self.blocks_freed()

    def lease_ended(self, order_id: str, *, held: bool) -> None:
        """A Release is done."""
        if order_id in self.open:
            self.open[order_id].lease_held = held

    def shared(self, order_id: str) -> None:
        """A ShareOutput is done."""
        self._free_unless_busy(self.sharing.pop(order_id))

    def _drop(self, sequence: DecodeSequence) -> None:
        self._end_span(sequence, cancelled=True)
        sequence.finish_reason = sequence.finish_reason or "abort"
        self._end(sequence)

    def _end(self, sequence: DecodeSequence) -> None:
        assert sequence.stage is not Stage.ENDED, ("a second end", sequence.order_id)
        sequence.stage = Stage.ENDED
        self._forget(sequence)
        self._free_unless_busy(sequence)
        answered = sequence.finish_reason in ("stop", "length")
        self._release(sequence, LAST_LAYERS_NS if answered and not sequence.loaded else 0)

    def _forget(self, sequence: DecodeSequence) -> None:
        self.open.pop(sequence.order_id, None)
        self.waiting.pop(sequence.order_id, None)
        self.moves.forget(sequence.order_id)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence in self.swapped:
            self.swapped.remove(sequence)
            sequence.held = None

    def _is_busy(self, sequence: DecodeSequence) -> bool:
        """A thread still reads or writes its blocks."""
        return (
            sequence.kv.copying > 0
            or sequence in self.in_step
            or sequence is self.moving_out
            or sequence is self.moving_in
            or sequence.order_id in self.sharing
            or sequence.order_id in self.pushing
        )

    def _free_unless_busy(self, sequence: DecodeSequence) -> None:
        """An ended sequence keeps its blocks until no thread works on them."""
        if not self._is_busy(sequence):
            self.free(sequence)

    def free(self, sequence: DecodeSequence) -> None:
        """Its blocks may be used by others."""
        if sequence.table:
            self.blocks.free(self.moves.unread(sequence))
            sequence.table = []
        self.blocks_freed()

    def blocks_freed(self) -> None:
        """Go on with orders and swapped sequences that wait for blocks."""
        if not self.stopped:
            self.load_waiting()
            if self.swapped:
                self._wake()

    def load_waiting(self) -> None:
        """Go on with every order whose KV waits for blocks."""
        for waiting in list(self.waiting.values()):
            if waiting.kv.readable:
                self._advance(waiting)

    def _share_output(self, sequence: DecodeSequence) -> None:
        self.sharing[sequence.order_id] = sequence
        self.out.append(generated_blocks(sequence, self.layout))

    # --- words out ------------------------------------------------------------------------------------------

    def report(self, event: DecodeStarted | RequestFinished | DecodeRefused | DecodeFailed) -> None:
        """For the log."""
        self.out.append(Report(event))

    def _end_span(self, sequence: DecodeSequence, *, error: str = "", cancelled: bool = False) -> None:
        if sequence.traceparent:
            self.out.append(EndSpan(sequence, error, cancelled))

    def _release(self, sequence: DecodeSequence, after_ns: int = 0) -> None:
        if self.has_store and not sequence.released:
            sequence.released = True
            confirm = sequence.loaded and self.layout.numerics == "fast"
            self.out.append(Release(sequence.order_id, after_ns, confirm))

    def _wake(self) -> None:
        """There may be something to compute."""
        if self.asleep and not self.stopped:
            self.asleep = False
            self.out.append(Wake())
