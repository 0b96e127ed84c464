"""Sums over decode steps, for throughput while requests wait for room."""

from __future__ import annotations

from benchmarks.papers.report import PoolFigures
from halfmoon.schemas.numbers import SECOND_NS


class Saturation:
    """Sequences, tokens and time of the steps that it is told of, from the first to the last."""

    def __init__(self) -> None:
        self.tokens = self.sequence_ns = 0.0
        self.began_ns = self.ended_ns = -1.0

    def step(self, sequences: int, began_ns: float, ended_ns: float) -> None:
        if self.began_ns < 0:
            self.began_ns = began_ns
        self.tokens += sequences
        self.sequence_ns += sequences * (ended_ns - began_ns)
        self.ended_ns = max(self.ended_ns, ended_ns)

    @property
    def span_ns(self) -> float:
        return self.ended_ns - self.began_ns

    def figures(self, kv_tokens: int, dollars_hour: float = 0.0) -> PoolFigures:
        tokens_s = self.tokens / max(self.span_ns, 1.0) * SECOND_NS
        return PoolFigures(
            batch=round(self.sequence_ns / max(self.span_ns, 1.0), 3),
            tokens_s=round(tokens_s, 3),
            step_ms=round(self.sequence_ns / max(self.tokens, 1.0) / 1e6, 3),
            dollars_hour=round(dollars_hour, 2),
            tokens_per_dollar=round(tokens_s * 3_600 / dollars_hour, 1) if dollars_hour else 0.0,
            kv_tokens=kv_tokens,
        )


def figures_of(full: Saturation, whole: Saturation, kv_tokens: int, dollars_hour: float = 0.0) -> PoolFigures:
    """While requests waited for room; of the whole run where none ever did."""
    return (full if full.span_ns > 0 else whole).figures(kv_tokens, dollars_hour)
