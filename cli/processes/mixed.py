"""The tokens and the time of one iteration of a mixed worker."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from halfmoon.schemas.policy import Layout
from halfmoon.workers.options import WorkerOptions
from halfmoon.workers.token_budget import iteration_ns_of


class IterationBounds(NamedTuple):
    """Tokens of one iteration, and the time that it may take; 0: as long as it takes."""

    token_budget: int
    iteration_ns: int


def iteration_bounds(args: argparse.Namespace, options: WorkerOptions, layout: Layout) -> IterationBounds:
    """By the options: so many tokens, or (`auto`) as many as keep the objective."""
    if isinstance(options.token_budget, int):
        return IterationBounds(options.token_budget, 0)
    tokens = max(layout.block_tokens, options.chunk_tokens) + options.batch_max
    return IterationBounds(tokens, iteration_ns_of(args.iteration_ms * 1_000_000))
