"""A world has what is wished of it, whatever its seed draws; a search that finds nothing in such worlds is red."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import searching
from tests.chaos.searching import fails, shows
from tests.chaos.wishes import APART, RESTS_ON, Feature
from tests.chaos.world import World

HAS: dict[Feature, Any] = {
    "exact": lambda world: world.layout.numerics == "exact" and not world.null,
    "clock steps": lambda world: world.clock_steps,
    "outgrown caches": lambda world: world.layout.segment_tokens,
    "lending": lambda world: world.lending,
    "moves": lambda world: world.moving and world.policy.move_period_ns,
    "planner deaths": lambda world: world.planner_deaths.on,
    "attention": lambda world: world.attention,
    "splits": lambda world: world.splits,
    "roles": lambda world: world.elastic,
    "mixed": lambda world: world.mixed,
    "stages": lambda world: world.stages.on and world.policy.prefill_group > 1,
    "slow holders": lambda world: world.slow_holders.on,
}


@pytest.mark.parametrize("feature", HAS)
def test_a_world_has_what_is_wished_whatever_the_seed_draws(feature: Feature) -> None:
    wants = [feature, "lending"] if feature == "slow holders" else [feature]
    for seed in range(60):
        assert HAS[feature](World(seed, wants=wants)), seed  # type: ignore[arg-type]


def test_a_wish_brings_what_it_rests_on() -> None:
    for feature, rests_on in RESTS_ON.items():
        assert all(HAS[rests_on](World(seed, wants=[feature])) for seed in range(20)), feature


@pytest.mark.parametrize(("one", "other"), [pair for pair in APART if "null" not in pair])
def test_wishes_that_no_world_has_together_are_refused(one: Feature, other: Feature) -> None:
    with pytest.raises(ValueError, match=f"no world has {one} and {other}"):
        World(0, wants=[one, other])


def test_slow_holders_alone_are_no_wish() -> None:
    with pytest.raises(ValueError, match="wish for lending or attention too"):
        World(0, wants=["slow holders"])


def test_a_search_that_finds_nothing_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "SEEDS", 2)
    with pytest.raises(AssertionError, match=r"none of 2 worlds with \('stages',\) fails"):
        fails("nothing of the kind", "stages")
    with pytest.raises(AssertionError, match=r"\['no such count'\] in none of 2 worlds"):
        shows(["decisions", "no such count"], "stages")
