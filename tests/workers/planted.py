"""Differences that are planted in an engine, so that a test of equal bits is seen to fail on every CPU."""

from __future__ import annotations

import numpy as np
import torch

from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel


def flip_a_bit(engine: Engine, block: int) -> None:
    """The highest bit of the fraction of one V value, in the first layer and first token of `block`."""
    buffer = np.empty(engine.cache.layer_block_bytes, dtype=np.uint8)
    engine.cache.read_block(0, block, buffer)
    high_byte = 2 if engine.dtype == torch.float32 else 0
    buffer[len(buffer) // 2 + high_byte] ^= 0x40
    engine.cache.write_block(0, block, buffer)


def sum_in_two_halves(engine: Engine, model: LoadedModel) -> None:
    """The first layer's last product becomes the sum of two halves: another order of summation."""
    weight = model.weights["layers.0.down"]
    half = weight.shape[1] // 2

    def product(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        left = torch.nn.functional.linear(x[:, :half], weight[:, :half])
        return (left + torch.nn.functional.linear(x[:, half:], weight[:, half:])).to(dtype)

    engine.transformer.layers[0]._down = product  # type: ignore[assignment]
