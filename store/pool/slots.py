"""The records of a pool: slots and their states, holds, writers, changes. The rules are in `pool`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import xxhash

from halfmoon.schemas.events import Tier


class SlotState(Enum):
    """The four states of a slot; `pool` draws the ways between them."""

    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    CONDEMNED = "condemned"


class Owner(NamedTuple):
    """The owner of a hold: one party (worker, reading node) of one order."""

    order_id: str
    party: str


class Change(NamedTuple):
    """A key became readable here, or was evicted; in the order in which it happened."""

    kind: Literal["stored", "evicted"]
    key: bytes
    tier: Tier = "dram"


class Idle(NamedTuple):
    """A committed block without a holder. It is still there as long as `slot` is the pool's slot `number`."""

    number: int
    slot: Slot


@dataclass(slots=True)
class Slot:
    """One block of memory, and the needs for it."""

    state: SlotState = SlotState.FREE
    #: b"" for a slot without a key: a partial tail, or a block that another order committed first.
    key: bytes = b""
    #: xxh3_64 of the block's per-layer xxh3_64 sums; of a committed slot.
    checksum: int = 0
    holders: int = 0
    writers: int = 0
    #: Mark of the tenant in whose quota it counts, the only one that may name it through `halfmoon.store.client`; "":
    #: every tenant.
    tenant: str = ""
    #: How often it was leased, or found by a put, since it is here (or on this node's SSD).
    hits: int = 0
    #: A copy that was made ahead of need: the first to go until it is hit.
    spare: bool = False
    #: Evicted before this time only when nothing else is idle; 0: not pinned.
    pinned_until_ns: int = 0


@dataclass(slots=True)
class Hold:
    """`slots[i]` is block `first_block + i` of the order."""

    slots: list[int]
    keys: list[bytes]
    expires_ns: int
    present: list[int] = field(default_factory=list)
    #: Of each slot, since this hold has it (`halfmoon.store.pool.fence`).
    epochs: list[int] = field(default_factory=list)
    #: Keys of the chain before the first block: used with it, though not held.
    heads: list[bytes] = field(default_factory=list)
    tenant: str = ""
    #: A hard pin: it is not renewed by activity, and all of them together may hold only a part of the pool.
    pin: bool = False
    #: Ended from outside: nothing is done with it any more, but its holder may be reading until it expires.
    retired: bool = False


@dataclass(slots=True)
class Writer:
    """A process that may write into reserved slots until a deadline."""

    deadline_ns: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class Counts:
    """Slots by state, and how many holds and leases (holds of committed slots) there are."""

    slots: int
    free: int
    reserved: int
    committed: int
    condemned: int
    leased: int
    leases: int
    holds: int


def tenant_mark(tenant: str) -> str:
    """The mark of a tenant in a pool and on its disk: 32 hexadecimal digits; "" for ""."""
    return xxhash.xxh3_128_hexdigest(tenant.encode()) if tenant else ""
