"""The cost of one worker, and the formulas that it stands for.

A worker measures and announces it, the conductor predicts with it and refits it, the simulator runs by it: all by
the formulas here. Integers only, so that every process computes the same prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.schemas.types import Bytes, Count, Ns, Part

#: More groups than this are not chosen: each costs a group's products, and channels of its own.
GROUPS_MAX = 8


class CostProfile(Part, frozen=True):
    """Fitted cost of one worker, in integers (1 ns = 1000 ps = 1,000,000 fs).

    Prefill of n tokens with p cached: `base + per_token·(n-p) + per_token2·(n²-p²)`; decode step:
    `base + per_sequence·batch + per_context_token·(context tokens in the batch)`.
    Source: Mooncake (FAST'25), equation 1, for the form of the first.

    Then the table of a step's parts, for attention that runs elsewhere; 0, as in older profiles: not measured."""

    prefill_base_ns: Ns = 0
    prefill_per_token_ps: Ns = 0
    prefill_per_token2_fs: Ns = 0
    decode_base_ns: Ns = 0
    decode_per_sequence_ns: Ns = 0
    decode_per_context_token_ps: Ns = 0
    #: All but attention of a step of one group, and of each of its rows; a group has at most `group_rows`.
    linear_group_ns: Ns = 0
    linear_row_ns: Ns = 0
    group_rows: Count = 0
    #: Attention of all layers: of a group, of each row, of each cached token.
    attention_group_ns: Ns = 0
    attention_row_ns: Ns = 0
    attention_token_ps: Ns = 0
    #: A channel on one host: a round trip without payload, and each byte of payload, whichever way it goes.
    channel_trip_ns: Ns = 0
    channel_byte_ps: Ns = 0
    #: Bytes of the queries of one row and layer; attention's result has the same size.
    query_row_bytes: Bytes = 0

    def prefill_ns(self, tokens: int, cached: int) -> int:
        """Time to compute a prompt of `tokens`, the first `cached` of which are there already."""
        return (
            self.prefill_base_ns
            + self.prefill_per_token_ps * (tokens - cached) // 1_000
            + self.prefill_per_token2_fs * (tokens * tokens - cached * cached) // 1_000_000
        )

    def step_ns(self, sequences: int, context_tokens: int) -> int:
        """Time of one decode step, which is the time between two tokens; `context_tokens` of the whole batch."""
        return (
            self.decode_base_ns
            + self.decode_per_sequence_ns * sequences
            + self.decode_per_context_token_ps * context_tokens // 1_000
        )

    def iteration_ns(self, chunks: Sequence[tuple[int, int]], sequences: int, context_tokens: int) -> int:
        """Time of one iteration of a mixed worker. Weights are read once, so of two bases the larger one counts.

        `chunks` of prompts are each (tokens before it, its tokens); each of `sequences` has one token more.
        """
        # What a mixed worker has learned of prompts is what their chunks add to decodes: its base of a prefill may be
        # far below the one of a step.
        took_ns = max(self.prefill_base_ns if chunks else 0, self.decode_base_ns if sequences else 0)
        for start, tokens in chunks:
            took_ns += self.chunk_ns(start, tokens)
        if sequences:
            took_ns += self.step_ns(sequences, context_tokens) - self.decode_base_ns
        return took_ns

    def chunk_ns(self, start: int, tokens: int) -> int:
        """Time that a chunk of a prompt with `start` tokens before it adds to an iteration."""
        return self.prefill_ns(start + tokens, start) - self.prefill_base_ns

    def beside_ns(self, iteration_ns: int, sequences: int, context_tokens: int) -> int:
        """Time for chunks in an iteration that may take `iteration_ns`, beside a batch that decodes."""
        return iteration_ns - self.iteration_ns([(0, 0)], sequences, context_tokens)

    def linear_ns(self, groups: int, rows: int) -> int:
        """Time of all but attention in one decode step of `rows` in `groups` groups."""
        return self.linear_group_ns * groups + self.linear_row_ns * rows

    def attention_ns(self, groups: int, rows: int, tokens: int) -> int:
        """Time of attention in one decode step, all layers; `tokens` are cached, of all rows together."""
        return (
            self.attention_group_ns * groups
            + self.attention_row_ns * rows
            + self.attention_token_ps * tokens // 1_000
        )

    def channel_ns(self, trips: int, payload_bytes: int) -> int:
        """Time of `trips` round trips over a channel, one after another, with `payload_bytes` up and down in all."""
        return self.channel_trip_ns * trips + self.channel_byte_ps * payload_bytes // 1_000


class StepElsewhere(NamedTuple):
    """A decode step whose KV is at attention workers, all of it, as it goes at the one that has the most to do for it.

    Rows take turns in groups: while attention to one is away, the next one's layer is computed. A group's turn takes
    t_m and t_a, and n are under way, so attention is never idle from `t_a = t_m / (n - 1)` on, the paper's rule, and
    the model never from `t_m = t_a / (n - 1)` on. Messages count too; and against more groups stands that each costs
    its products, full or not.

    Source: Lamina (arXiv 2405.01814), section 4.3.
    """

    #: Costs of the worker that computes the model, and of the one that attends.
    cost: CostProfile
    place: CostProfile
    layers: int
    rows: int
    #: Of them, those whose KV is at the place, and their cached tokens there.
    place_rows: int
    place_tokens: int
    #: Attention that the place computes for others in the meantime.
    others_ns: Ns
    #: Up and down in all layers, between the two.
    payload_bytes: int

    def ns(self, groups: int) -> int:
        """Time of the step in `groups` groups."""
        linear = self.cost.linear_ns(max(groups, self._least), self.rows)
        attention = self.place.attention_ns(groups, self.place_rows, self.place_tokens)
        channel = self.cost.channel_ns(self.layers, self.payload_bytes // groups)
        return max(linear, attention + self.others_ns, (linear + attention) // groups + channel)

    @property
    def groups(self) -> int:
        """The fewest groups that make the step as short as it can be."""
        most = max(self._least, min(self.rows, GROUPS_MAX))
        return min(range(self._least, most + 1), key=lambda groups: (self.ns(groups), groups))

    @property
    def _least(self) -> int:
        return max(1, -(-self.rows // max(1, self.cost.group_rows)))
