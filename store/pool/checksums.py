"""Checksums: xxh3_64 of every layer of a block, and of those sums the block's own, which goes where the block
goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from halfmoon.store.pool.segment import PoolView

Sums = npt.NDArray[np.uint64]


def layer_sums(view: PoolView, slot: int) -> Sums:
    """u64 `[layers]` of the slot's bytes of now. xxhash lets go of the interpreter lock."""
    blocks = view.blocks[slot]
    return np.array([xxhash.xxh3_64_intdigest(layer.data) for layer in blocks], np.uint64)


def run_sums(view: PoolView, slot: int, first_layer: int, layers: int) -> list[int]:
    """xxh3_64 of each layer of a run of one block, as it is in memory now."""
    return [xxhash.xxh3_64_intdigest(view.blocks[slot, first_layer + i].data) for i in range(layers)]


def block_sum(sums: Sums) -> int:
    return xxhash.xxh3_64_intdigest(sums.astype("<u8").tobytes())


def slots_sums(view: PoolView, slots: Sequence[int]) -> list[Sums]:
    """As `layer_sums`, of several slots; some 40 µs a MiB, so call it in a thread."""
    return [layer_sums(view, slot) for slot in slots]
