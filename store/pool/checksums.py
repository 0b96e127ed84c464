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


def run_sums(view: PoolView, slot: int, first_layer: int, layers: int, fill: int = 0) -> list[int]:
    """xxh3_64 of each layer of a run of one block, as it is in memory now; of the first `fill` bytes of its keys and of
    its values, where `fill` is not 0.
    """
    return row_sums(run_bytes(view, slot, first_layer, layers, fill))


def row_sums(rows: npt.NDArray[np.uint8]) -> list[int]:
    """xxh3_64 of each row of u8 `[layers, bytes]`."""
    return [xxhash.xxh3_64_intdigest(row.data) for row in rows]


def run_bytes(
    view: PoolView, slot: int, first_layer: int, layers: int, fill: int = 0
) -> npt.NDArray[np.uint8]:
    """u8 `[layers, bytes]`: the memory of a run itself, or with `fill` a copy of what counts of each layer."""
    run: npt.NDArray[np.uint8] = view.blocks[slot, first_layer : first_layer + layers]
    return filled(run, fill).reshape(layers, 2 * fill) if fill else run


def filled(run: npt.NDArray[np.uint8], fill: int) -> npt.NDArray[np.uint8]:
    """u8 `[layers, 2, fill]`: the first bytes of the keys and of the values of each layer, no copy."""
    return run.reshape(len(run), 2, -1)[:, :, :fill]


def block_sum(sums: Sums) -> int:
    return xxhash.xxh3_64_intdigest(sums.astype("<u8").tobytes())


def slots_sums(view: PoolView, slots: Sequence[int]) -> list[Sums]:
    """As `layer_sums`, of several slots; some 40 µs a MiB, so call it in a thread."""
    return [layer_sums(view, slot) for slot in slots]
