"""The end that computes a model whose KVCache is elsewhere, all of it: rows of q, then of k and v, go out for each
layer, and rows of attention's result come back.

The sequences are at one place or at several, *by request*: a row's place has all of its KV heads; or *by heads*: each
place has some KV heads, with their query heads, of every row. Rows that are spread *by sequence* are `SplitCache`'s.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.workers.attention.remote_places import RemotePlaces
from halfmoon.workers.attention.server import WHOLE
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.model.attention.exact import CacheElsewhere
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.model.loading.config import ModelConfig


@dataclass(frozen=True, slots=True)
class HeldRow:
    """The sequence of `row` has `tokens` tokens of KV, in `hold` of a place; those after its first `first_segment`
    segments, where these lie elsewhere.
    """

    row: int
    hold: int
    tokens: int
    first_segment: int = 0


def head_shares(kv_heads: int, places: int) -> list[range]:
    """The KV heads of each of so many places. Raises ValueError: they do not divide."""
    if places < 1 or kv_heads % places:
        raise ValueError(f"places: {kv_heads} KV heads do not divide by {places}")
    each = kv_heads // places
    return [range(first, first + each) for first in range(0, kv_heads, each)]


class RowsPlace:
    """One place, in the steps of one batch."""

    def __init__(
        self,
        name: str,
        channel: WorkerChannel,
        held: Sequence[HeldRow],
        kv_heads: range,
        config: ModelConfig,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.channel, self.kv_heads = name, channel, kv_heads
        self.rows = torch.tensor([one.row for one in held], dtype=torch.int64)
        self.pairs = torch.tensor([[one.hold, one.tokens] for one in held], dtype=torch.int32)
        group = config.heads // config.kv_heads
        #: First query head, and how many.
        self.heads = kv_heads.start * group, len(kv_heads) * group
        self.query = torch.empty(len(held), self.heads[1], config.head_dim, dtype=dtype)
        self.new = torch.empty(2, len(held), len(kv_heads), config.head_dim, dtype=dtype)
        self.out = torch.empty_like(self.query)
        self.memory = self.out.view(torch.uint8).view(-1)


P = TypeVar("P", bound=RowsPlace)


class GrowingRows(RemotePlaces[P]):
    """Rows whose places get each new token: a query, then its keys and values, then an answer for both."""

    def __init__(
        self,
        answer: Op,
        kind: int,
        channels: Mapping[str, WorkerChannel],
        config: ModelConfig,
        dtype: torch.dtype,
    ) -> None:
        """`kind`: of the list, in its header's `parts`."""
        super().__init__(answer)
        self._kind, self._channels, self._config, self._dtype = kind, channels, config, dtype
        self._rows = 0
        #: Some places may have ended the step, and others not.
        self._failed = False

    def _begin(self, places: list[P], kv_heads: Iterable[tuple[int, range]]) -> None:
        """The batch of the next steps. `kv_heads`: each row's, at each of its places.

        Raises ValueError: some row has no place for a KV head, or two.
        """
        found = Counter((row, head) for row, heads in kv_heads for head in heads)
        self._rows = 1 + max((row for row, _ in found), default=-1)
        for row, head in itertools.product(range(self._rows), range(self._config.kv_heads)):
            if found[row, head] != 1:
                raise ValueError(f"rows: KV head {head} of row {row} is at {found[row, head]} places")
        self._places, self._failed = places, False
        self._number += 1
        for place in self._places:
            header = MessageHeader(Op.SLOTS, parts=self._kind, rows=len(place.rows), slots=self._number)
            place.channel.send(header, bytes_of(place.pairs))

    def ask(self, layer: int, q: Tensor) -> None:
        assert len(q) == self._rows, (len(q), self._rows)
        assert not self._failed, "begin again after a step that failed"
        self._layer = layer
        for place in self._places:
            torch.index_select(q.narrow(1, *place.heads), 0, place.rows, out=place.query)
            place.channel.send(self._header(Op.QUERY, place), bytes_of(place.query))

    def tell(self, k: Tensor, v: Tensor) -> None:
        for place in self._places:
            heads = slice(place.kv_heads.start, place.kv_heads.stop)
            for new, into in zip((k, v), place.new, strict=True):
                torch.index_select(new[:, heads], 0, place.rows, out=into)
            place.channel.send(self._header(Op.KEY_VALUE, place), bytes_of(place.new))
            self._asked.append(place)

    def abandon(self) -> None:
        super().abandon()
        self._failed = True

    def _header(self, op: Op, place: P) -> MessageHeader:
        return MessageHeader(
            op,
            DTYPES[self._dtype],
            layer=self._layer,
            rows=len(place.rows),
            step=self.step,
            slots=self._number,
        )


class RemoteCache(GrowingRows[RowsPlace], CacheElsewhere):
    """The cache of one group of rows. Its channels are its own."""

    def __init__(
        self, channels: Mapping[str, WorkerChannel], config: ModelConfig, dtype: torch.dtype
    ) -> None:
        super().__init__(Op.OUT, WHOLE, channels, config, dtype)

    def begin(self, rows: Mapping[str, Sequence[HeldRow]], kv_heads: Mapping[str, range]) -> None:
        """The batch of the next steps, by place, and the KV heads that each place has. Said again when the batch
        changes, and after a step that failed; each step adds a token to every row by itself.

        Raises ValueError: some row has no place for a KV head, or two.
        """
        places = [
            RowsPlace(name, self._channels[name], held, kv_heads[name], self._config, self._dtype)
            for name, held in rows.items()
            if held
        ]
        self._begin(places, ((one.row, kv_heads[name]) for name in rows for one in rows[name]))

    def collect(self, out: Tensor) -> None:
        def take(place: RowsPlace) -> None:
            out.narrow(1, *place.heads).index_copy_(0, place.rows, place.out)

        self._hear_all(take)
