"""What prefill and decode cost on a machine: six integers, and the least squares that find them. Imports no
torch.

``prefill(n, p) = base + per_token * (n - p) + per_token2 * (n**2 - p**2)`` for a prompt of n tokens of which p are
cached; ``decode(batch, context) = base + per_sequence * batch + per_context_token * context`` for one step,
whose
``context`` is the sum over the batch. Source: Mooncake (FAST'25), section 6.1: prefill time is predictable from
length and cached length; the forms are those of attention and of matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Integers, so that every process computes the same prediction: 1 ns is 1,000 ps and 1,000,000 fs."""

    prefill_base_ns: int
    prefill_per_token_ps: int
    prefill_per_token2_fs: int
    decode_base_ns: int
    decode_per_sequence_ns: int
    decode_per_context_token_ps: int

    def prefill_ns(self, prompt_tokens: int, cached_tokens: int) -> int:
        n, p = prompt_tokens, cached_tokens
        linear = self.prefill_per_token_ps * (n - p) // 1_000
        return self.prefill_base_ns + linear + self.prefill_per_token2_fs * (n * n - p * p) // 1_000_000

    def decode_ns(self, batch: int, context_tokens: int) -> int:
        context = self.decode_per_context_token_ps * context_tokens // 1_000
        return self.decode_base_ns + self.decode_per_sequence_ns * batch + context


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """One measured chunk: its end in the prompt, and its start."""

    prompt_tokens: int
    cached_tokens: int
    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """One measured step."""

    batch: int
    context_tokens: int
    """Sum over the batch."""
    elapsed_ns: int


def fit_non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients >= 0 with the least sum of squared relative errors. Tries every subset of columns: there
    are few.

    Relative, since a request of 100 tokens must be predicted as well as one of 8,000.
    """
    target = np.asarray(values, dtype=np.float64)
    assert (target > 0).all(), "a measured time is positive"
    matrix = np.asarray(rows, dtype=np.float64) / target[:, None]
    columns = matrix.shape[1]
    best, best_error = [0.0] * columns, float(len(values))
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            found, *_ = np.linalg.lstsq(matrix[:, chosen], np.ones(len(values)), rcond=None)
            if (found < 0).any():
                continue
            error = float(((matrix[:, chosen] @ found - 1.0) ** 2).sum())
            if error < best_error - 1e-12:
                best_error = error
                best = [0.0] * columns
                for column, coefficient in zip(chosen, found, strict=True):
                    best[column] = float(coefficient)
    return best


def fit_profile(prefills: Sequence[PrefillTime], decodes: Sequence[DecodeTime]) -> CostProfile:
    a = fit_non_negative(
        [(1, t.prompt_tokens - t.cached_tokens, t.prompt_tokens**2 - t.cached_tokens**2) for t in prefills],
        [t.elapsed_ns for t in prefills],
    )
    b = fit_non_negative([(1, t.batch, t.context_tokens) for t in decodes], [t.elapsed_ns for t in decodes])
    return CostProfile(
        prefill_base_ns=round(a[0]),
        prefill_per_token_ps=round(a[1] * 1_000),
        prefill_per_token2_fs=round(a[2] * 1_000_000),
        decode_base_ns=round(b[0]),
        decode_per_sequence_ns=round(b[1]),
        decode_per_context_token_ps=round(b[2] * 1_000),
    )


def by_prompt(profile: CostProfile, chunk_tokens: int, head_ns: int) -> CostProfile:
    """From costs of single chunks to those of a prompt, which pays a chunk's base once in ``chunk_tokens``
    tokens.

    n tokens are n / chunk_tokens chunks and half a one on average; the logits (``head_ns``) are computed
    once.
    """
    return replace(
        profile,
        prefill_base_ns=profile.prefill_base_ns // 2 + head_ns,
        prefill_per_token_ps=profile.prefill_per_token_ps + profile.prefill_base_ns * 1_000 // chunk_tokens,
    )
