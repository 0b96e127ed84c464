"""A simulated mixed worker: the time that `halfmoon.workers.mixed` takes, under the same batch former.

The cached blocks of the next few prompts are held and fetched while others are computed. An iteration has a row of each
sequence that decodes, and chunks of prompts within the token budget. Sequences take the cache's blocks as they grow;
one that is preempted computes its prompt again and feeds what it had drawn through decode. The KV stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfmoon.conductor.simulation.batch import StepMeans
from halfmoon.conductor.simulation.context import SimulationContext
from halfmoon.conductor.simulation.nodes import Node
from halfmoon.conductor.simulation.prompt_blocks import PromptBlocks
from halfmoon.schemas.decisions import StartMixed
from halfmoon.schemas.events import PrefillFinished, WorkerHeartbeat
from halfmoon.schemas.numbers import tbt_ns
from halfmoon.schemas.policy import Layout
from halfmoon.workers.batch_former import BatchFormer, BlockRoom, Iteration


class SimulatedMixedOrder:
    """One order in hand. `drawn`: tokens since it was admitted last; `answered`: tokens of the answer."""

    __slots__ = (
        "answered",
        "arrived_ns",
        "blocks",
        "compute_ns",
        "drawn",
        "first_ns",
        "formed",
        "intervals",
        "last_ns",
        "order",
        "output_tokens",
        "prepared",
        "started_ns",
    )

    def __init__(self, order: StartMixed, output_tokens: int, blocks: PromptBlocks, now_ns: int) -> None:
        self.order, self.output_tokens, self.blocks, self.arrived_ns = order, output_tokens, blocks, now_ns
        self.prepared = self.formed = False
        self.drawn = self.answered = self.compute_ns = 0
        self.started_ns = self.first_ns = self.last_ns = -1
        self.intervals: list[int] = []

    @property
    def cached_tokens(self) -> int:
        """Those of the prompt that are held in a pool. Once it is computed nothing is, and a preemption starts anew."""
        return 0 if self.answered else self.blocks.tokens


class _LoadingRoom(BlockRoom):
    """A worker's own cache, into which cached tokens of a prompt that entered are loaded: `cached` of an order."""

    def __init__(self, blocks: int, block_tokens: int, cached: Callable[[str], int]) -> None:
        super().__init__(blocks, block_tokens)
        self._cached = cached

    def enter(self, name: str, tokens: int) -> int | None:
        return None if super().enter(name, tokens) is None else self._cached(name)


class SimulatedMixed:
    """Answers every StartMixed by PrefillFinished and RequestFinished, unless it is cancelled."""

    def __init__(
        self,
        context: SimulationContext,
        worker_id: str,
        node: Node,
        layout: Layout,
        *,
        kv_blocks: int,
        token_budget: int,
        iteration_ns: int,
    ) -> None:
        """`iteration_ns` 0: the time of an iteration is not bounded."""
        self.context, self.worker_id, self.node, self.incarnation = context, worker_id, node, "i1"
        self.open: dict[str, SimulatedMixedOrder] = {}
        self.cost = context.profile.cost
        # Exact numerics: chunks are whole blocks, as live.
        self._grain = layout.block_tokens if layout.numerics == "exact" else 1
        self.token_budget = max(token_budget, self._grain)
        self.former = BatchFormer(
            _LoadingRoom(kv_blocks, layout.block_tokens, lambda name: self.open[name].cached_tokens),
            budget_tokens=self.token_budget,
            sequences_max=context.profile.batch_max,
            grain_tokens=self._grain,
            replays=True,
            cost=self.cost,
            iteration_ns=iteration_ns,
        )
        self.former.load_per_token_ps = context.profile.load_ns(1_000)
        self._busy = False
        self.obeyed_seq = 0
        #: Of iterations: what the chunks added, and what decodes take alone.
        self.prefill_ns = self.decode_ns = 0
        self.preemptions = 0
        #: Of decodes alone.
        self._means = StepMeans()

    @property
    def running(self) -> int:
        return len(self.former.running)

    @property
    def queued(self) -> int:
        return len(self.open) - self.running

    def orders_open(self) -> int:
        return len(self.open)

    def present_step_ns(self) -> float:
        """A step of those that decode now; 0 for none."""
        progress = {name: self.former.progress(name) for name in self.former.running}
        decoding = [name for name, (computed, tokens) in progress.items() if computed == tokens]
        return self.cost.step_ns(len(decoding), self._context_tokens(decoding)) if decoding else 0

    def heartbeat(self) -> WorkerHeartbeat:
        steps, step_ns, sequences, context_tokens = self._means.take()
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=self.queued,
            running=self.running,
            steps=steps,
            step_ns=step_ns,
            step_sequences=sequences,
            step_context_tokens=context_tokens,
            orders=list(self.open),
            obeyed_seq=self.obeyed_seq,
        )

    def start(self, order: StartMixed) -> None:
        context = self.context
        blocks = PromptBlocks(context, self.node, context.keys(order.request_id))
        output_tokens = context.outcomes[order.request_id].output_tokens
        self.open[order.order_id] = SimulatedMixedOrder(order, output_tokens, blocks, context.clock.now_ns)
        self._go_on()

    def cancel(self, order_id: str) -> None:
        known = self.open.pop(order_id, None)
        if known is None:
            return
        self.former.remove(order_id)
        if not known.answered:
            known.blocks.let_go()
        self._go_on()

    # --- before ---------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Prepare the next ones, give the former those that are prepared, and compute."""
        running = {order_id: self.open[order_id] for order_id in self.former.running}
        waiting = [known for order_id, known in self.open.items() if order_id not in running]
        for place, known in enumerate(waiting[: self.context.profile.prepared_max]):
            if not known.prepared and not self._prefix_is_coming(
                known, [*running.values(), *waiting[:place]]
            ):
                known.prepared = True
                known.blocks.prepare(
                    known.order.prompt_tokens,
                    known.order.fetches,
                    first_layer=lambda: None,  # it computes when all is here, as live
                    all_layers=self._go_on,
                )
        for known in waiting:
            if known.prepared and known.blocks.loaded and not known.formed:
                known.formed = True
                self.former.add(known.order.order_id, known.order.prompt_tokens)
        if not self._busy:
            self._next()

    def _prefix_is_coming(self, known: SimulatedMixedOrder, before: Sequence[SimulatedMixedOrder]) -> bool:
        """One of those before it, whose prompts are not computed, brings blocks that it can use."""
        return self.context.coming_at_mixed and any(
            one.blocks.brings_for(known.blocks, known.order.prompt_tokens)
            for one in before
            if not one.answered
        )

    # --- iterations -----------------------------------------------------------------------------------------

    def _context_tokens(self, names: Sequence[str]) -> int:
        return sum(self.open[name].order.prompt_tokens + self.open[name].drawn for name in names)

    def _next(self) -> None:
        former, context = self.former, self.context
        # As live: beside the decodes there is always room for one grain of a prompt.
        decoding = len(former.running) - former.prefilling
        former.budget_tokens = max(self.token_budget, decoding + self._grain)
        formed = former.form()
        self.preemptions += len(formed.preempted)
        self._busy = not formed.idle
        if not self._busy:
            former.made()
            return
        for name in formed.admitted:
            known = self.open[name]
            if known.started_ns < 0:
                known.started_ns = context.clock.now_ns
        sequences, tokens = len(formed.decodes), self._context_tokens(formed.decodes)
        chunks = [(chunk.start, chunk.tokens) for chunk in formed.chunks]
        times = context.clock.jitter()
        # What is cached is loaded layer by layer while layers are computed.
        load_ns = context.profile.load_ns(sum(load.tokens for load in formed.loads))
        took_ns = max(load_ns, int(self.cost.iteration_ns(chunks, sequences, tokens) * times))
        alone_ns = int(self.cost.step_ns(sequences, tokens) * times) if sequences else 0
        context.clock.after(took_ns, self._made, took_ns, min(took_ns, alone_ns), tokens)

    def _made(self, took_ns: int, alone_ns: int, context_tokens: int) -> None:
        """An iteration is over, in which decodes alone would have taken `alone_ns`."""
        formed = self.former.made()
        self._timed(formed, took_ns, alone_ns, context_tokens)
        for name in formed.decodes:
            if (known := self.open.get(name)) is not None:
                self._draw(known)
        for chunk in formed.chunks:
            if chunk.last and (known := self.open.get(chunk.name)) is not None:
                self._prompt_computed(known)
        self._busy = False
        self._go_on()

    def _timed(self, formed: Iteration, took_ns: int, alone_ns: int, context_tokens: int) -> None:
        """As live: an iteration of decodes alone is a step; of another one the chunks are charged what they added."""
        self.decode_ns += alone_ns
        self.prefill_ns += took_ns - alone_ns
        if formed.decodes and not formed.chunks:
            self._means.add(1, alone_ns, len(formed.decodes), context_tokens)
        tokens = sum(chunk.tokens for chunk in formed.chunks)
        for chunk in formed.chunks:
            known = self.open.get(chunk.name)
            if known is not None and not known.answered:
                known.compute_ns += (took_ns - alone_ns) * chunk.tokens // tokens

    def _prompt_computed(self, known: SimulatedMixedOrder) -> None:
        """Its first token is drawn, or was before it was preempted."""
        known.drawn = 1
        if known.answered:
            return
        context, order, blocks = self.context, known.order, known.blocks
        now_ns = context.clock.now_ns
        known.answered, known.first_ns, known.last_ns = 1, now_ns, now_ns
        blocks.commit()
        context.fetched_bytes += blocks.fetched_bytes
        outcome = context.outcomes[order.request_id]
        outcome.queue_ns = known.started_ns - known.arrived_ns
        outcome.compute_ns += known.compute_ns
        outcome.local_tokens = blocks.local * context.block_tokens
        outcome.fetched_tokens = blocks.fetched * context.block_tokens
        outcome.first_token_ns = now_ns
        context.say(
            PrefillFinished(
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=self.worker_id,
                queue_ns=outcome.queue_ns,
                compute_ns=known.compute_ns,
                prompt_tokens=order.prompt_tokens,
                decodes=known.output_tokens > 1,
                **blocks.as_reported(),
            )
        )
        if known.output_tokens == 1:
            self._finish(known)

    def _draw(self, known: SimulatedMixedOrder) -> None:
        """A token more, unless it was drawn before a preemption and went through again."""
        known.drawn += 1
        if known.drawn <= known.answered:
            return
        now_ns = self.context.clock.now_ns
        known.answered = known.drawn
        known.intervals.append(now_ns - known.last_ns)
        known.last_ns = now_ns
        if known.answered == known.output_tokens:
            self._finish(known)

    def _finish(self, known: SimulatedMixedOrder) -> None:
        context, order = self.context, known.order
        self.former.remove(order.order_id)
        del self.open[order.order_id]
        context.finish(
            order,
            completion_tokens=known.output_tokens,
            tbt_ns=tbt_ns(known.intervals),
            decode_ns=context.clock.now_ns - known.first_ns,
        )
