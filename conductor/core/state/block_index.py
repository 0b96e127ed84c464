"""Block index: block key to the nodes that hold it, as a bit mask; one table for each tier.

A node has one bit as long as its store agent is known. The index is soft state: agents announce their blocks, and a
node that leaves takes its bits along. Pure; part of the core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, compress, repeat
from operator import and_, or_
from struct import pack

import msgspec

from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.types import KEY_BYTES

#: The first chunk of a match, in blocks; each next one is twice as long.
CHUNK_BLOCKS = 4
CHUNK_BLOCKS_MAX = 256
#: Nodes that are named beside those that are needed.
REPLICAS = 2


#: Digit of a binary number → its value.
_BITS = bytes.maketrans(b"01", b"\0\1")
_STRUCT_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


class IndexImage(msgspec.Struct, frozen=True, array_like=True):
    """A `BlockIndex` as plain values: keys one after another, masks of `mask_bytes` each, in the same order."""

    slots: list[str]
    mask_bytes: int
    dram_keys: bytes
    dram_masks: bytes
    ssd_keys: bytes
    ssd_masks: bytes


class BlockIndex:
    """Longest prefix of a chain of keys, for all nodes at once."""

    __slots__ = ("_bits", "_dram", "_slots", "_ssd")

    def __init__(self) -> None:
        self._dram: dict[bytes, int] = {}
        self._ssd: dict[bytes, int] = {}
        #: Node of each bit ("" is free), and the bit of each node.
        self._slots: list[str] = []
        self._bits: dict[str, int] = {}

    def join(self, node_id: str) -> None:
        """A node starts, with no blocks. Its earlier blocks are forgotten."""
        if node_id in self._bits:
            # It starts again: with the bit that it had, no other node's masks change.
            self._purge(self._bits[node_id])
            return
        if "" not in self._slots:
            self._slots.append("")
        slot = self._slots.index("")
        self._slots[slot] = node_id
        self._bits[node_id] = 1 << slot

    def leave(self, node_id: str) -> None:
        if node_id in self._bits:
            self._purge(self._bits.pop(node_id))
            self._slots[self._slots.index(node_id)] = ""

    def add(self, node_id: str, block_keys: bytes, tier: str) -> None:
        """Blocks are readable on a node that has joined."""
        bit = self._bits[node_id]
        masks = self._ssd if tier == "ssd" else self._dram
        get = masks.get
        for key in split_keys(block_keys):
            mask = get(key)
            masks[key] = bit if mask is None else mask | bit

    def discard(self, node_id: str, block_keys: bytes, tier: str) -> None:
        bit = self._bits[node_id]
        masks = self._ssd if tier == "ssd" else self._dram
        get = masks.get
        for key in split_keys(block_keys):
            mask = get(key, 0)
            if mask == bit:
                # A mask of nobody would keep the key for ever: blocks come and go by millions.
                del masks[key]
            elif mask & bit:
                masks[key] = mask ^ bit

    def forget_tier(self, node_id: str, tier: str) -> None:
        """The node holds nothing on this tier any more."""
        _clear(self._ssd if tier == "ssd" else self._dram, self._bits[node_id])

    def match(self, block_keys: bytes, blocks_max: int) -> dict[str, int]:
        """Length, in blocks, of the run from the first that each node holds in any tier; nodes with none are
        absent.
        """
        return {node_id: blocks for blocks, nodes in self.runs(block_keys, blocks_max) for node_id in nodes}

    def runs(
        self, block_keys: bytes, blocks_max: int, *, dram_only: bool = False
    ) -> list[tuple[int, list[str]]]:
        """Lengths of runs from the first block, longest first, and the nodes with a run of this length, by id.

        A block may be here and the one before it evicted, so every key up to the end of the longest run is looked up;
        chunks grow, so that a miss at the start of a long prompt costs little.
        """
        limit = min(len(block_keys) // KEY_BYTES, blocks_max)
        found: list[tuple[int, int]] = []
        mask = (1 << len(self._slots)) - 1
        start, chunk = 0, CHUNK_BLOCKS
        while start < limit and mask:
            stop = min(start + chunk, limit)
            keys = split_keys(block_keys[start * KEY_BYTES : stop * KEY_BYTES])
            masks = map(self._dram.get, keys, repeat(0))
            if self._ssd and not dram_only:
                masks = map(or_, masks, map(self._ssd.get, keys, repeat(0)))
            # held[i]: nodes with every block before place start + i. One `and` handles a block of all nodes at once,
            # however many nodes there are.
            held = list(accumulate(masks, and_, initial=mask))
            if held[-1] != mask:
                for blocks, still in enumerate(held, start - 1):
                    if still != mask:
                        if blocks:
                            found.append((blocks, mask & ~still))
                        mask = still
                        if not mask:
                            break
            start = stop
            chunk = min(2 * chunk, CHUNK_BLOCKS_MAX)
        if mask and limit > 0:
            found.append((limit, mask))
        return [(blocks, self._nodes(mask)) for blocks, mask in reversed(found)]

    def _nodes(self, mask: int) -> list[str]:
        """The nodes whose bits are set, by id."""
        # Mostly it is one, which has no need of the list of all bits.
        if not mask & (mask - 1):
            return [self._slots[mask.bit_length() - 1]]
        bits = f"{mask:b}"[::-1].encode().translate(_BITS)
        return sorted(compress(self._slots, bits))

    def holds(self, key: bytes) -> bool:
        """Some node holds the block."""
        return key in self._dram or key in self._ssd

    def holders(self, key: bytes) -> list[str]:
        """Nodes that hold one block, by id: its replicas."""
        mask = self._dram.get(key, 0) | self._ssd.get(key, 0)
        return sorted(node for slot, node in enumerate(self._slots) if mask >> slot & 1)

    def nodes_with(self, block_keys: bytes, besides: Collection[str] = ()) -> list[str]:
        """Nodes, none of `besides`, that hold these blocks between them as far as any node does, those with most first.
        Behind them come `REPLICAS` more, in case that one of them cannot give a block.

        Each block is looked at twice, however many nodes there are: a conductor decides nothing meanwhile. So the nodes
        that are needed need not be the fewest.
        """
        left_out = sum(bit for node, bit in self._bits.items() if node in besides)
        masks = [
            (self._dram.get(key, 0) | self._ssd.get(key, 0)) & ~left_out for key in split_keys(block_keys)
        ]
        counts: dict[int, int] = {}
        for mask in masks:
            for bit in _bits_of(mask):
                counts[bit] = counts.get(bit, 0) + 1
        order = sorted(counts, key=lambda bit: (-counts[bit], bit))
        rank = {bit: place for place, bit in enumerate(order)}
        needed = 0
        for mask in masks:
            if mask and not mask & needed:
                needed |= min(_bits_of(mask), key=rank.__getitem__)
        spare = [bit for bit in order if not bit & needed]
        found = [bit for bit in order if bit & needed] + spare[:REPLICAS]
        return [self._slots[bit.bit_length() - 1] for bit in found]

    def holdings(self) -> dict[str, dict[bytes, list[str]]]:
        """Every block of each tier, with the nodes that hold it; for people."""
        return {
            tier: {
                key: [at for bit, at in enumerate(self._slots) if mask >> bit & 1]
                for key, mask in own.items()
            }
            for tier, own in (("dram", self._dram), ("ssd", self._ssd))
        }

    def counts(self) -> dict[str, int]:
        """Blocks that each node holds, those of both tiers counted twice; for people."""
        found = dict.fromkeys(self.node_ids, 0)
        for held in self.holdings().values():
            for nodes in held.values():
                for node in nodes:
                    found[node] += 1
        return found

    @property
    def ssd_masks(self) -> tuple[list[str], Iterable[int]]:
        """Node of each bit, and the mask of every block on SSD; for people."""
        return self._slots, self._ssd.values()

    @property
    def blocks(self) -> int:
        """Distinct blocks (one in both tiers counts twice)."""
        return len(self._dram) + len(self._ssd)

    @property
    def has_ssd(self) -> bool:
        return bool(self._ssd)

    @property
    def node_ids(self) -> list[str]:
        return sorted(node for node in self._slots if node)

    def image(self) -> IndexImage:
        width = _mask_bytes(len(self._slots))
        return IndexImage(
            slots=list(self._slots),
            mask_bytes=width,
            dram_keys=b"".join(self._dram),
            dram_masks=_packed(self._dram, width),
            ssd_keys=b"".join(self._ssd),
            ssd_masks=_packed(self._ssd, width),
        )

    @classmethod
    def from_image(cls, image: IndexImage) -> BlockIndex:
        index = cls()
        index._slots = list(image.slots)
        index._bits = {node_id: 1 << slot for slot, node_id in enumerate(index._slots) if node_id}
        for keys, packed, masks in (
            (image.dram_keys, image.dram_masks, index._dram),
            (image.ssd_keys, image.ssd_masks, index._ssd),
        ):
            width = image.mask_bytes
            for place, key in enumerate(split_keys(keys)):
                masks[key] = int.from_bytes(packed[place * width : (place + 1) * width], "little")
        return index

    def check(self) -> None:
        """Every mask has a bit, and bits only of nodes that are here."""
        live = sum(1 << slot for slot, node in enumerate(self._slots) if node)
        for masks in (self._dram, self._ssd):
            for key, mask in masks.items():
                assert mask > 0, ("I39 no holder", key.hex())
                assert not mask & ~live, ("I40 bits of no node", key.hex(), mask, live)
        bits = [(node, 1 << slot) for slot, node in enumerate(self._slots) if node]
        assert bits == sorted(self._bits.items(), key=lambda one: one[1]), (
            "I41 a node with two bits",
            self._slots,
        )

    def _purge(self, bit: int) -> None:
        for masks in (self._dram, self._ssd):
            _clear(masks, bit)


def _clear(masks: dict[bytes, int], bit: int) -> None:
    for key in [key for key, mask in masks.items() if mask & bit]:
        if masks[key] == bit:
            del masks[key]
        else:
            masks[key] ^= bit


def _mask_bytes(slots: int) -> int:
    """Size of one mask: one that `struct` knows, as long as there is one."""
    return next((width for width in _STRUCT_CODES if slots <= 8 * width), -(-slots // 8))


def _packed(masks: dict[bytes, int], width: int) -> bytes:
    code = _STRUCT_CODES.get(width)
    if code is not None:  # ten times as fast; a digest is made of this
        return pack(f"<{len(masks)}{code}", *masks.values())
    return b"".join([mask.to_bytes(width, "little") for mask in masks.values()])


def _bits_of(mask: int) -> Iterator[int]:
    """The lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
