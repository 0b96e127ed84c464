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
    return np.array(run_sums(view, slot, 0, view.geometry.layers), np.uint64)


def run_sums(view: PoolView, slot: int, first_layer: int, layers: int, fill: int = 0) -> list[int]:
    """xxh3_64 of each layer of a run of one block, as it is in memory now; of the first `fill` bytes of its keys and of
    its values, where `fill` is not 0.
    """
    return sums_of(run_bytes(view, slot, first_layer, layers, fill), layers)


def sums_of(run: memoryview, layers: int) -> list[int]:
    """xxh3_64 of each of `layers` layers that follow each other."""
    size = len(run) // layers
    return [xxhash.xxh3_64_intdigest(run[at : at + size]) for at in range(0, size * layers, size)]


def run_bytes(view: PoolView, slot: int, first_layer: int, layers: int, fill: int = 0) -> memoryview:
    """The memory of a run itself, or with `fill` a copy of what counts of each layer."""
    if not fill:
        return view.run(slot, first_layer, layers)
    return filled(view.blocks[slot, first_layer : first_layer + layers], fill).reshape(-1).data


def filled(run: npt.NDArray[np.uint8], fill: int) -> npt.NDArray[np.uint8]:
    """u8 `[layers, 2, fill]`: the first bytes of the keys and of the values of each layer, no copy."""
    return run.reshape(len(run), 2, -1)[:, :, :fill]


def block_sum(sums: Sums) -> int:
    return xxhash.xxh3_64_intdigest(sums.astype("<u8").tobytes())


def slots_sums(view: PoolView, slots: Sequence[int]) -> list[Sums]:
    """As `layer_sums`, of several slots; some 40 µs a MiB, so call it in a thread."""
    return [layer_sums(view, slot) for slot in slots]
