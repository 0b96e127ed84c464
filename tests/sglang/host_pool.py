"""HostPool: host memory of an engine, for the storage's tests."""

from __future__ import annotations

import torch

LAYERS, HEADS, DIM, PAGE, PAGES = 2, 2, 20, 16, 8
PAGE_BYTES = 2 * LAYERS * PAGE * HEADS * DIM * 4
#: The next multiple of 4096.
BLOCK_BYTES = 12288


class HostPool:
    """Pages of K and V of all layers, page first, as SGLang lays them out."""

    layout, page_size, dtype = "page_first", PAGE, torch.float32

    def __init__(self, seed: int = 0) -> None:
        shape = (2, PAGES * PAGE, LAYERS, HEADS, DIM)
        drawn = torch.Generator().manual_seed(seed)
        self.kv = torch.rand(shape, generator=drawn) if seed else torch.zeros(shape)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token = LAYERS * HEADS * DIM * 4
        firsts = indices.tolist()[::PAGE]
        addresses = [self.kv[half].data_ptr() + first * token for first in firsts for half in (0, 1)]
        return addresses, [PAGE * token] * len(addresses)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(PAGE_BYTES // 4)

    def get_data_page(self, index: int) -> torch.Tensor:
        return self.kv[:, index : index + PAGE].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv[:, index : index + PAGE] = page.reshape(2, PAGE, LAYERS, HEADS, DIM)

    def page(self, number: int) -> torch.Tensor:
        return self.get_data_page(number * PAGE)


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
