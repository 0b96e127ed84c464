"""The parts of a batch that others hold: channels to them, and who is asked for which row. On the compute thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.workers.attention.remote_segments import HeldPart, RemoteSegments
from halfmoon.workers.attention.worker_channels import WorkerChannels
from halfmoon.workers.decode.batch_borrower import BatchBorrower, RowGroup
from halfmoon.workers.decode.sequence import DecodeSequence

Parts = dict[str, list[HeldPart]]


class _PartsGroup(RowGroup[Parts]):
    def __init__(self, channels: WorkerChannels, engine: Any) -> None:
        super().__init__(channels)
        config = engine.config
        self.remote = RemoteSegments(
            channels.open, heads=config.heads, head_dim=config.head_dim, dtype=engine.dtype
        )

    @property
    def asked(self) -> tuple[RemoteSegments]:
        return (self.remote,)


class Borrower(BatchBorrower[_PartsGroup]):
    """One for an engine."""

    def __init__(
        self, engine: Any, segment_blocks: int, hello: ChannelHello, options: ChannelOptions
    ) -> None:
        super().__init__(engine, hello, options)
        self._segment_blocks = segment_blocks

    def _new_group(self) -> _PartsGroup:
        return _PartsGroup(WorkerChannels(self._hello, self._options), self._engine)

    def _step(
        self, batch: Sequence[DecodeSequence], tokens: list[int], lengths: list[int], tables: list[list[int]]
    ) -> Any:
        elsewhere: list[RemoteSegments | None] = []
        if any(sequence.parts for sequence in batch):
            cuts = self._engine.groups_of(len(batch))
            elsewhere = [self._begin(number, batch[rows]) for number, rows in enumerate(cuts)]
        return self._engine.decode(tokens, lengths, tables, elsewhere)

    def _begin(self, number: int, rows: Sequence[DecodeSequence]) -> RemoteSegments | None:
        """None: all of these rows are here. Raises as `_step`."""
        parts: Parts = {}
        for row, sequence in enumerate(rows):
            for part in sequence.parts:
                first, count = part.first_block // self._segment_blocks, part.blocks // self._segment_blocks
                parts.setdefault(part.worker_id, []).append(HeldPart(row, first, count, part.hold))
        if not parts:
            return None
        group = self._group(number)
        group.remote.step += 1
        if parts == group.known:
            return group.remote
        group.known = None
        for worker_id in parts:
            group.channels.reach(worker_id, self.addresses[worker_id])
        group.remote.begin(parts)
        group.known = parts
        return group.remote
