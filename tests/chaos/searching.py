"""Worlds in which something is to be seen, among the first that are made for it. No seed is named: whatever these draw
tomorrow, one of them shows it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

from tests.chaos.wishes import Feature
from tests.chaos.world import World

SEEDS = 200


def fails(match: str, *wants: Feature) -> None:
    """One of the worlds must, with words that match; how the others fail does not count."""
    others: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            World(seed, wants=wants).run()
        except AssertionError as problem:
            if re.search(match, str(problem)):
                return
            others[str(problem)[:60]] += 1
        except Exception as problem:
            others[f"{type(problem).__name__}: {problem}"[:60]] += 1
    raise AssertionError(f"none of {SEEDS} worlds with {wants} fails by {match!r}; others: {dict(others)}")


def shows(seen: Collection[str], *wants: Feature) -> None:
    """All of it is counted in the worlds up to one of these, and all of them keep their promises."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = World(seed, wants=wants)
        world.run()
        counts += world.net.counts
        if all(counts[what] for what in seen):
            return
    raise AssertionError(
        f"{[what for what in seen if not counts[what]]} in none of {SEEDS} worlds with {wants}"
    )
