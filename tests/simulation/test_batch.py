"""Runs of decode steps, against the same steps made one by one."""

from __future__ import annotations

import random

import pytest

from halfmoon.conductor.simulation.batch import Steps, tbt_ns
from halfmoon.schemas.cost_profile import CostProfile

COST = CostProfile(
    decode_base_ns=10_000_000, decode_per_sequence_ns=100_000, decode_per_context_token_ps=25_000
)


def one_by_one(joins: list[tuple[int, str, int, int]]) -> dict[str, tuple[float, list[float]]]:
    """(time, name, context, steps): when each ended, and the intervals that it saw."""
    now, batch, found = 0.0, {}, {}
    waiting = sorted(joins)
    while waiting or batch:
        while waiting and waiting[0][0] <= now:
            _, name, context, steps = waiting.pop(0)
            batch[name] = [context, steps, []]
        if not batch:
            now = float(waiting[0][0])
            continue
        length = 10e6 + 1e5 * len(batch) + 25.0 * sum(one[0] for one in batch.values())
        now += length
        for name, one in list(batch.items()):
            one[0] += 1
            one[1] -= 1
            one[2].append(length)
            if one[1] == 0:
                found[name] = (now, one[2])
                del batch[name]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_runs_end_when_single_steps_would(seed: int) -> None:
    draw = random.Random(seed)
    joins = [
        (draw.randrange(3 * 10**9), f"s{place}", draw.randrange(100, 30_000), draw.randrange(1, 300))
        for place in range(40)
    ]
    expected = one_by_one(joins)
    steps, waiting, batch, found = Steps(COST), sorted(joins), {}, {}
    now = 0
    while waiting or batch:
        while waiting and waiting[0][0] <= now:
            _, name, context, count = waiting.pop(0)
            batch[name] = (context, steps.made)
            steps.join(name, context, count)
        if not batch:
            now = waiting[0][0]
            continue
        steps.start_run(now, 1.0)
        count = steps.steps_to_end()
        if waiting:
            count = min(count, steps.steps_until(waiting[0][0]) if waiting[0][0] > now else 1)
        now += steps.run_ns(count)
        for name in steps.advance(count):
            context, joined = batch.pop(name)
            found[name] = (now, steps.intervals(joined))
            steps.leave(name, context + steps.made - joined)
    assert found.keys() == expected.keys()
    for name, (ended, lengths) in expected.items():
        assert found[name][0] == pytest.approx(ended, rel=1e-6)
        assert sum(times for _, times in found[name][1]) == len(lengths)
        assert sum(length * times for length, times in found[name][1]) == pytest.approx(
            sum(lengths), rel=1e-6
        )


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    assert tbt_ns([(10.0, 90), (100.0, 5), (50.0, 5)]) == 75
    assert tbt_ns([(10.0, 3), (40.0, 1)]) == 40
    assert tbt_ns([]) == 0
