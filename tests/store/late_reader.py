"""A program that reads a block, in a process: `python late_reader.py URL NODE`. A line on its input lets it go on.

It says "told" when it knows the slot, before it copies; then what `get_into` said, and whose bytes it has.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from late_writer import say

from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.errors import StoreError


class Client(StoreClient):
    """Waits where it has been told its slots."""

    async def _find(self, keys: Sequence[bytes], block_bytes: int) -> Any:
        found = await super()._find(keys, block_bytes)
        say("told")
        return found


async def main(url: str, node_id: str) -> None:
    async with await Client.connect(url, node_id=node_id) as client:
        into = bytearray(client.block_bytes)
        said = "nothing"
        try:
            await client.get_into(key_of("a"), into)
        except StoreError as problem:
            said = type(problem).__name__
        own = set(into) == {key_of("a")[0]}
        print(f"{said}, {'the block' if own else 'other bytes'}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
