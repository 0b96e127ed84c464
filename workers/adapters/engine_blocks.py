"""A mirror of an engine's cache: our blocks that the engine holds, by its KV events. Pure.

An engine's block is smaller than ours (16 to 128 tokens, ours 256), and its hash is not our key. But its events have
each block's tokens and the block before it, so our keys are computed here from the tokens, by the conductor's chain:
equal keys mean equal tokens. Our block is there while all of the engine's blocks that make it are.

Owner of a block: the head of each prompt has a *cache salt*, and ours names the root of the request's block keys
(tenant, salt, model, the cluster's secret). Blocks of other clients have no such salt, are of no use to a request of
ours, and are not announced.

Events need not be true. A block whose parent is unknown, or whose tokens are too few, is passed over; an engine that
announces more blocks than it has room for is not believed further. So a lie costs a wrong placement, never a wrong
token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from halfmoon.schemas.keys import chain_keys_packed, pack_decoded, split_keys
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.adapters.kv_events import (
    BlockHash,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
)

_SALT = "halfmoon:"
#: Attention to all tokens: its blocks make a prefix. Blocks of other kinds do not.
_WHOLE = (None, "full_attention", "mla_attention")


class BlockSizeInvalid(ValueError):
    """The engine's blocks do not make up ours."""


class CacheChange(msgspec.Struct, frozen=True):
    """One of our blocks became whole in the engine's cache, or is not any more."""

    stored: bool
    key: bytes


class _Block(msgspec.Struct, gc=False):
    """One block of the engine's. `place`: in ours, from 0. `head`: our key before ours, of the first block in it."""

    parent: BlockHash | None
    tokens: bytes
    place: int
    head: bytes
    #: The engine may have a block several times; it announces each that comes, and each that goes.
    copies: int = 1
    #: Blocks behind it in the same one of ours.
    next: dict[BlockHash, bool] = {}
    #: Our block that ends with it, and whether that is announced.
    key: bytes = b""
    whole: bool = False


def salt_of(root_key: bytes) -> str:
    """The cache salt by which an engine keeps blocks of this root apart from all others."""
    return _SALT + root_key.hex()


def _root_of(salt: str) -> bytes:
    """b"" when it is none of ours."""
    digits = salt.removeprefix(_SALT)
    try:
        root = bytes.fromhex(digits) if salt.startswith(_SALT) else b""
    except ValueError:
        return b""
    return root if len(root) == KEY_BYTES else b""


class EngineBlocks:
    """See the module. `block_tokens`: of one of ours. `blocks_max`: of the engine's that are believed."""

    def __init__(self, *, block_tokens: int, blocks_max: int) -> None:
        self.block_tokens = block_tokens
        self.blocks_max = blocks_max
        #: Tokens of the engine's blocks; 0 before its first event.
        self.engine_block_tokens = 0
        #: Why events were passed over, and how many blocks of each.
        self.passed_over: Counter[str] = Counter()
        self._blocks: dict[BlockHash, _Block] = {}
        #: Announced blocks; two of the engine's chains may make one of ours.
        self._whole: dict[bytes, int] = {}
        self._changes: list[CacheChange] = []

    def __len__(self) -> int:
        """Blocks of the engine's that are known."""
        return len(self._blocks)

    def keys(self) -> list[bytes]:
        """Ours that are whole."""
        return list(self._whole)

    def leading(self, block_keys: bytes) -> int:
        """How many of these, from the first on, are whole."""
        count = 0
        for key in split_keys(block_keys):
            if key not in self._whole:
                break
            count += 1
        return count

    def apply(self, events: Iterable[EngineEvent]) -> list[CacheChange]:
        """Changes of ours that follow, in order. Raises BlockSizeInvalid."""
        for event in events:
            match event:
                case EngineStored():
                    self._stored(event)
                case EngineRemoved():
                    self._removed(event)
                case EngineCleared():
                    self._clear()
        changes, self._changes = self._changes, []
        return changes

    def doubt(self) -> list[CacheChange]:
        """Some events are lost for good: only the blocks before one that is stored from now on are certain."""
        for block in self._blocks.values():
            block.copies = 0
        for block in self._blocks.values():
            self._is_broken(block)
        changes, self._changes = self._changes, []
        return changes

    # --- stored ---------------------------------------------------------------------------------------------

    def _stored(self, event: EngineStored) -> None:
        count, size = len(event.block_hashes), event.block_size
        if event.kv_cache_spec_kind not in _WHOLE:
            self.passed_over["of_another_kind"] += count
            return
        if len(event.token_ids) != count * size:
            self.passed_over["tokens_do_not_fit"] += count
            return
        if self.engine_block_tokens and size != self.engine_block_tokens:
            self.passed_over["of_another_size"] += count
            return
        if self.block_tokens % size:
            raise BlockSizeInvalid(f"{self.block_tokens} tokens are no multiple of the engine's {size}")
        self.engine_block_tokens = size
        packed = pack_decoded(event.token_ids)
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            tokens = packed[4 * size * number : 4 * size * (number + 1)]
            if not self._add(name, parent, tokens, event, number):
                return
            parent = name

    def _add(
        self, name: BlockHash, parent: BlockHash | None, tokens: bytes, event: EngineStored, number: int
    ) -> bool:
        """False: the block is passed over, and those after it with it."""
        left = len(event.block_hashes) - number
        known = self._blocks.get(name)
        if known is not None:
            if (known.parent, known.tokens) != (parent, tokens):
                self.passed_over["contradiction"] += left
                return False
            known.copies += 1
            self._link(name, known)
            self._hold_those_before(known)
            self._may_be_whole(name, known)
            return True
        if len(self._blocks) >= self.blocks_max and not self._forget_absent():
            self.passed_over["more_than_fit"] += left
            return False
        block = self._placed(parent, tokens, event if number == 0 else None)
        if block is None:
            why = "of_others" if parent is None or event.lora_name is not None else "parent_unknown"
            self.passed_over[why] += left
            return False
        self._blocks[name] = block
        self._link(name, block)
        self._hold_those_before(block)
        self._may_be_whole(name, block)
        return True

    def _placed(self, parent: BlockHash | None, tokens: bytes, head: EngineStored | None) -> _Block | None:
        """The block behind `parent`; None when that is not known, or the prompt is none of ours."""
        if head is not None and (head.lora_name is not None or head.lora_id is not None):
            return None
        if parent is None:
            root = _root_of(head.salt) if head is not None else b""
            return _Block(parent=None, tokens=tokens, place=0, head=root) if root else None
        before = self._blocks.get(parent)
        if before is None:
            return None
        if before.place + 1 < self.block_tokens // self.engine_block_tokens:
            return _Block(parent=parent, tokens=tokens, place=before.place + 1, head=b"")
        return _Block(parent=parent, tokens=tokens, place=0, head=before.key) if before.key else None

    def _link(self, name: BlockHash, block: _Block) -> None:
        before = self._blocks.get(block.parent) if block.place and block.parent is not None else None
        if before is not None and before.place + 1 == block.place:
            before.next[name] = True

    def _hold_those_before(self, block: _Block) -> None:
        """A block is stored behind blocks that are there: those that were doubted are there after all."""
        parent = block.parent
        while parent is not None:
            before = self._blocks.get(parent)
            if before is None or before.copies:
                return
            before.copies = 1
            self._may_be_whole(parent, before)
            parent = before.parent

    def _may_be_whole(self, name: BlockHash, block: _Block) -> None:
        """Announce our block that this one ends, when all of it is there. Where it ends none, later ones may do."""
        if block.place + 1 < self.block_tokens // self.engine_block_tokens:
            for each in block.next:
                if (behind := self._blocks.get(each)) is not None and behind.copies:
                    self._may_be_whole(each, behind)
            return
        row = self._row(block)
        if row is None:
            return
        if not block.key:
            tokens = b"".join([one.tokens for one in row])
            block.key = chain_keys_packed(row[0].head, tokens, self.block_tokens)
        if not block.whole and all(one.copies for one in row):
            block.whole = True
            self._whole[block.key] = self._whole.get(block.key, 0) + 1
            if self._whole[block.key] == 1:
                self._changes.append(CacheChange(True, block.key))

    def _row(self, last: _Block) -> Sequence[_Block] | None:
        """The engine's blocks that make the one of ours that ends with `last`, in order."""
        row = [last]
        while row[-1].place:
            parent = row[-1].parent
            before = self._blocks.get(parent) if parent is not None else None
            if before is None or before.place + 1 != row[-1].place:
                return None
            row.append(before)
        return row[::-1]

    # --- gone -----------------------------------------------------------------------------------------------

    def _removed(self, event: EngineRemoved) -> None:
        for name in event.block_hashes:
            block = self._blocks.get(name)
            if block is None:
                continue
            block.copies -= 1
            if block.copies <= 0:  # below: it was doubted
                block.copies = 0
                self._is_broken(block)
                if not block.next:  # those behind it would not be found when it comes back
                    self._forget(name, block)

    def _is_broken(self, block: _Block) -> None:
        """Ours that it is part of are not whole any more."""
        if block.whole:
            block.whole = False
            self._whole[block.key] -= 1
            if not self._whole[block.key]:
                del self._whole[block.key]
                self._changes.append(CacheChange(False, block.key))
        for each in block.next:
            if (behind := self._blocks.get(each)) is not None:
                self._is_broken(behind)

    def _forget(self, name: BlockHash, block: _Block) -> None:
        del self._blocks[name]
        before = self._blocks.get(block.parent) if block.place and block.parent is not None else None
        if before is not None:
            before.next.pop(name, None)
            if not before.next and not before.copies and block.parent is not None:
                self._forget(block.parent, before)

    def _forget_absent(self) -> bool:
        """Those that were doubted and not seen again make room. True when there is some now."""
        absent = [name for name, block in self._blocks.items() if not block.copies]
        for name in absent:
            if (block := self._blocks.get(name)) is not None:  # its last child may have taken it along
                self._forget(name, block)
        return len(self._blocks) < self.blocks_max

    def _clear(self) -> None:
        self._changes += [CacheChange(False, key) for key in self._whole]
        self._whole.clear()
        self._blocks.clear()
