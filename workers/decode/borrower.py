"""The parts of a batch that others hold: channels to them, and who is asked for which row. On the compute thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelError, ChannelLost
from halfmoon.workers.attention.errors import LenderLost, PartRefused
from halfmoon.workers.attention.remote_segments import HeldPart, RemoteSegments
from halfmoon.workers.decode.sequence import DecodeSequence


class Borrower:
    """One for an engine. Each group of rows that the engine computes has channels of its own: on each, a lender keeps
    one list of what it will be asked for, which is said again only when the group changes.
    """

    def __init__(
        self, engine: Any, segment_blocks: int, hello: ChannelHello, options: ChannelOptions
    ) -> None:
        self._engine, self._segment_blocks = engine, segment_blocks
        self._hello, self._options = hello, options
        #: By lender: where it listens. Written by the loop before a part counts as held.
        self.addresses: dict[str, list[str]] = {}
        #: What they were when the channels to it were opened.
        self._reached: dict[str, list[str]] = {}
        self._channels: list[dict[str, WorkerChannel]] = []
        self._groups: list[RemoteSegments] = []
        self._asked: list[dict[str, list[HeldPart]]] = []

    def decode(self, batch: Sequence[DecodeSequence]) -> Any:
        """The engine's logits of the batch's next tokens. Raises LenderLost."""
        tokens = [sequence.output[-1] for sequence in batch]
        lengths, tables = [s.length for s in batch], [s.table for s in batch]
        try:
            return self._engine.decode(tokens, lengths, tables, self._elsewhere(batch))
        except ChannelLost as lost:
            # Opened anew when it is next wanted.
            self._forget()
            raise LenderLost(lost.peer, lost.reason) from None
        except PartRefused as refused:
            self._asked = [{} for _ in self._asked]
            raise LenderLost(refused.place, str(refused)) from None

    def _elsewhere(self, batch: Sequence[DecodeSequence]) -> list[RemoteSegments | None]:
        """For `Engine.decode`; empty when all of the batch is here. Raises LenderLost, ChannelLost."""
        if not any(sequence.parts for sequence in batch):
            return []
        step = self._engine.decode_rows_multiple
        return [self._group(at // step, batch[at : at + step]) for at in range(0, len(batch), step)]

    def _group(self, number: int, rows: Sequence[DecodeSequence]) -> RemoteSegments | None:
        parts: dict[str, list[HeldPart]] = {}
        for row, sequence in enumerate(rows):
            for part in sequence.parts:
                first, count = part.first_block // self._segment_blocks, part.blocks // self._segment_blocks
                parts.setdefault(part.worker_id, []).append(HeldPart(row, first, count, part.hold))
        if not parts:
            return None
        while len(self._groups) <= number:
            config, channels = self._engine.config, dict[str, WorkerChannel]()
            self._channels.append(channels)
            self._groups.append(
                RemoteSegments(
                    channels, heads=config.heads, head_dim=config.head_dim, dtype=self._engine.dtype
                )
            )
            self._asked.append({})
        remote, channels = self._groups[number], self._channels[number]
        remote.step += 1
        if parts == self._asked[number]:
            return remote
        for worker_id in parts:
            if worker_id in channels and self._reached.get(worker_id) != self.addresses[worker_id]:
                self._forget()  # it has started again since
        for worker_id in parts:
            if worker_id not in channels:
                channels[worker_id] = self._connect(worker_id)
        remote.begin(parts)
        self._asked[number] = parts
        return remote

    def _connect(self, worker_id: str) -> WorkerChannel:
        self._reached[worker_id] = self.addresses[worker_id]
        try:
            return connect(self.addresses[worker_id], self._hello, self._options, peer=worker_id)
        except ChannelError as problem:
            raise LenderLost(worker_id, str(problem)) from None

    def _forget(self) -> None:
        """Closes all channels: those to other lenders may have answers under way, which nobody waits for."""
        for channels in self._channels:
            for channel in channels.values():
                channel.close()
            channels.clear()
        self._asked = [{} for _ in self._asked]

    def close(self) -> None:
        self._forget()
