"""Computes some layers of another worker's prompt, on the compute thread, by a `ComputeStage`.

Everything comes and goes over the channel to the worker that has the last layers: the cached blocks of these layers,
the residual before them chunk by chunk, the KV and the residual after them. While a chunk is sent on, the next stage
computes it and this one the next chunk.

Source: Mooncake (ARXIV), section 5.1.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from halfmoon.schemas.policy import Layout
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.errors import ChannelLost
from halfmoon.workers import hold_points
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.model.layer_hooks import LayerHooks
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.prefill.actions import ComputeStage
from halfmoon.workers.prefill.layer_stages.listener import StageListener
from halfmoon.workers.prefill.layer_stages.messages import (
    StagePlan,
    blocks_of,
    receive_activation,
    receive_block,
    receive_done,
    send_activation,
    send_block,
)


class StageComputation:
    """`run` once; `stop` from any thread."""

    def __init__(self, action: ComputeStage, *, engine: Any, layout: Layout, listener: StageListener) -> None:
        self.order_id = action.order_id
        self.elapsed_ns = self.compute_ns = 0
        self._action, self._engine, self._layout = action, engine, layout
        self._listener = listener
        self._layers = range(action.first_layer, action.first_layer + action.layers)
        self._channel: WorkerChannel | None = None
        self._stopped = False
        self._memory = memoryview(bytearray(layout.layer_block_bytes))
        #: Layers of the prefix below this one have come.
        self._loaded = self._layers.start

    def stop(self) -> None:
        """Before the next layer; whatever is waited for ends now."""
        self._stopped = True
        if self._channel is not None:
            self._channel.close()

    def run(self, cache: list[int]) -> None:
        """`cache`: blocks of the engine's, as many as the prompt has. Raises ChannelLost: the other end is gone, or it
        was stopped.
        """
        plan, channel = self._listener.take(self.order_id, lambda: self._stopped)
        self._channel = channel
        with channel:
            if self._stopped:  # by one that saw no channel to close
                raise ChannelLost(channel.peer.worker_id, "it was stopped")
            self._check(plan, channel)
            began_ns = time.monotonic_ns()
            for number, chunk in enumerate(plan.chunks):
                self._compute(plan, channel, number, chunk, cache)
                self.elapsed_ns = time.monotonic_ns() - began_ns
            # A channel that is closed before all was taken would take it along.
            with contextlib.suppress(ChannelLost):
                receive_done(channel)

    def _check(self, plan: StagePlan, channel: WorkerChannel) -> None:
        """Raises ChannelLost."""
        peer, tokens = channel.peer.worker_id, self._action.prompt_tokens
        if peer != self._action.prefill_worker_id:
            raise ChannelLost(peer, f"the order is {self._action.prefill_worker_id}'s")
        ends = [0 if not plan.prefix_blocks else plan.prefix_blocks * self._layout.block_tokens]
        ends += [end for _, end in plan.chunks]
        if [begin for begin, _ in plan.chunks] != ends[:-1] or ends[-1] != tokens:
            raise ChannelLost(peer, f"chunks: {plan.chunks[:3]}… are not those of {tokens} tokens")
        if self._layers.start == 0 and len(plan.token_ids) != tokens:
            raise ChannelLost(peer, f"token_ids: {len(plan.token_ids)} of {tokens}")

    def _compute(
        self,
        plan: StagePlan,
        channel: WorkerChannel,
        number: int,
        chunk: tuple[int, int],
        cache: list[int],
    ) -> None:
        begin, end = chunk
        before: Tensor | None = None
        if self._layers.start:
            for layer in self._layers:
                self._load(plan, channel, layer, cache)
            before = self._engine.activation(end - begin)
            receive_activation(channel, number, before)
        tokens = plan.token_ids[begin:end] if before is None else [0] * (end - begin)
        blocks = blocks_of(chunk, self._layout.block_tokens)
        waited_ns, began_ns = 0, time.monotonic_ns()

        def load(layer: int) -> None:
            nonlocal waited_ns
            asked_ns = time.monotonic_ns()
            self._load(plan, channel, layer, cache)
            waited_ns += time.monotonic_ns() - asked_ns

        def send(layer: int) -> None:
            nonlocal waited_ns
            asked_ns = time.monotonic_ns()
            for block in blocks:
                self._engine.cache.read_block(layer, cache[block], np.frombuffer(self._memory, np.uint8))
                send_block(channel, layer, block, self._memory)
            hold_points.reached(hold_points.STAGE_LAYER, layer, self.order_id)
            waited_ns += time.monotonic_ns() - asked_ns

        after = self._engine.prefill_stage(
            PromptRows(tokens, begin, cache[: blocks.stop]),
            self._layers,
            before,
            LayerHooks(before_layer=load, after_layer=send, should_stop=lambda: self._stopped),
        )
        if after is None:
            raise ChannelLost(self._action.prefill_worker_id, "it was stopped")
        self.compute_ns += time.monotonic_ns() - began_ns - waited_ns
        send_activation(channel, number, after)

    def _load(self, plan: StagePlan, channel: WorkerChannel, layer: int, cache: list[int]) -> None:
        """The cached blocks of one layer, if they have not come yet; layers come in order."""
        if layer < self._loaded:
            return
        for block in range(plan.prefix_blocks):
            receive_block(channel, layer, block, self._memory)
            self._engine.cache.write_block(layer, cache[block], np.frombuffer(self._memory, np.uint8))
        self._loaded = layer + 1
