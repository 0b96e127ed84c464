"""The caches of a batch whose KV lies at attention workers: channels to them, and which rows are where.

Steps are of the compute thread; ends of prompts are pushed by the copy thread, over channels of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelError
from halfmoon.workers.attention.errors import LenderLost, PartRefused
from halfmoon.workers.attention.push import push_tokens
from halfmoon.workers.attention.remote_cache import HeldRow
from halfmoon.workers.attention.remote_places import RemotePlaces
from halfmoon.workers.attention.remote_segments import HeldPart
from halfmoon.workers.attention.split_cache import SplitCache, SplitChannels, SpreadRows
from halfmoon.workers.attention.worker_channels import WorkerChannels
from halfmoon.workers.decode.actions import PushTail
from halfmoon.workers.decode.batch_borrower import BatchBorrower, RowGroup
from halfmoon.workers.decode.group_choice import GroupChoice
from halfmoon.workers.decode.lent_parts import CachePart
from halfmoon.workers.decode.sequence import DecodeSequence


class _CacheGroup(RowGroup[SpreadRows]):
    """`known`: which rows the places expect next, and how long they are. A place has channels of their own for whole
    caches, for the ends of some, and for their other parts.
    """

    def __init__(self, hello: ChannelHello, options: ChannelOptions, engine: Any) -> None:
        super().__init__(WorkerChannels(hello, options))
        self.tails, self.parts = WorkerChannels(hello, options), WorkerChannels(hello, options)
        channels = SplitChannels(self.channels.open, self.tails.open, self.parts.open)
        segment_tokens = engine.attention.segment_tokens
        self.cache = SplitCache(channels, engine.config, engine.dtype, segment_tokens)

    @property
    def asked(self) -> tuple[RemotePlaces[Any], ...]:
        return self.cache.asked

    def close(self) -> None:
        self.tails.close()
        self.parts.close()
        super().close()


class CacheBorrower(BatchBorrower[_CacheGroup]):
    """One for an engine. A batch goes through it in at least so many groups as `choice` says, in turn: while attention
    of one is away, the next one's layer is computed.
    """

    def __init__(
        self, engine: Any, hello: ChannelHello, options: ChannelOptions, choice: GroupChoice
    ) -> None:
        super().__init__(engine, hello, options)
        self._choice = choice
        #: Of the newest step; the compute thread writes it.
        self.groups = 0
        #: The copy thread's.
        self._pushes = WorkerChannels(hello, options)

    def _new_group(self) -> _CacheGroup:
        return _CacheGroup(self._hello, self._options, self._engine)

    def _step(
        self, batch: Sequence[DecodeSequence], tokens: list[int], lengths: list[int], tables: list[list[int]]
    ) -> Any:
        count = self._choice.groups(batch)
        cuts = self._engine.groups_of(len(batch), count)
        groups = [self._group(number) for number in range(len(cuts))]
        self.groups = len(groups)
        for group, cut in zip(groups, cuts, strict=True):
            self._begin(group, batch[cut])
        caches = [group.cache for group in groups]
        logits = self._engine.decode(tokens, lengths, tables, caches, groups=count)
        for group in groups:
            assert group.known is not None
            group.known = group.known.grown()
        return logits

    def _begin(self, group: _CacheGroup, batch: Sequence[DecodeSequence]) -> None:
        """Says which rows are where, if the places do not know it from the last step. Raises as `_step`."""
        rows = self._rows_of(batch)
        group.cache.step += 1
        if rows == group.known:
            return
        group.known = None
        for worker_id, share in rows.kv_heads.items():
            group.channels.reach(
                worker_id, self.addresses[worker_id], head_shares=self._head_shares(len(share))
            )
        for channels, holders in ((group.tails, rows.tails), (group.parts, rows.parts)):
            for worker_id in holders:
                channels.reach(worker_id, self.addresses[worker_id])
        group.cache.begin(rows)
        group.known = rows

    def _rows_of(self, batch: Sequence[DecodeSequence]) -> SpreadRows:
        """Where the KV of each is."""
        rows, segment_tokens = SpreadRows(), self._engine.attention.segment_tokens
        segment_blocks = segment_tokens // self._engine.cache.block_tokens
        for row, sequence in enumerate(batch):
            for part in sequence.parts:
                assert isinstance(part, CachePart), part
                worker_id, first = part.worker_id, part.first_block // segment_blocks
                if not part.grows:
                    held = HeldPart(row, first, part.blocks // segment_blocks, part.hold)
                    rows.parts.setdefault(worker_id, []).append(held)
                elif first:
                    tokens = sequence.length - first * segment_tokens
                    tail = HeldRow(row, part.hold, tokens, first)
                    rows.tails.setdefault(worker_id, []).append(tail)
                else:
                    whole = HeldRow(row, part.hold, sequence.length)
                    rows.whole.setdefault(worker_id, []).append(whole)
                    heads = range(part.first_kv_head, part.first_kv_head + part.kv_heads)
                    rows.kv_heads[worker_id] = heads
        return rows

    def push(self, tail: PushTail) -> None:
        """On the copy thread: sends the end of a prompt to all places. Raises LenderLost."""
        for worker_id, hold, first, kv_heads in tail.places:
            addresses, shares = self.addresses[worker_id], self._head_shares(kv_heads)
            channel = self._pushes.reach(worker_id, addresses, head_shares=shares)
            heads = slice(first, first + kv_heads)
            cache, blocks = self._engine.cache, [tail.block]
            try:
                push_tokens(channel, hold, cache, blocks, tail.first_token, tail.tokens, kv_heads=heads)
            except ChannelError as lost:
                self._pushes.forget(worker_id)
                raise LenderLost(worker_id, str(lost)) from None
            except PartRefused as refused:
                raise LenderLost(worker_id, str(refused)) from None

    def _head_shares(self, kv_heads: int) -> int:
        """How many such parts the KV heads have."""
        return self._hello.kv_heads // kv_heads
