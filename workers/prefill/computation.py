"""Computes one prompt on the compute thread, by a `ComputePrompt`, and reports every layer.

Three threads share it: the loop hears of fetched layers and of cancellation, the copy thread loads the cached
layers just ahead of the layer that computes, the compute thread computes and stores.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from halfmoon.schemas.similar import SimilarReuse
from halfmoon.workers import hold_points
from halfmoon.workers.model.layer_hooks import LayerHooks
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.model.segments import AWAY
from halfmoon.workers.prefill.actions import ComputePrompt
from halfmoon.workers.prefill.cache_window import PromptMemory
from halfmoon.workers.prefill.events import ChunkStored, LayerStored, PrefixLayerLoaded, StepOfOrder
from halfmoon.workers.prefill.kept_prompts import KeptPrompts
from halfmoon.workers.prefill.layer_progress import LayerLoads, LayersMissing, StageGone
from halfmoon.workers.sample_requests import scores_of

if TYPE_CHECKING:
    from halfmoon.workers.prefill.layer_stages.group import StageGroup
    from halfmoon.workers.worker import ChannelConfig


log = logging.getLogger("halfmoon.prefill")


class OrderAborted(Exception):
    """The order was cancelled while it computed."""


class PromptComputation:
    """`tell` gets the events, from any thread."""

    def __init__(
        self,
        prompt: ComputePrompt,
        memory: PromptMemory,
        *,
        copies: Executor,
        tell: Callable[[StepOfOrder], None],
        channels: ChannelConfig | None = None,
        kept: KeptPrompts | None = None,
    ) -> None:
        """`channels`: to the other stages, where the prompt has some. `kept`: those of this worker."""
        self.order_id = prompt.order_id
        self.loads = LayerLoads()
        self.loads.fetched_up_to(prompt.fetched_layer)
        self._prompt = prompt
        self._engine, self._pool = memory.engine, memory.pool
        self._layout, self._window = memory.layout, memory.window
        self._copies = copies
        self._tell = tell
        self._stopped = False
        self._kept = kept if prompt.kept_key else None
        #: Whether the prompt was kept, and nothing was computed, once it has run.
        self.was_kept = False
        #: How likely the prompt's own tokens are, once it has run.
        self.scores = scores_of(prompt.token_ids, prompt.prompt_logprobs)
        self.reference_loads = LayerLoads()
        if prompt.reference is not None:
            self.reference_loads.fetched_up_to(prompt.reference.fetched_layer)
        #: What a similar prompt stood in for, once it has run.
        self.similar: SimilarReuse | None = None
        self._present = frozenset(prompt.present)
        first = prompt.stages[-1].first_layer if prompt.stages else 0
        #: Those that are computed here.
        self._layers = range(first, memory.layout.layers)
        self._group: StageGroup | None = None
        #: Time that was waited for the stage before.
        self.stage_wait_ns = 0
        if prompt.stages:
            from halfmoon.workers.prefill.layer_stages.group import StageGroup

            assert channels is not None, "stages, and no channels"
            self._group = StageGroup(prompt, memory, loads=self.loads, channels=channels, tell=tell)

    def stop(self) -> None:
        """Before the next layer; `run` then raises OrderAborted."""
        self._stopped = True
        self.loads.fail("cancelled")
        self.reference_loads.fail("cancelled")
        if self._group is not None:
            self._group.end()

    @property
    def reads_pool(self) -> bool:
        """True: chunks attend to segments that are in the pool alone."""
        last = self._prompt.chunks[-1].start // self._layout.block_tokens
        return bool(self._window.away(last))

    def run(self, cache: list[int]) -> object:
        """On the compute thread: the logits of the last token. `cache`: as many of the engine's blocks as the window
        wants.

        Raises LayersMissing when cached layers do not come, OrderAborted when it was stopped, OrderUnknown when its
        slots were given away meanwhile, and StageGone when another stage does not do its part.
        """
        prompt = self._prompt
        if (kept := self._restore(cache)) is not None:
            return kept
        loader = before_layer = None
        if prompt.prefix_blocks and self._pool is not None:
            first = self._window.table(cache, prompt.prefix_blocks)
            loader = self._copies.submit(self._load_prefix, first)
            before_layer = self.loads.wait_loaded
        elsewhere = self._engine.pooled_segments(self._pool_block) if self.reads_pool else None
        logits = None
        try:
            if self._group is not None:
                self._group.begin()
            for chunk in prompt.chunks:
                # Once the first chunk has waited for a layer, the others find it in the cache.
                loaded = before_layer if chunk is prompt.chunks[0] else None
                if self._stands_in(chunk):
                    logits = self._compute_similar(cache, loaded)
                    if logits is not None:
                        break
                logits = self._compute_chunk(chunk, cache, loaded, elsewhere)
        finally:
            if self._group is not None:
                self._group.close()
            # The loader writes into the cache: it must have ended before the blocks are freed.
            if loader is not None:
                with contextlib.suppress(LayersMissing):
                    loader.result()
        if self._kept is not None:
            self._kept.keep(prompt.kept_key, logits, self._engine.cache, cache[0])
        return logits

    def _restore(self, cache: list[int]) -> object | None:
        """The logits, with all done that computing does; None: the prompt was not kept, or is to be scored."""
        if self._kept is None or self.scores is not None:
            return None
        logits = self._kept.restore(self._prompt.kept_key, self._engine.cache, cache[0])
        if logits is None:
            return None
        self.was_kept = True
        if self._pool is not None:
            store = self._store_layer(cache, range(1))
            for layer in self._layers:
                if self._stopped:
                    raise OrderAborted(self.order_id)
                store(layer)
            self._tell_stored(range(1))
        return logits

    def _tell_stored(self, blocks: range) -> None:
        at_ns, first = time.monotonic_ns(), blocks.start
        self._tell(ChunkStored(at_ns=at_ns, order_id=self.order_id, first_block=first, blocks=len(blocks)))

    def _compute_chunk(
        self, chunk: range, cache: list[int], before_layer: Callable[[int], None] | None, elsewhere: Any
    ) -> object:
        """Logits, of the last chunk alone."""
        prompt, block_tokens = self._prompt, self._layout.block_tokens
        blocks = range(chunk.start // block_tokens, self._layout.blocks(chunk.stop))
        table = self._window.table(cache, blocks.start, len(blocks))
        tokens, last = prompt.token_ids[chunk.start : chunk.stop], chunk is prompt.chunks[-1]
        hooks = LayerHooks(
            before_layer=before_layer,
            after_layer=None if self._pool is None else self._store_layer(table, blocks),
            should_stop=lambda: self._stopped,
        )
        if self._group is not None:
            logits = self._engine.prefill_stage(
                PromptRows(tokens, chunk.start, table, want_logits=last, scores=self.scores),
                self._layers,
                self._rows_of(self._group),
                hooks,
            )
        else:
            if elsewhere is not None:
                elsewhere.segments = self._window.away(blocks.start)
                hooks = replace(hooks, elsewhere=elsewhere if elsewhere.segments else None)
            logits = self._engine.prefill_chunk(
                tokens,
                chunk.start,
                table,
                want_logits=last,
                scores=self.scores,
                hooks=hooks,
            )
        if self._stopped:
            raise OrderAborted(self.order_id)
        if self._pool is not None:
            self._tell_stored(blocks)
        return logits

    def _stands_in(self, chunk: range) -> bool:
        """The reference stands in for tokens from this chunk on."""
        reference = self._prompt.reference
        return reference is not None and reference.first_token == chunk.start

    def _compute_similar(self, cache: list[int], before_layer: Callable[[int], None] | None) -> object | None:
        """The rest of the prompt with the reference's KV: logits; None where it is not to be had, or too unlike. Raises
        as `run`.
        """
        from halfmoon.workers.prefill.similar_computation import (
            ReferenceMissing,
            compute_similar,
            reference_layers,
        )

        prompt, reference = self._prompt, self._prompt.reference
        assert reference is not None, self.order_id
        first_block = reference.first_token // self._layout.block_tokens
        blocks = range(first_block, self._layout.blocks(len(prompt.token_ids)))
        table = self._window.table(cache, blocks.start, len(blocks))
        kept = self._layout.blocks(reference.kept(len(prompt.token_ids)))
        hooks = LayerHooks(
            before_layer=before_layer,
            after_layer=self._store_layer(table, range(first_block, kept)),
            should_stop=lambda: self._stopped,
        )
        read = reference_layers(self._engine, self._pool, reference.slots, self.reference_loads)
        made = None
        try:
            made = compute_similar(self._engine, prompt.token_ids, reference, table, read, hooks)
        except ReferenceMissing as missing:
            log.info("order %s: no KV of a similar prompt: %s", self.order_id, missing)
        if self._stopped:
            raise OrderAborted(self.order_id)
        if made is None:
            return None
        logits, self.similar = made
        return logits

    def _rows_of(self, group: StageGroup) -> Any:
        """The next chunk, as the stages before this one made it. Raises as `run`."""
        asked_ns = time.monotonic_ns()
        try:
            rows = group.rows()
            self.stage_wait_ns += time.monotonic_ns() - asked_ns
            return rows
        except StageGone:
            if self._stopped:
                raise OrderAborted(self.order_id) from None
            # It is not the stage's fault: the prompt can be computed without the fetched blocks.
            if self.loads.failure:
                raise LayersMissing(self.loads.failure) from None
            raise

    def _load_prefix(self, table: list[int]) -> None:
        """On the copy thread: load the prefix in the first chunk's table, layer by layer, from the pool into the
        engine's cache.
        """
        prompt = self._prompt
        for layer in self._layers:
            self.loads.wait_fetched(layer)
            for block in range(prompt.prefix_blocks):
                if table[block] != AWAY:
                    self._engine.cache.write_block(layer, table[block], self._pool_block(block, layer))
            self.loads.loaded_up_to(layer)
            self._tell(PrefixLayerLoaded(at_ns=time.monotonic_ns(), order_id=self.order_id, layer=layer))

    def _pool_block(self, block: int, layer: int) -> Any:
        """The bytes of one layer of a block of the prompt, where they lie in the pool."""
        return self._pool.layer_block(self._prompt.slots[block], layer)

    def _store_layer(self, table: list[int], blocks: range) -> Callable[[int], None]:
        """For the compute thread: copies a layer of these blocks into the pool's slots. Committed ones stay as they
        are: others may be reading them. Of the block that the prompt ends in only its tokens are copied.
        """
        last, tokens = divmod(len(self._prompt.token_ids), self._layout.block_tokens)
        tail = {last: tokens}

        def store(layer: int) -> None:
            for block in blocks:
                if block not in self._present:
                    number = self._prompt.slots[block]
                    with self._pool.writing(number, self.order_id):
                        slot = self._pool.layer_block(number, layer)
                        self._engine.cache.read_block(layer, table[block], slot, tail.get(block, 0))
            self._tell(
                LayerStored(
                    at_ns=time.monotonic_ns(),
                    order_id=self.order_id,
                    layer=layer,
                    first_block=blocks.start,
                    blocks=len(blocks),
                )
            )
            hold_points.reached(hold_points.PROMPT_LAYER, layer, self.order_id)

        return store
