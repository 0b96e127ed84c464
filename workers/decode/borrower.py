"""The parts of a batch at other workers, be it some segments of a sequence or all: the channels to their places, and
the rows that each place is asked for.

Steps are of the compute thread; ends of prompts are pushed by the copy thread, over channels of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelError, ChannelLost
from halfmoon.workers.attention.errors import LenderLost, PartRefused
from halfmoon.workers.attention.push import push_tokens
from halfmoon.workers.attention.remote_cache import RemoteCache
from halfmoon.workers.attention.remote_segments import RemoteSegments
from halfmoon.workers.attention.worker_channels import WorkerChannels
from halfmoon.workers.decode.actions import PushTail
from halfmoon.workers.decode.group_choice import GroupChoice
from halfmoon.workers.decode.sequence import DecodeSequence


class _Group:
    """Rows that are computed together. On each channel the other end keeps the lists of its rows, which are sent again
    only when they change.
    """

    def __init__(self, channels: WorkerChannels, remote: RemoteSegments | RemoteCache) -> None:
        self.channels, self.remote = channels, remote
        #: The parts that were sent last, to all places; None: they are sent anew.
        self.parts: list[list[KvPart]] | None = None

    def begin(self, parts: list[list[KvPart]], lengths: list[int]) -> None:
        if isinstance(self.remote, RemoteSegments):
            self.remote.begin(parts)
        else:
            self.remote.begin(parts, lengths)
        self.parts = parts

    def expects(self, parts: list[list[KvPart]], lengths: list[int]) -> bool:
        """The places know it from the last step."""
        return self.parts == parts and (
            isinstance(self.remote, RemoteSegments) or self.remote.lengths == lengths
        )

    def close(self) -> None:
        self.channels.close()
        self.parts = None


class Borrower:
    """One for an engine. A batch goes through it in groups, in turn: while attention of one is away, the next one's
    layer is computed.
    """

    def __init__(
        self,
        engine: Any,
        hello: ChannelHello,
        options: ChannelOptions,
        choice: GroupChoice | None = None,
    ) -> None:
        """`choice`: into how many groups at least a batch is divided whose KV is elsewhere, all of it; None: the engine
        has a cache, and others hold first segments of sequences.
        """
        self._engine, self._hello, self._options, self._choice = engine, hello, options, choice
        #: By worker that holds something: where it listens. Written by the loop before a part counts as held.
        self.addresses: dict[str, list[str]] = {}
        self._groups: list[_Group] = []
        #: By worker: how long the last step waited for it.
        self.waits_ns: dict[str, int] = {}
        #: Into how many the newest batch was divided whose KV is elsewhere.
        self.groups = 0
        #: The copy thread's.
        self._pushes = WorkerChannels(hello, options)

    def decode(self, batch: Sequence[DecodeSequence]) -> Any:
        """The engine's logits of the batch's next tokens. Raises LenderLost: none of them counts."""
        self._take_waits()
        try:
            logits = self._step(batch)
            self.waits_ns = self._take_waits()
            return logits
        except ChannelLost as lost:
            # All are opened anew when they are next wanted.
            self.close()
            raise LenderLost(lost.peer, lost.reason) from None
        except PartRefused as refused:
            for group in self._groups:
                group.parts = None
            raise LenderLost(refused.place, str(refused), refused.hold) from None

    def _take_waits(self) -> dict[str, int]:
        found = Counter[str]()
        for group in self._groups:
            found.update(group.remote.waits_ns)
            group.remote.waits_ns.clear()
        return found

    def _step(self, batch: Sequence[DecodeSequence]) -> Any:
        """As `decode`. Raises LenderLost, ChannelLost, PartRefused."""
        tokens = [sequence.output[-1] for sequence in batch]
        lengths, tables = [s.length for s in batch], [s.table for s in batch]
        count = self._choice.groups(batch) if self._choice is not None else 1
        if not any(sequence.parts for sequence in batch):
            return self._engine.decode(tokens, lengths, tables)
        groups = [
            self._begin(number, batch[rows])
            for number, rows in enumerate(self._engine.groups_of(len(batch), count))
        ]
        if self._choice is not None:
            self.groups = len(groups)
        remotes = [group and group.remote for group in groups]
        return self._engine.decode(tokens, lengths, tables, remotes, groups=count)

    def _begin(self, number: int, rows: Sequence[DecodeSequence]) -> _Group | None:
        """Sends each place its rows, if it does not know them from the last step. None: all of these rows are here.
        Raises as `_step`.
        """
        parts, lengths = [list(sequence.parts) for sequence in rows], [sequence.length for sequence in rows]
        if not any(parts):
            return None
        group = self._group(number)
        group.remote.step += 1
        if not group.expects(parts, lengths):
            group.parts = None
            for part in (part for some in parts for part in some):
                self._reach(group.channels, part)
            group.begin(parts, lengths)
        return group

    def _group(self, number: int) -> _Group:
        while len(self._groups) <= number:
            engine, channels = self._engine, WorkerChannels(self._hello, self._options)
            remote: RemoteSegments | RemoteCache
            if self._choice is None:
                remote = RemoteSegments(channels.open, engine.config, engine.dtype)
            else:
                segment_tokens = engine.attention.segment_tokens
                remote = RemoteCache(channels.open, engine.config, engine.dtype, segment_tokens)
            self._groups.append(_Group(channels, remote))
        return self._groups[number]

    def _reach(self, channels: WorkerChannels, part: KvPart) -> WorkerChannel:
        """The channel to the worker that holds it."""
        every, addresses = self._hello.kv_heads, self.addresses[part.worker_id]
        return channels.reach(part.worker_id, addresses, head_shares=every // max(1, len(part.heads(every))))

    def push(self, tail: PushTail) -> None:
        """On the copy thread: sends the end of a prompt to all places. Raises LenderLost."""
        for part in tail.parts:
            channel, heads = self._reach(self._pushes, part), part.heads(self._hello.kv_heads)
            cache, blocks, cut = self._engine.cache, [tail.block], slice(heads.start, heads.stop)
            try:
                push_tokens(channel, part.hold, cache, blocks, tail.first_token, tail.tokens, kv_heads=cut)
            except ChannelError as lost:
                self._pushes.forget(part.worker_id)
                raise LenderLost(part.worker_id, str(lost)) from None
            except PartRefused as refused:
                raise LenderLost(part.worker_id, str(refused)) from None

    def close(self) -> None:
        """Closes all channels: those to others may have answers under way, which nobody waits for."""
        for group in self._groups:
            group.close()
