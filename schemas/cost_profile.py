"""The cost of one worker, and the two formulas that it stands for.

A worker measures and announces it, the conductor predicts with it and refits it, the simulator runs by it: all by
the formulas here. Integers only, so that every process computes the same prediction.
"""

from __future__ import annotations

from halfmoon.schemas.types import Ns, Part


class CostProfile(Part, frozen=True):
    """Fitted cost of one worker, in integers (1 ns = 1000 ps = 1,000,000 fs).

    Prefill of n tokens with p cached: `base + per_token·(n-p) + per_token2·(n²-p²)`; decode step:
    `base + per_sequence·batch + per_context_token·(context tokens in the batch)`.
    Source: Mooncake (FAST'25), equation 1, for the form of the first."""

    prefill_base_ns: Ns = 0
    prefill_per_token_ps: Ns = 0
    prefill_per_token2_fs: Ns = 0
    decode_base_ns: Ns = 0
    decode_per_sequence_ns: Ns = 0
    decode_per_context_token_ps: Ns = 0

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
