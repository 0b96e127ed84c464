"""Short prompts with further choices to come, kept as they were computed last.

A prompt of one block is found in no pool by others: a block that is not whole has no key, and its last token is
computed in any case, for its logits. Its other choices need the same KV and the same logits, and draw with other seeds.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

#: Of one worker; choices of one request come one after the other.
KEPT_MAX = 2


class KeptPrompt(NamedTuple):
    """The last token's logits, and each layer of the prompt's one block (`PagedCache.read_block`)."""

    logits: object
    layers: list[bytearray]


class KeptPrompts:
    """By a key that stands for tenant, salt and tokens (`ComputePrompt.kept_key`). The compute thread's."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, KeptPrompt] = OrderedDict()

    def restore(self, key: bytes, cache: Any, block: int) -> object | None:
        """Writes the KV to `block` of an engine's cache, and returns the logits; None: it is not here."""
        if (kept := self._kept.get(key)) is None:
            return None
        self._kept.move_to_end(key)
        for layer, content in enumerate(kept.layers):
            cache.write_block(layer, block, content)
        return kept.logits

    def keep(self, key: bytes, logits: object, cache: Any, block: int) -> None:
        """Copies the KV from `block`. The one that was not asked for the longest goes."""
        layers = [bytearray(cache.layer_block_bytes) for _ in range(cache.layers)]
        for layer, content in enumerate(layers):
            cache.read_block(layer, block, content)
        self._kept[key] = KeptPrompt(logits, layers)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
