"""PageStore: pages of an engine's host memory, put into the store and brought back by calls that wait.

For engines that call from threads of their own. Nothing raises but `start`: a store that is away, slow or full has
nothing and takes nothing. When a call returns, nothing touches the pages that it named.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfmoon.store.adapters.link import BATCH_BYTES, BlockKeys, LinkOptions, StoreLink
from halfmoon.store.adapters.row_client import RowClient
from halfmoon.store.errors import StoreError

Bytes = npt.NDArray[np.uint8]
#: A page's parts in the engine's memory, in order: u8, contiguous, `page_bytes` together.
Page = Sequence[Bytes]
#: A multiple of this is a block's length.
ALIGNED_BYTES = 4096


def block_bytes_of(page_bytes: int) -> int:
    return -(-page_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


class PageStore:
    """See the module."""

    def __init__(self, options: LinkOptions, *, page_bytes: int, namespace: bytes) -> None:
        """`namespace`: see `BlockKeys`."""
        self._options = options
        self._page_bytes = page_bytes
        self.block_bytes = block_bytes_of(page_bytes)
        self._keys = BlockKeys(namespace, options.tenant)
        self._link = StoreLink(options, block_bytes=self.block_bytes)

    def start(self) -> None:
        """Waits for the store, `connect_s` at most. Raises ValueError when its blocks do not suit."""
        self._link.start()

    def close(self) -> None:
        """Ends calls that are under way. Idempotent."""
        self._link.close()

    def held(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys the store has, without a gap."""

        async def look(client: RowClient) -> list[bool]:
            return [found is True for found in await client.batch_exists(self._block_keys(keys))]

        found = self._link.ask(look, within_s=self._options.lookup_s) if keys else None
        return 0 if found is None else next((i for i, there in enumerate(found) if not there), len(found))

    def load(self, keys: Sequence[bytes], pages: Sequence[Page]) -> list[bool]:
        """Which of the pages hold their key's bytes now. The others are as they were, or have some of them."""
        done: list[bool] = []
        for part in self._batches(len(keys)):
            blocks = [self._whole(page) for page in pages[part]]

            async def get(client: RowClient, part: slice = part, blocks: list[Bytes] = blocks) -> list[bool]:
                return _moved(await client.batch_get_into(self._block_keys(keys[part]), blocks, verify=True))

            moved = self._link.ask(get, within_s=self._options.transfer_s) or [False] * len(blocks)
            for page, block, there in zip(pages[part], blocks, moved, strict=True):
                if there:
                    _scatter(block, page)
            done += moved
        return done

    def store(self, keys: Sequence[bytes], pages: Sequence[Page]) -> list[bool]:
        """Which of the pages are in the store now."""
        done: list[bool] = []
        for part in self._batches(len(keys)):
            blocks = [_gather(self._whole(page), page) for page in pages[part]]
            values = dict(zip(self._block_keys(keys[part]), blocks, strict=True))

            async def put(client: RowClient, values: dict[bytes, Bytes] = values) -> list[bool]:
                return _moved(await client.batch_put(values))

            moved = self._link.ask(put, within_s=self._options.transfer_s) or [False] * len(values)
            there = dict(zip(values, moved, strict=True))
            done += [there[key] for key in self._block_keys(keys[part])]
        return done

    def _batches(self, count: int) -> list[slice]:
        each = max(1, BATCH_BYTES // self.block_bytes)
        return [slice(first, first + each) for first in range(0, count, each)]

    def _block_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._keys.of(key) for key in keys]

    def _whole(self, page: Page) -> Bytes:
        """u8 `[block_bytes]`: the page's own memory where that is one block, else a buffer of its length."""
        assert sum(len(part) for part in page) == self._page_bytes, (len(page), self._page_bytes)
        if len(page) == 1 and self._page_bytes == self.block_bytes:
            return page[0]
        return np.zeros(self.block_bytes, np.uint8)


def _moved(answers: Sequence[StoreError | None]) -> list[bool]:
    return [problem is None for problem in answers]


def _gather(block: Bytes, page: Page) -> Bytes:
    """`block` with the bytes of the page at its head."""
    at = 0
    for part in page:
        if part is not block:
            block[at : at + len(part)] = part
        at += len(part)
    return block


def _scatter(block: Bytes, page: Page) -> None:
    at = 0
    for part in page:
        if part is not block:
            part[:] = block[at : at + len(part)]
        at += len(part)
