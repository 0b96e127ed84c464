"""Fits a cost profile to measured times by non-negative least squares. Imports no torch.

The forms are those of `CostProfile`: attention and matrix products are linear in them.
Source: Mooncake (FAST'25), section 6.1: prefill time is predictable from length and cached length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from msgspec.structs import replace

from halfmoon.schemas.cost_profile import CostProfile


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
    #: Sum over the batch.
    context_tokens: int
    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class PartTime:
    """A part of one measured step of one group of rows, or (0 rows) of one round trip."""

    rows: int
    #: Cached tokens of all rows; of a round trip, bytes both ways.
    size: int
    elapsed_ns: int


def fit_non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients >= 0 with the least sum of squared relative errors, one per column of `rows`.

    Relative, since a request of 100 tokens must be predicted as well as one of 8,000.
    """
    target = np.asarray(values, dtype=np.float64)
    assert (target > 0).all(), "a measured time is positive"
    matrix = np.asarray(rows, dtype=np.float64) / target[:, None]
    columns = matrix.shape[1]
    best, best_error = [0.0] * columns, float(len(values))
    # Every subset of the columns is tried: there are few.
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


def fit_attention(profile: CostProfile, times: Sequence[PartTime]) -> CostProfile:
    """`profile` with the cost of attention."""
    group, row, token = fit_non_negative([(1, t.rows, t.size) for t in times], [t.elapsed_ns for t in times])
    return replace(
        profile,
        attention_group_ns=round(group),
        attention_row_ns=round(row),
        attention_token_ps=round(token * 1_000),
    )


def fit_linear(profile: CostProfile, times: Sequence[PartTime], group_rows: int) -> CostProfile:
    """`profile` with the cost of all but attention, in groups of at most `group_rows`."""
    group, row = fit_non_negative([(1, t.rows) for t in times], [t.elapsed_ns for t in times])
    return replace(profile, linear_group_ns=round(group), linear_row_ns=round(row), group_rows=group_rows)


def fit_channel(profile: CostProfile, trips: Sequence[PartTime], query_row_bytes: int) -> CostProfile:
    """`profile` with the cost of a channel, and the bytes of a row of queries on it."""
    trip, byte = fit_non_negative([(1, t.size) for t in trips], [t.elapsed_ns for t in trips])
    return replace(
        profile,
        channel_trip_ns=round(trip),
        channel_byte_ps=round(byte * 1_000),
        query_row_bytes=query_row_bytes,
    )


def by_prompt(profile: CostProfile, chunk_tokens: int, head_ns: int) -> CostProfile:
    """The profile of whole prompts, from one fitted to single chunks of `chunk_tokens`.

    A prompt of n tokens pays a chunk's base n / chunk_tokens times and half once more on average, and the logits
    (`head_ns`) once.
    """
    return replace(
        profile,
        prefill_base_ns=profile.prefill_base_ns // 2 + head_ns,
        prefill_per_token_ps=profile.prefill_per_token_ps + profile.prefill_base_ns * 1_000 // chunk_tokens,
    )
