"""The KVCache of rows of which some are spread *by sequence*: the first segments of such a row lie at other places than
its last ones and its new tokens. A row's places send states over their segments; these, and that over the row's own
token, merge here in their order, as in `ExactAttention`: the bits are those of a cache in one place.

Source: Infinite-LLM (arXiv 2401.02669), section 4: attention over parts of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import Op
from halfmoon.workers.attention.remote_cache import GrowingRows, HeldRow, RemoteCache, RowsPlace
from halfmoon.workers.attention.remote_places import RemotePlaces
from halfmoon.workers.attention.remote_segments import HeldPart, RemoteSegments
from halfmoon.workers.attention.server import TAILS
from halfmoon.workers.model.attention.exact import CacheElsewhere, own_token
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.loading.config import ModelConfig

Channels = Mapping[str, WorkerChannel]


class _TailPlace(RowsPlace):
    """`held` grows by a token a step."""

    def lay_out(self, held: Sequence[HeldRow], segment_tokens: int) -> None:
        """Room for the states of the next step, in the order of the answer."""
        places = [
            (one.first_segment + i, one.row) for one in held for i in range(-(-one.tokens // segment_tokens))
        ]
        #: Where they stand in the states.
        self.where = tuple(
            torch.tensor(each, dtype=torch.int64) for each in ([p for p, _ in places], [r for _, r in places])
        )
        sizes = len(places), *self.query.shape[1:]
        out_bytes = math.prod(sizes) * self.query.dtype.itemsize
        self.memory = torch.empty(out_bytes + 4 * math.prod(sizes[:-1]), dtype=torch.uint8)
        self.out = self.memory[:out_bytes].view(self.query.dtype).view(sizes)
        self.lse = self.memory[out_bytes:].view(torch.float32).view(sizes[:-1])


class RemoteTails(GrowingRows[_TailPlace]):
    """The last segments of rows, whose places get each new token and answer with states."""

    def __init__(
        self, channels: Channels, config: ModelConfig, dtype: torch.dtype, segment_tokens: int
    ) -> None:
        super().__init__(Op.PARTIAL, TAILS, channels, config, dtype)
        self._segment_tokens = segment_tokens
        self._held: dict[str, list[HeldRow]] = {}

    def begin(self, rows: Mapping[str, Sequence[HeldRow]]) -> None:
        """As `RemoteCache.begin`; a place has all KV heads."""
        all_heads = range(self._config.kv_heads)
        self._held = {name: list(held) for name, held in rows.items() if held}
        places = [
            _TailPlace(name, self._channels[name], held, all_heads, self._config, self._dtype)
            for name, held in self._held.items()
        ]
        self._begin(places, ((one.row, all_heads) for held in self._held.values() for one in held))

    def lay_out(self) -> int:
        """Before a step's first layer. Returns the most segments that a row has, here and before."""
        for place in self._places:
            place.lay_out(self._held[place.name], self._segment_tokens)
        rows = [one for held in self._held.values() for one in held]
        return max(one.first_segment + -(-one.tokens // self._segment_tokens) for one in rows)

    def stepped(self) -> None:
        """Every row has got a token."""
        self._held = {
            name: [replace(one, tokens=one.tokens + 1) for one in held] for name, held in self._held.items()
        }

    def collect(self, states: StateStack) -> None:
        """Writes what they answer. Raises ChannelLost and PartRefused."""

        def take(place: _TailPlace) -> None:
            states.out[place.where] = place.out.float()
            states.lse[place.where] = place.lse

        self._hear_all(take)


@dataclass(slots=True)
class SpreadRows:
    """The rows of a group, by place. `whole`: with all tokens of a row, and `kv_heads` of it; `tails`: with the last
    ones of a row whose first segments are `parts` of other places.
    """

    whole: dict[str, list[HeldRow]] = field(default_factory=dict)
    kv_heads: dict[str, range] = field(default_factory=dict)
    tails: dict[str, list[HeldRow]] = field(default_factory=dict)
    parts: dict[str, list[HeldPart]] = field(default_factory=dict)

    def grown(self) -> SpreadRows:
        """When every row has got a token."""
        whole, tails = (
            {name: [replace(one, tokens=one.tokens + 1) for one in held] for name, held in rows.items()}
            for rows in (self.whole, self.tails)
        )
        return replace(self, whole=whole, tails=tails)


class SplitChannels(NamedTuple):
    """A place has one list for each channel: of whole caches, of tails, and of parts."""

    whole: Channels
    tails: Channels
    parts: Channels


class SplitCache(CacheElsewhere):
    """The cache of one group of rows. Its channels are its own."""

    def __init__(
        self, channels: SplitChannels, config: ModelConfig, dtype: torch.dtype, segment_tokens: int
    ) -> None:
        self._whole = RemoteCache(channels.whole, config, dtype)
        self._tails = RemoteTails(channels.tails, config, dtype, segment_tokens)
        self._parts = RemoteSegments(
            channels.parts, heads=config.heads, head_dim=config.head_dim, dtype=dtype
        )
        self._layers, self._dtype, self._layer = config.layers, dtype, 0
        #: Rows of each kind; all of them are whole where there are no others.
        self._whole_rows = self._split_rows = torch.empty(0, dtype=torch.int64)
        self._query = torch.empty(0)
        self._states: StateStack | None = None

    @property
    def step(self) -> int:
        return self._whole.step

    @step.setter
    def step(self, number: int) -> None:
        self._whole.step = self._tails.step = self._parts.step = number

    def begin(self, rows: SpreadRows) -> None:
        """As `RemoteCache.begin`."""
        whole = sorted({one.row for held in rows.whole.values() for one in held})
        split = sorted({one.row for held in rows.tails.values() for one in held})
        self._whole_rows, self._split_rows = (
            torch.tensor(each, dtype=torch.int64) for each in (whole, split)
        )
        # Each kind counts its own rows.
        self._whole.begin(_counted(rows.whole, whole), rows.kv_heads)
        self._tails.begin(_counted(rows.tails, split))
        self._parts.begin(
            {
                name: [replace(one, row=split.index(one.row)) for one in held]
                for name, held in rows.parts.items()
            }
        )

    def ask(self, layer: int, q: Tensor) -> None:
        self._layer = layer
        if not len(self._split_rows):
            self._whole.ask(layer, q)
            return
        self._query = q.index_select(0, self._split_rows)
        if layer == 0:
            rows, heads, head_dim = self._query.shape
            self._states = StateStack(self._tails.lay_out() + 1, rows, heads, head_dim, q.device)
        self._tails.ask(layer, self._query)
        self._parts.ask(layer, self._query)
        self._whole.ask(layer, q.index_select(0, self._whole_rows))

    def tell(self, k: Tensor, v: Tensor) -> None:
        if not len(self._split_rows):
            self._whole.tell(k, v)
            return
        assert self._states is not None
        self._whole.tell(k.index_select(0, self._whole_rows), v.index_select(0, self._whole_rows))
        k, v = k.index_select(0, self._split_rows), v.index_select(0, self._split_rows)
        self._tails.tell(k, v)
        own_token(self._query, k, v, self._states)

    def collect(self, out: Tensor) -> None:
        if not len(self._split_rows):
            self._whole.collect(out)
            return
        assert self._states is not None
        found = torch.empty(len(self._whole_rows), *out.shape[1:], dtype=out.dtype)
        self._whole.collect(found)
        out.index_copy_(0, self._whole_rows, found)
        self._parts.collect(self._states)
        self._tails.collect(self._states)
        out.index_copy_(0, self._split_rows, self._states.merged().to(out.dtype))
        if self._layer == self._layers - 1:
            self._tails.stepped()

    @property
    def asked(self) -> tuple[RemotePlaces[Any], ...]:
        """Those who are asked, of each kind of row."""
        return self._whole, self._tails, self._parts

    def abandon(self) -> None:
        self._whole.abandon()
        self._tails.abandon()
        self._parts.abandon()


def _counted(rows: Mapping[str, Sequence[HeldRow]], numbers: list[int]) -> dict[str, list[HeldRow]]:
    return {name: [replace(one, row=numbers.index(one.row)) for one in held] for name, held in rows.items()}
