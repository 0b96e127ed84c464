"""The running batch of the decode machine: the next work of the compute thread, and its results. Pure.

Requests join and leave between two steps; each step makes one token of each. When the cache has no free block for
a running sequence, one that waits with a part of its KV gives its blocks back (it copies again from the pool);
without one, the sequence that joined last is swapped out to host memory, bit by bit as it is, and rejoins first:
nothing is lost and nothing is computed twice. A request whose earlier decode worker died comes with the tokens
that its client has. They are fed through decode again and not delivered, so the rest is, bit for bit, what it
would have been.

Source: Orca (OSDI'22), section 3 (joining between steps); vLLM (SOSP'23), section 4.5 (preemption by swapping).
"""

from __future__ import annotations

from halfmoon.schemas.events import DecodeStarted
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.decode.actions import Measure, RunStep, SwapIn, SwapOut
from halfmoon.workers.decode.deliveries import deliveries_of
from halfmoon.workers.decode.orders import Orders
from halfmoon.workers.decode.sequence import DecodeSequence, Stage


class Batch:
    """See the module. `size_max` sequences at a time."""

    def __init__(self, orders: Orders, size_max: int) -> None:
        self.orders, self.size_max = orders, size_max
        self._layers, self._block_tokens = orders.layout.layers, orders.layout.block_tokens
        #: Joining is over for this turn; the next step still needs room.
        self._joined = False
        self._step_context = 0

    def next_work(self) -> None:
        """The compute thread is idle: give it its next instruction, or let it sleep until Wake."""
        orders = self.orders
        assert not orders.in_step, orders.in_step
        orders.asleep = False
        if orders.moves.finish_some(orders.out):
            orders.blocks_freed()
        while not orders.stopped:
            if not self._joined:
                if self._swap_in():
                    return
                self._join()
                if not orders.running:
                    break
                self._joined = True
            if self._make_room():
                return
            self._joined = False
            if orders.running:
                orders.in_step = list(orders.running)
                self._step_context = sum(sequence.length for sequence in orders.in_step)
                orders.out.append(RunStep(orders.in_step, self._step_context))
                orders.moves.send_some(orders.out)
                return
        orders.asleep = True

    def _swap_in(self) -> bool:
        """The first of those swapped out moves back, if there is room. False: it does not."""
        orders = self.orders
        if not orders.swapped or len(orders.running) >= self.size_max:
            return False
        sequence = orders.swapped[0]
        # With the block of its next token: otherwise it would be the first to be swapped out again.
        if not orders.blocks.can_allocate(sequence.length // self._block_tokens + 1 - sequence.away):
            return False
        orders.swapped.popleft()
        sequence.place(orders.blocks.allocate(sequence.held_blocks))
        orders.moving_in = sequence
        orders.out.append(SwapIn(sequence.own_blocks, sequence.held))
        return True

    def swapped_in(self) -> None:
        """The sequence that moved in runs again."""
        orders = self.orders
        sequence, orders.moving_in = orders.moving_in, None
        assert sequence is not None
        sequence.held, sequence.held_blocks = None, 0
        if sequence.stage is Stage.ENDED:  # cancelled meanwhile
            orders.free(sequence)
            return
        sequence.stage = Stage.RUNNING
        orders.running.append(sequence)

    def _join(self) -> None:
        """Sequences whose KV is here join the batch, oldest first, once none is swapped out.

        Or when nothing runs: then the swapped sequence has no room because waiting ones have it.
        """
        orders = self.orders
        if not orders.swapped:
            orders.load_waiting()
        for sequence in list(orders.waiting.values()):
            if len(orders.running) >= self.size_max or (orders.swapped and orders.running):
                break
            if sequence.ready:
                self._join_one(sequence)

    def _join_one(self, sequence: DecodeSequence) -> None:
        orders = self.orders
        assert sequence.result is not None
        del orders.waiting[sequence.order_id]
        sequence.stage = Stage.RUNNING
        sequence.started_ns = orders.now_ns
        orders.running.append(sequence)
        orders.out.append(Measure("room_wait", orders.now_ns - sequence.ready_ns))
        orders.report(
            DecodeStarted(
                order_id=sequence.order_id,
                request_id=sequence.order.request_id,
                worker_id=orders.worker_id,
                wait_ns=sequence.wait_ns,
            )
        )

    def _make_room(self) -> bool:
        """Every running sequence gets the block that its next token needs. True: one must be swapped out first."""
        orders = self.orders
        if self._layers == 0:  # an engine that computes nothing has no KV to make room for
            return False
        for sequence in list(orders.running):
            if sequence.elsewhere:
                continue
            while sequence.stage is Stage.RUNNING and sequence.length // self._block_tokens >= len(
                sequence.table
            ):
                if orders.blocks.can_allocate(1):
                    orders.blocks.extend(sequence.table)
                elif not self._take_from_waiting():
                    # The last to join: first come, first served.
                    orders.moving_out = orders.running[-1]
                    orders.out.append(SwapOut(orders.moving_out.own_blocks))
                    return True
        return False

    def _take_from_waiting(self) -> bool:
        """Free the blocks of a sequence that waits with a part of its KV; it loads again from the pool."""
        orders = self.orders
        for sequence in reversed(orders.waiting.values()):
            # A copy under way would write into blocks that are another's by then; a whole KV is about to join.
            if sequence.table and sequence.kv.copying == 0 and not sequence.kv.complete:
                sequence.kv.take_back()
                orders.blocks.free(sequence.own_blocks)
                sequence.table = []
                return True
        return False

    def swapped_out(self, held: object) -> None:
        """The blocks of the sequence that moved out are free; `held` has their content."""
        orders = self.orders
        sequence, orders.moving_out = orders.moving_out, None
        assert sequence is not None
        if sequence.stage is Stage.ENDED:  # cancelled meanwhile
            orders.free(sequence)
            return
        orders.running.remove(sequence)
        orders.moves.give_up(sequence.order_id, "it is swapped out", orders.out)
        sequence.held, sequence.held_blocks = held, len(sequence.own_blocks)
        sequence.stage = Stage.SWAPPED
        sequence.preemptions += 1
        # In front: it joined before those that were swapped out earlier, and rejoins before them.
        orders.swapped.appendleft(sequence)
        orders.free(sequence)

    def step_failed(self, worker_id: str, reason: str, hold: int = 0) -> None:
        """No token was made. The sequences that do not need that worker are in the next step, which writes the same."""
        orders = self.orders
        batch, orders.in_step = orders.in_step, []
        orders.lose_lender(worker_id, reason, hold)
        for sequence in batch:
            if sequence.stage is Stage.ENDED:
                orders.free(sequence)

    def after_step(self, tokens: list[SampledToken], step_ns: int, waits_ns: dict[str, int]) -> None:
        """Deliver the step's tokens, then end the sequences that are complete."""
        orders = self.orders
        batch, orders.in_step = orders.in_step, []
        orders.times.observe(step_ns, len(batch), self._step_context)
        orders.place_times.observe(batch, waits_ns)
        fresh: list[tuple[DecodeSequence, int]] = []
        for sequence, token in zip(batch, tokens, strict=True):
            if sequence.stage is not Stage.RUNNING:
                continue  # ended during the step
            index = len(sequence.output)
            if sequence.add(token, orders.now_ns):
                fresh.append((sequence, index))
            if index == 1:
                orders.out.append(Measure("first_step", orders.now_ns - sequence.started_ns))
        orders.out += deliveries_of(fresh, orders.worker_id)
        # Cancelled during the step, which was still writing into its blocks.
        for sequence in batch:
            if sequence.stage is Stage.ENDED:
                orders.free(sequence)
        for sequence in batch:
            if sequence.finish_reason and sequence.stage is Stage.RUNNING:
                orders.finish(sequence)
