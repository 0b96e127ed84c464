"""Groups of rows that are computed by turns, so that one computes while another waits for an answer."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")


def cut(rows: int, rows_max: int, groups: int) -> list[slice]:
    """At least `groups` groups (as far as there are rows), of at most `rows_max` rows each; as few and as even as can
    be.
    """
    count = max(-(-rows // rows_max), min(groups, rows))
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


def rounds(steps: Sequence[Generator[None, None, T]]) -> Generator[None, None, list[T]]:
    """Each goes on to its next `yield`, one after the other, until all have returned; their results. Yields between two
    rounds.

    Source: Lamina (arXiv 2405.01814), section 4.3, for one device that computes models.
    """
    results: dict[int, T] = {}
    while True:
        for number, step in enumerate(steps):
            if number not in results:
                try:
                    next(step)
                except StopIteration as end:
                    results[number] = end.value
        if len(results) == len(steps):
            return [results[number] for number in range(len(steps))]
        yield


def in_turn(steps: Sequence[Generator[None, None, T]]) -> list[T]:
    """All `rounds`, one after the other."""
    turns = rounds(steps)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: list[T] = end.value
            return found
