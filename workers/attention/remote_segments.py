"""The end that decodes, or computes a prompt: asks those who hold segments of its sequences, layer by layer, while it
attends to its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.workers.attention.remote_places import RemotePlaces
from halfmoon.workers.attention.server import EVERY_ROW
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.model.attention.states import StateStack


@dataclass(frozen=True, slots=True)
class HeldPart:
    """`segments` consecutive segments of the sequence of `row`, from its segment `first` on: `hold` of a place."""

    row: int
    first: int
    segments: int
    hold: int


class _Place:
    """One holder, in the steps of one batch."""

    def __init__(
        self,
        name: str,
        channel: WorkerChannel,
        parts: Sequence[HeldPart],
        shape: tuple[int, int],
        dtype: torch.dtype,
        chunk_rows: int,
    ) -> None:
        """`chunk_rows`: of one sequence, whose the parts are; 0: each part is of its row."""
        self.name, self.channel, self.dtype = name, channel, dtype
        rows = list(range(chunk_rows)) or sorted({part.row for part in parts})
        self.rows = torch.tensor(rows, dtype=torch.int64)
        asked = [EVERY_ROW if chunk_rows else rows.index(part.row) for part in parts]
        pairs = [each for row, part in zip(asked, parts, strict=True) for each in (row, part.hold)]
        self.pairs = torch.tensor(pairs, dtype=torch.int32)
        places = [(part.first + i, part.row) for part in parts for i in range(part.segments)]
        found = torch.tensor([part for part, _ in places], dtype=torch.int64)
        columns = torch.tensor([row for _, row in places], dtype=torch.int64)
        #: Where the answers stand in the states.
        self.where = (found,) if chunk_rows else (found, columns)
        self.query = torch.empty(len(rows), *shape, dtype=dtype)
        # One memory, as it comes: `out` of every segment, then the log-sum-exp of every segment.
        sizes = (len(places), chunk_rows, *shape) if chunk_rows else (len(places), *shape)
        out_bytes = math.prod(sizes) * dtype.itemsize
        self.memory = torch.empty(out_bytes + 4 * math.prod(sizes[:-1]), dtype=torch.uint8)
        self.out = self.memory[:out_bytes].view(dtype).view(sizes)
        self.lse = self.memory[out_bytes:].view(torch.float32).view(sizes[:-1])


class RemoteSegments(RemotePlaces[_Place]):
    """The parts of a batch that are elsewhere, as `ExactAttention` asks for them (`Elsewhere`)."""

    def __init__(
        self, channels: Mapping[str, WorkerChannel], *, heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__(Op.PARTIAL)
        self._channels, self._shape, self._dtype = channels, (heads, head_dim), dtype

    def begin(self, parts: Mapping[str, Sequence[HeldPart]], *, chunk_rows: int = 0) -> None:
        """The batch of the next steps, by place; or, with `chunk_rows`, the chunks of so many tokens of one prompt
        (row 0). Said again only when it changes.
        """
        self._number += 1
        if chunk_rows == 1:  # a token is attended to as in decode
            chunk_rows = 0
        self._places = [
            _Place(name, self._channels[name], held, self._shape, self._dtype, chunk_rows)
            for name, held in parts.items()
            if held
        ]
        for place in self._places:
            header = MessageHeader(Op.SLOTS, rows=len(place.rows), slots=self._number)
            place.channel.send(header, bytes_of(place.pairs))

    def ask(self, layer: int, q: Tensor) -> None:
        """Sends the queries `[rows, heads, head_dim]` of one layer to those who hold segments of their sequences."""
        self._layer = layer
        for place in self._places:
            torch.index_select(q, 0, place.rows, out=place.query)
            header = MessageHeader(
                Op.QUERY,
                DTYPES[self._dtype],
                layer=layer,
                rows=len(place.rows),
                step=self.step,
                slots=self._number,
            )
            place.channel.send(header, bytes_of(place.query))
            self._asked.append(place)

    def collect(self, states: StateStack) -> None:
        """Writes what they answer to the parts that it is about. Raises ChannelLost and PartRefused."""

        def take(place: _Place) -> None:
            states.out[place.where] = place.out.float()
            states.lse[place.where] = place.lse

        self._hear_all(take)
