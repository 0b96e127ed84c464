"""Layers of a prompt that are readable in the pool and were not sent on yet. Pure, as its machine."""

from __future__ import annotations

from typing import NamedTuple

from halfmoon.schemas.policy import Layout

#: So many bytes are worth a message: moving them takes about what the two messages take that tell of them.
RUN_BYTES = 1 << 20


class LayerRun(NamedTuple):
    """Layers `layer .. layer + layers - 1` of blocks `first_block .. first_block + blocks - 1`."""

    layer: int
    layers: int
    first_block: int
    blocks: int


class LayerRuns:
    """Gathers layers that follow each other until they are worth a message; the last layer waits for nothing.

    `tokens`: of the prompt.
    """

    def __init__(self, layout: Layout, tokens: int) -> None:
        self._layout = layout
        self._tokens = tokens
        self.streamed = True
        self._waiting: list[LayerRun] = []

    def begin(self, *, streamed: bool) -> None:
        """Forget what waits. What is not `streamed` from now on waits for the end, layer by layer."""
        self._waiting = []
        self.streamed = streamed

    def add(self, layer: int, first_block: int, blocks: int) -> list[LayerRun]:
        """One more layer is readable; what is to be sent now."""
        run = LayerRun(layer, 1, first_block, blocks)
        if not self.streamed:
            self._waiting.append(run)
            return []
        for before in self._waiting:
            if before._replace(layer=layer, layers=1) == run and before.layer + before.layers == layer:
                self._waiting.remove(before)
                run = before._replace(layers=before.layers + 1)
                break
        if layer == self._layout.layers - 1 or self._bytes(run) >= RUN_BYTES:
            return [run]
        self._waiting.append(run)
        return []

    def rest(self) -> list[LayerRun]:
        """All that waits, which waits no more."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def _bytes(self, run: LayerRun) -> int:
        first, end = run.first_block, run.first_block + run.blocks
        tokens = min(end * self._layout.block_tokens, self._tokens) - first * self._layout.block_tokens
        return run.layers * tokens * self._layout.token_layer_bytes
