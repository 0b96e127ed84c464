"""The cached blocks of a simulated worker's prompt: its node's are held, what an order names elsewhere is fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from halfmoon.conductor.simulation.context import SimulationContext
from halfmoon.conductor.simulation.network import Transfer
from halfmoon.conductor.simulation.nodes import Node
from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.keys import join_keys, share_block


class PromptBlocks:
    """`keys`: of the prompt's whole blocks. Nothing is held before `prepare`, nor after `commit` and `let_go`."""

    __slots__ = (
        "_context",
        "_held",
        "_held_there",
        "_node",
        "_transfer",
        "fetch_ns",
        "fetched",
        "joined_keys",
        "keys",
        "layer_here",
        "loaded",
        "local",
        "source",
    )

    def __init__(self, context: SimulationContext, node: Node, keys: list[bytes]) -> None:
        self._context, self._node, self.keys = context, node, keys
        self.joined_keys = join_keys(keys)
        #: Blocks used: from the node itself, from another (`source`).
        self.local = self.fetched = 0
        self.source: Node | None = None
        #: The first layer, and all, of what is fetched are here.
        self.layer_here = self.loaded = True
        self.fetch_ns = 0
        self._held: list[bytes] = []
        self._held_there: list[bytes] = []
        self._transfer: Transfer | None = None

    @property
    def tokens(self) -> int:
        """Those of the prompt that need not be computed."""
        return (self.local + self.fetched) * self._context.block_tokens

    @property
    def fetched_bytes(self) -> int:
        return self.fetched * self._context.block_bytes

    def brings_for(self, other: PromptBlocks, prompt_tokens: int) -> bool:
        """Whether it fetches, or is to compute, blocks that `other`, a prompt of so many tokens behind it, can use."""
        usable = (prompt_tokens - 1) // self._context.block_tokens
        return usable > self.local and share_block(self.joined_keys, other.joined_keys, self.local)

    def prepare(
        self,
        prompt_tokens: int,
        fetches: Sequence[Fetch],
        *,
        first_layer: Callable[[], None],
        all_layers: Callable[[], None],
    ) -> None:
        """Hold what is here, and fetch what the order says and its holder still has; then the callbacks are called."""
        usable = (prompt_tokens - 1) // self._context.block_tokens  # one token is always computed
        self._held = self._node.pool.hold(self.keys)
        for key, held in zip(islice(self.keys, usable), self._held, strict=False):
            if key != held:
                break
            self.local += 1
        for ordered in fetches:
            fetch = ordered.clipped(self.local, usable)
            if fetch is not None:
                keys = self.keys[self.local : self.local + fetch.blocks]
                self._fetch(self._context.nodes[fetch.node_id], keys, first_layer, all_layers)
                break

    def _fetch(
        self,
        source: Node,
        keys: list[bytes],
        first_layer: Callable[[], None],
        all_layers: Callable[[], None],
    ) -> None:
        context = self._context
        if source.pool.run(keys) < len(keys):
            context.failed_fetches += 1
            return  # gone meanwhile: computed instead
        self.source, self.fetched = source, len(keys)
        self._held_there = source.pool.hold(keys)
        self.layer_here = self.loaded = False
        started_ns = context.clock.now_ns
        whole = len(keys) * context.block_bytes
        layer = whole // context.profile.layers

        def first_layer_here() -> None:
            self.layer_here = True
            first_layer()

        def all_here() -> None:
            self.loaded = True
            self.fetch_ns = context.clock.now_ns - started_ns
            source.pool.release(self._held_there)
            self._held_there = []
            all_layers()

        self._transfer = context.network.send(
            source.node_id, self._node.node_id, (layer, first_layer_here), (whole - layer, all_here)
        )

    def as_reported(self) -> dict[str, Any]:
        """The fields of PrefillFinished that say what came from a pool."""
        return {
            "transfer_ns": self.fetch_ns,
            "cached_local_tokens": self.local * self._context.block_tokens,
            "cached_fetched_tokens": self.fetched * self._context.block_tokens,
            "fetched_bytes": self.fetched_bytes,
            "fetch_node_id": self.source.node_id if self.source is not None else "",
            "fetch_ns": self.fetch_ns,
        }

    def commit(self) -> None:
        """All of the prompt is computed: others may read its blocks."""
        self._node.commit(self.keys, self._held)
        self._held = []

    def let_go(self) -> None:
        """The order is cancelled."""
        if self._transfer is not None:
            self._context.network.stop(self._transfer)
        self._node.pool.release(self._held)
        if self.source is not None:
            self.source.pool.release(self._held_there)
        self._held, self._held_there = [], []
