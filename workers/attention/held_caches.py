"""The rows of a query whose sequences lie here with all of their past tokens, and grow by one a step.

For each layer the query comes first (QUERY), and the states over the past are computed at once, while the other end
still computes the new tokens' keys and values. When these come (KEY_VALUE), each row's state over its own token joins
the others, all merge in their order, as in `ExactAttention`, and the tokens are written to the holds. The answer (OUT)
is attention's result: a row of q up, one of k and v, a row down.

Source: Lamina (arXiv 2405.01814), section 4.2.2: attention to cached tokens overlaps with the projection of k and v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.workers.attention.errors import RowRefusal
from halfmoon.workers.attention.held import HeldSegments, slots_of, write
from halfmoon.workers.attention.tensors import bytes_of
from halfmoon.workers.model.attention.kernel import Attention, SegmentRun, StepRuns, runs_of
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.paged_cache import PagedCache


class HeldCaches:
    """A list of one channel. `wanted`: for each row its hold, and the number of its tokens that are the sequence's;
    further tokens are of a step that was not finished, and are written anew.
    """

    answer = Op.OUT

    def __init__(
        self,
        wanted: Sequence[tuple[int, int]],
        holds: Mapping[int, HeldSegments],
        attention: Attention,
        cache: PagedCache,
        *,
        segment_tokens: int,
        heads: int,
    ) -> None:
        """Every hold is there, and `problem_of` found nothing."""
        self.held = {number: holds[number] for number, _ in wanted}
        self.rows = len(wanted)
        self._tokens = [tokens for _, tokens in wanted]
        for number, tokens in wanted:
            holds[number].tokens, holds[number].attender = tokens, self
        self._attention, self._cache, self._segment_tokens = attention, cache, segment_tokens
        kv_heads, head_dim = (int(size) for size in cache.k.shape[-2:])
        self._shape = heads, head_dim
        self.query = torch.empty(self.rows, heads, head_dim, dtype=cache.dtype)
        #: k and v of the new tokens.
        self.new = torch.empty(2, self.rows, kv_heads, head_dim, dtype=cache.dtype)
        self.out = torch.empty_like(self.query)
        #: Why the step that is under way has no answers.
        self.problem: RowRefusal | None = None
        self._layer_due = 0
        self._asked: tuple[int, int] | None = None
        self._runs, self._slots = StepRuns(), torch.empty(0)
        self._states: StateStack | None = None

    @property
    def begun(self) -> bool:
        """A query was taken, and k and v are due."""
        return self._asked is not None

    def ask(self, header: MessageHeader) -> None:
        """`query` is here: compute the states over each row's past. A problem is reported when k and v have come."""
        if header.layer == 0:
            self._begin()
        elif header.layer != self._layer_due and not self.problem:
            self.problem = RowRefusal(f"layer: {header.layer}, where {self._layer_due} was due")
        self._asked = header.step, header.layer
        if self.problem:
            return
        assert self._states is not None
        k, v = self._cache.k[header.layer], self._cache.v[header.layer]
        self._attention.segment_states(self.query, k, v, self._runs, self._states)

    def merge(self, header: MessageHeader) -> RowRefusal | None:
        """`new` is here: all of attention, in `out`. Returns why not, or nothing."""
        if self._asked != (header.step, header.layer):
            problem = f"layer: k and v of step {header.step}, layer {header.layer} came without their query"
            return RowRefusal(problem)
        self._asked = None
        if not self.problem:
            assert self._states is not None
            self._finish(self._states)
        return self.problem

    def _finish(self, states: StateStack) -> None:
        """The answer, of states over the past."""
        k, v = self.new
        states.own_token(self.query, k, v)
        self.out.copy_(states.merged())

    def payload(self) -> list[memoryview]:
        """Goes out once a layer is merged."""
        return [bytes_of(self.out)]

    def keep(self, layer: int) -> RowRefusal | None:
        """Writes the new tokens to the holds, which are known to be here; after the last layer they are theirs.
        Returns why not, or nothing.
        """
        for number, hold in self.held.items():
            if hold.attender is not self:
                self.problem = RowRefusal(f"slots: hold {number} is on a newer list", number)
                return self.problem
        write(self._cache, layer, self._slots, *self.new)
        self._layer_due = layer + 1
        if self._layer_due == self._cache.layers:
            self._tokens = [tokens + 1 for tokens in self._tokens]
            for hold, tokens in zip(self.held.values(), self._tokens, strict=True):
                hold.tokens = tokens
        return None

    def _begin(self) -> None:
        """A step: where its past is, and where its tokens go."""
        cache = self._cache
        self.problem, self._runs = None, StepRuns()
        slots = []
        for tokens, (number, hold) in zip(self._tokens, self.held.items(), strict=True):
            if tokens >= hold.room(cache):
                self.problem = RowRefusal(f"slots: hold {number} is full: {tokens} tokens", number)
                return
            slots.append(slots_of(hold.blocks, tokens, 1, cache))
        self._slots = torch.cat(slots)
        self._states = self._lay_out()

    def _lay_out(self) -> StateStack:
        """Room for the states of a step, and the runs over which they are."""
        parts = max(-(-tokens // self._segment_tokens) for tokens in self._tokens)
        for row in range(self.rows):
            self._runs.items += self._past(row)
        return StateStack(parts, self.rows, *self._shape, self._cache.device)

    def _past(self, row: int, *, part: int = 0, column: int | None = None) -> list[SegmentRun]:
        """The runs of a row."""
        cache, hold = self._cache, list(self.held.values())[row]
        return runs_of(
            row, hold.blocks, self._tokens[row], self._segment_tokens, cache.block_tokens, cache.device,
            part=part, column=column,
        )  # fmt: skip


class HeldTails(HeldCaches):
    """A list of rows whose first segments lie elsewhere. The answer (PARTIAL) has the states of their segments here,
    row by row; the asking worker has the other states, and those over the new tokens. New tokens join the holds.
    """

    answer = Op.PARTIAL

    def _lay_out(self) -> StateStack:
        parts = 0
        for row, tokens in enumerate(self._tokens):
            self._runs.items += self._past(row, part=parts, column=0)
            parts += -(-tokens // self._segment_tokens)
        self.out = torch.empty(parts, *self._shape, dtype=self._cache.dtype)
        return StateStack(parts, 1, *self._shape, self._cache.device)

    def _finish(self, states: StateStack) -> None:
        self.out.copy_(states.out[:, 0])

    def payload(self) -> list[memoryview]:
        assert self._states is not None
        return [bytes_of(self.out), bytes_of(self._states.lse)]


def problem_of(wanted: Sequence[tuple[int, int]], holds: Mapping[int, HeldSegments]) -> RowRefusal | None:
    """The reason why the (hold, tokens) pairs `wanted` cannot be attended to; None: they can."""
    for number, tokens in wanted:
        hold = holds[number]
        if not hold.complete:
            return RowRefusal(f"hold {number} has {hold.tokens} of {hold.expected} tokens", number)
        if not hold.expected <= tokens <= hold.tokens:
            return RowRefusal(f"hold {number} has {hold.tokens} tokens, and {tokens} were meant", number)
    if not wanted or len({number for number, _ in wanted}) < len(wanted):
        return RowRefusal(f"{len(wanted)} rows, where each has a hold of its own")
    return None
