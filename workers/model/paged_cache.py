"""The KVCache of one engine, in pages of one block each, and copies of single layers of blocks in and out.

`k` and `v` are `[layers, num_blocks, block_tokens, kv_heads, head_dim]`: one layer of them is flash-attn's paged
layout, and blocks that follow each other are one contiguous sequence. In the store's pool a block is
`[layers, 2, block_tokens, kv_heads, head_dim]`; `PagedCache.read_block` and `PagedCache.write_block` copy
one layer of one block between the two as raw bytes, so that dtypes unknown to numpy (bf16) pass unharmed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon.workers.model.block_allocator import BlockAllocator
from halfmoon.workers.model.loading.config import ModelConfig

__all__ = ["BlockAllocator", "LayerBytes", "PagedCache"]

LayerBytes = torch.Tensor | NDArray[Any] | memoryview | bytearray


class PagedCache:
    """Not thread safe where the same block is written and read; distinct blocks may be copied from other
    threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.layers, num_blocks, block_tokens, config.kv_heads, config.head_dim)
        self.num_blocks, self.block_tokens, self.dtype = num_blocks, block_tokens, dtype
        self.device = torch.device(device)
        self.layers = config.layers
        # A GPU kernel reads whole pages, and bytes that were never written must not be NaN. On CPU sequences are read
        # at their exact length, and touching every page at start would cost two seconds a GiB.
        make = torch.empty if self.device.type == "cpu" else torch.zeros
        self.k = make(shape, dtype=dtype, device=device)
        self.v = make(shape, dtype=dtype, device=device)
        self._k_bytes = self.k.view(torch.uint8).view(config.layers, num_blocks, -1)
        self._v_bytes = self.v.view(torch.uint8).view(config.layers, num_blocks, -1)
        on_cpu = self.device.type == "cpu"
        self._k_rows = self._k_bytes.numpy() if on_cpu else None
        self._v_rows = self._v_bytes.numpy() if on_cpu else None

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one layer of one block, k and v together."""
        return 2 * int(self._k_bytes.shape[-1])

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes

    def read_block(self, layer: int, block: int, destination: LayerBytes, tokens: int = 0) -> None:
        """Copies one layer of `block` to `destination`: `layer_block_bytes` writable bytes, k then v. With `tokens`
        that of the first ones only, and leaves the rest of both halves as it is.
        """
        half = self.layer_block_bytes // 2
        size = half // self.block_tokens * tokens if tokens else half
        if (
            self._k_rows is not None
            and self._v_rows is not None
            and not isinstance(destination, torch.Tensor)
        ):
            flat = _flat_bytes(destination, self.layer_block_bytes)
            flat[:size] = self._k_rows[layer, block, :size]
            flat[half : half + size] = self._v_rows[layer, block, :size]
            return
        target = _flat_tensor(destination, self.layer_block_bytes)
        target[:size].copy_(self._k_bytes[layer, block, :size])
        target[half : half + size].copy_(self._v_bytes[layer, block, :size])

    def write_block(self, layer: int, block: int, source: LayerBytes | bytes, tokens: int = 0) -> None:
        """Copies `source` (`layer_block_bytes` bytes, k then v) into one layer of `block`; `tokens` as `read_block`."""
        half = self.layer_block_bytes // 2
        size = half // self.block_tokens * tokens if tokens else half
        if self._k_rows is not None and self._v_rows is not None and not isinstance(source, torch.Tensor):
            flat = _flat_bytes(source, self.layer_block_bytes)
            self._k_rows[layer, block, :size] = flat[:size]
            self._v_rows[layer, block, :size] = flat[half : half + size]
            return
        origin = _flat_tensor(source, self.layer_block_bytes)
        self._k_bytes[layer, block, :size].copy_(origin[:size])
        self._v_bytes[layer, block, :size].copy_(origin[half : half + size])


def _flat_bytes(buffer: NDArray[Any] | memoryview | bytearray | bytes, size: int) -> NDArray[np.uint8]:
    """A view, never a copy: bytes written to a copy would be lost."""
    if isinstance(buffer, np.ndarray):
        assert buffer.flags.c_contiguous, "a strided buffer has no flat view"
        flat = buffer.reshape(-1).view(np.uint8)
    else:
        flat = np.frombuffer(buffer, dtype=np.uint8)
    assert flat.size == size, (flat.size, size)
    return flat


def _flat_tensor(buffer: LayerBytes | bytes, size: int) -> torch.Tensor:
    if isinstance(buffer, torch.Tensor):
        assert buffer.is_contiguous(), "a strided buffer has no flat view"
        flat = buffer.view(-1).view(torch.uint8)
    else:
        flat = torch.from_numpy(_flat_bytes(buffer, size))
    assert flat.numel() == size, (flat.numel(), size)
    return flat
