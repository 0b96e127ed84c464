"""HalfmoonStorage: halfmoon's store as storage of SGLang's hierarchical cache (`--hicache-storage-backend dynamic`).

SGLang's scheduler calls it from its prefetch and backup threads, with pages of its host memory. docs/sglang.md has its
configuration.

Source: the interface, `HiCacheStorage`, is SGLang's (0.5.23); `make test-sglang` names each change of another release.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np

from halfmoon.store.adapters.link import LinkOptions
from halfmoon.store.adapters.pages import Bytes, Page, PageStore

try:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
    )
except ImportError as problem:
    raise ImportError(
        f"{__name__} is for SGLang's own process: install halfmoon into the environment of an SGLang of 0.5 ({problem})"
    ) from problem

#: Our options stand under this name in SGLang's `--hicache-storage-backend-extra-config`.
OPTIONS = "halfmoon"


def options_of(extra_config: dict[str, Any] | None) -> LinkOptions:
    """Raises ValueError, naming the field."""
    try:
        return msgspec.convert((extra_config or {}).get(OPTIONS, {}), LinkOptions)
    except msgspec.ValidationError as problem:
        raise ValueError(f"hicache-storage-backend-extra-config: {OPTIONS}: {problem}") from None


def namespace_of(config: HiCacheStorageConfig, pool: Any, *, weight_version: str) -> bytes:
    """All that a page's bytes depend on beside its tokens. Replicas of MLA hold the same, so their ranks share."""
    heads = [] if config.is_mla_model else [config.tp_rank, config.tp_size]
    fields = {
        "engine": f"sglang {_release()}",
        "model": config.model_name,
        "weight_version": weight_version,
        "heads": heads,
        "layers": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size],
        "split_heads": [config.should_split_heads, config.tp_lcm_size],
        "mla": config.is_mla_model,
        "pool": type(pool).__name__,
        "in_place": _in_place(config),
        "layout": pool.layout,
        "page_tokens": pool.page_size,
        "dtype": str(pool.dtype),
    }
    return json.dumps(fields, sort_keys=True).encode()


def _in_place(config: HiCacheStorageConfig) -> bool:
    """Whether SGLang hands over where pages lie (`interface_v1`), by parts, and not pages as flat tensors."""
    return bool((config.extra_config or {}).get("interface_v1", 0))


def _release() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:  # a checkout
        return ""


class HalfmoonStorage(HiCacheStorage):  # type: ignore[misc]
    """See the module. Whatever goes wrong is a miss: SGLang computes."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Raises ValueError, naming the option that is wrong."""
        self._config = storage_config
        self._options = options_of(storage_config.extra_config)
        self._pages: PageStore | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Waits for the store a little. Raises ValueError where its blocks have another size than SGLang's pages."""
        super().register_mem_pool_host(mem_pool_host)
        if _in_place(self._config):
            _, sizes = mem_pool_host.get_page_buffer_meta(torch.arange(mem_pool_host.page_size))
            page_bytes = sum(sizes)
        else:
            page = mem_pool_host.get_dummy_flat_data_page()
            page_bytes = page.numel() * page.element_size()
        weights = self._options.weight_version
        namespace = namespace_of(self._config, mem_pool_host, weight_version=weights)
        self.close()
        self._pages = PageStore(self._options, page_bytes=page_bytes, namespace=namespace)
        self._pages.start()

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return 0 if self._pages is None else self._pages.held(_raw(keys))

    # --- pages of the pool, where they lie -------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self._pages is None:
            return [False] * len(keys)
        return self._pages.load(_raw(keys), self._where(keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self._pages is None:
            return [False] * len(keys)
        return self._pages.store(_raw(keys), self._where(keys, host_indices))

    def _where(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[Page]:
        """The memory of each page, by its parts."""
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        parts = [_memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        each = len(parts) // len(keys) if keys else 0
        return [parts[first : first + each] for first in range(0, len(parts), each)] if each else []

    # --- pages as flat tensors -------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        (found,) = self.batch_get([key], [target_location])
        return found

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        if self._pages is None or target_locations is None or any(one is None for one in target_locations):
            return [None] * len(keys)
        moved = self._pages.load(_raw(keys), [[_flat(one)] for one in target_locations])
        return [one if there else None for one, there in zip(target_locations, moved, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        if self._pages is None or values is None or any(value is None for value in values):
            return False
        pages = [[_flat(value.contiguous())] for value in values]
        return all(self._pages.store(_raw(keys), pages))

    def close(self) -> None:
        """Ends calls that are under way. Idempotent."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None


def _raw(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _memory(address: int, size: int) -> Bytes:
    """u8 `[size]`, not owned: SGLang keeps its pool as long as its storage."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _flat(page: torch.Tensor) -> Bytes:
    array: Bytes = page.view(-1).view(torch.uint8).numpy()
    return array
