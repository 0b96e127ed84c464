"""The end that computes a model whose KVCache is elsewhere, all of it: rows of q, then of k and v, go out for each
layer, and attention's result comes back, or the states that make it.

A row's KV lies *by request* at one place, with all heads; *by heads* at several, each with some KV heads and their
query heads; or *by sequence*: its first segments at other places than its last ones and its new tokens. Places that
have a whole row merge its states. Where it is spread by sequence they send them, and these, and that over the row's own
token, merge here in their order, as in `ExactAttention`. So the bits are those of a cache in one place.

Source: Lamina (arXiv 2405.01814), section 4.2; by sequence Infinite-LLM (arXiv 2401.02669), section 4.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import Op
from halfmoon.workers.attention.remote_places import PartOf, PlaceList, RemotePlaces, StatesComing, by_place
from halfmoon.workers.attention.server import STATES, TAILS, WHOLE
from halfmoon.workers.model.attention.exact import CacheElsewhere
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.loading.config import ModelConfig


def head_shares(kv_heads: int, places: int) -> list[range]:
    """The KV heads of each of `places` places. Raises ValueError: they do not divide."""
    if places < 1 or kv_heads % places:
        raise ValueError(f"places: {kv_heads} KV heads do not divide by {places}")
    each = kv_heads // places
    return [range(first, first + each) for first in range(0, kv_heads, each)]


class RemoteCache(RemotePlaces, CacheElsewhere):
    """The cache of one group of rows. Its channels are its own."""

    def __init__(
        self,
        channels: Mapping[str, WorkerChannel],
        config: ModelConfig,
        dtype: torch.dtype,
        segment_tokens: int,
    ) -> None:
        super().__init__(channels, config, dtype)
        self._segment_tokens = segment_tokens
        self._rows = 0
        #: Of the next step: the tokens whose KV each row has, as the places count them.
        self.lengths: list[int] = []
        #: The rows whose states merge here, where each stands among them, and their last parts, by place.
        self._spread = torch.empty(0, dtype=torch.int64)
        self._columns: dict[int, int] = {}
        self._ends: dict[str, list[PartOf]] = {}
        self._query = torch.empty(0)
        self._states: StateStack | None = None
        #: Some places may have ended the step, and others not.
        self._failed = False

    def begin(self, parts: Sequence[Sequence[KvPart]], lengths: Sequence[int]) -> None:
        """Set the batch of the next steps: the place and the tokens of each row's KV. Call it again when the batch
        changes, and after a step that failed; each step adds a token to every row by itself.

        Raises ValueError: some row has no place for a KV head's new tokens, or two.
        """
        whole: list[PartOf] = []
        ends: list[PartOf] = []
        first: list[PartOf] = []
        for row, some in enumerate(parts):
            for part in some:
                kind = first if not part.grows else ends if part.first_segment else whole
                kind.append((row, part))
        self._rows, self.lengths, self._failed = len(parts), list(lengths), False
        self._check_heads([*whole, *ends])
        spread = sorted({row for row, _ in ends})
        self._columns = {row: column for column, row in enumerate(spread)}
        self._states = None
        self._spread = torch.tensor(spread, dtype=torch.int64)
        self._ends = by_place(ends)
        tails = [self._growing(TAILS, name, held) for name, held in self._ends.items()]
        states = [self._states_of(name, held, self._columns) for name, held in by_place(first).items()]
        self._say([*tails, *states, *(self._growing(WHOLE, *held) for held in by_place(whole).items())])

    def _check_heads(self, growing: Sequence[PartOf]) -> None:
        every = range(self._config.kv_heads)
        found = Counter((row, head) for row, part in growing for head in part.heads(len(every)))
        for row, head in itertools.product(range(self._rows), every):
            if found[row, head] != 1:
                raise ValueError(f"rows: KV head {head} of row {row} is at {found[row, head]} places")

    def _growing(self, kind: int, name: str, held: Sequence[PartOf]) -> PlaceList:
        pairs = [(part.hold, part.size(self.lengths[row], self._segment_tokens)) for row, part in held]
        heads = held[0][1].heads(self._config.kv_heads)
        return self._list(kind, name, [row for row, _ in held], pairs, heads)

    def ask(self, layer: int, q: Tensor) -> None:
        assert len(q) == self._rows, (len(q), self._rows)
        assert not self._failed, "begin again after a step that failed"
        if self._columns:
            self._query = q.index_select(0, self._spread)
            if layer == 0:
                self._lay_out()
        super().ask(layer, q)

    def _lay_out(self) -> None:
        """Room for the states of a step: the last parts of sequences have more segments from time to time."""
        most, (rows, heads, head_dim) = 0, self._query.shape
        for one in self._lists:
            if one.kind == TAILS:
                segments = [
                    (part.first_segment + i, self._columns[row])
                    for row, part in self._ends[one.name]
                    for i in range(
                        -(-part.size(self.lengths[row], self._segment_tokens) // self._segment_tokens)
                    )
                ]
                one.states = StatesComing(segments, self._config, self._dtype)
        for row in self._columns:
            most = max(most, -(-self.lengths[row] // self._segment_tokens))
        self._states = StateStack(most, rows, heads, head_dim, self._query.device)

    def tell(self, k: Tensor, v: Tensor) -> None:
        for one in self._lists:
            if one.kind == STATES:
                continue
            heads = slice(one.kv_heads.start, one.kv_heads.stop)
            for new, into in zip((k, v), one.new, strict=True):
                torch.index_select(new[:, heads], 0, one.rows, out=into)
            self._send(one, Op.KEY_VALUE, one.new)
            self._asked.append(one)
        if self._states is not None:
            self._states.own_token(
                self._query, k.index_select(0, self._spread), v.index_select(0, self._spread)
            )

    def collect(self, out: Tensor) -> None:
        for one in self._hear_all():
            if one.states is None:
                out.narrow(1, *one.heads).index_copy_(0, one.rows, one.out)
            else:
                assert self._states is not None
                one.states.write(self._states)
        if self._states is not None:
            out.index_copy_(0, self._spread, self._states.merged().to(out.dtype))
        if self._layer == self._config.layers - 1:
            self.lengths = [tokens + 1 for tokens in self.lengths]

    def abandon(self) -> None:
        super().abandon()
        self._failed = True
