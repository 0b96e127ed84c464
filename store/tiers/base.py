"""The interface of a tier: a larger and slower place for blocks, behind the pool's memory.

A tier has *records*, one block each. The agent asks a tier for its blocks, borrows records while it reads them into the
pool's slots, and hears of blocks that are stored, evicted or lost (`announce`, `lost` of its constructor). Rules of
every implementation:

- A block has the same key, checksum and tenant as in the pool. A reader compares the checksum.
- A record that is lent is not overwritten until it is given back.
- A tier that fails is empty from then on. It announces that once, and may come back by itself.

The pool's memory (`dram`) is no `Tier`: everything moves through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from halfmoon.schemas.events import Tier as TierName
from halfmoon.store.pool.slots import Change
from halfmoon.store.transports.base import Call


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of a record. `checksum` is the block's (`checksums.block_sum`); `tenant` a digest of its name."""

    key: bytes
    checksum: int
    hits: int = 0
    tenant: bytes = bytes(16)


class Move(NamedTuple):
    """`layers` layers of a record, from `first_layer` on, belong into a slot."""

    record: int
    slot: int
    first_layer: int
    layers: int


class Lent(NamedTuple):
    """A record that will not be overwritten until `give_back`. `file`: the file it is in, for the tier itself."""

    record: int
    entry: Entry
    file: object


class Tier(Protocol):
    """See the module. `start`, then `stop`; on one event loop."""

    @property
    def name(self) -> TierName: ...

    @property
    def open(self) -> bool:
        """True: it is in use now."""

    @property
    def records(self) -> int:
        """Blocks that there is room for; 0 while it is not open."""

    @property
    def mode(self) -> str:
        """Its way of reading and writing, in words for people."""

    def __len__(self) -> int:
        """Blocks that it holds."""

    async def start(self) -> list[Change]:
        """Opens it, and returns the blocks in it, which are not announced: the inventory has them."""

    async def stop(self) -> None:
        """Saves as many blocks as its time allows, and lets go of everything."""

    def keys(self) -> list[bytes]: ...

    def find(self, key: bytes) -> Entry | None:
        """The entry of a block that is here. Lends nothing."""

    def lend(self, keys: Sequence[bytes]) -> list[Lent]:
        """All of them, until `give_back`. Raises BlockMissing, with how many, from the first, are here."""

    def give_back(self, lent: Sequence[Lent]) -> None: ...

    async def read(self, moves: Sequence[Move], call: Call) -> None:
        """Fills slots from lent records. When it ends, cancelled or not, it touches no slot any more.

        Raises TransferError, TransferTimeout.
        """

    def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that were here are no more; they are returned and announced as evicted."""

    def remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """As `forget`, and also those that are being written just now."""
