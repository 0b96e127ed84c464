"""The workloads that policies are compared on can be simulated, are what their seed says, and share what they say."""

from __future__ import annotations

import pytest

from benchmarks.workloads import BLOCK, KINDS
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.types import KEY_BYTES

#: Tokens found in a cache of any size, in percent, at least: that of system prompts and passages, or of sessions.
REUSE_PERCENT = {
    "recorded agents": 90,
    "conversation": 30,
    "chat": 60,
    "retrieval": 25,
    "documents": 40,
    "templates": 70,
    "agents": 80,
    "bursts": 60,
}


def reused(arrivals: list[Arrival]) -> float:
    seen: set[bytes] = set()
    hits = 0
    for one in arrivals:
        keys = [one.block_keys[at : at + KEY_BYTES] for at in range(0, len(one.block_keys), KEY_BYTES)]
        hits += next((place for place, key in enumerate(keys) if key not in seen), len(keys)) * BLOCK
        seen.update(keys)
    return 100 * hits / sum(one.prompt_tokens for one in arrivals)


@pytest.mark.parametrize("kind", KINDS)
def test_a_workload_is_in_order_and_shares_its_prefixes(kind: str) -> None:
    arrivals = KINDS[kind](1)
    assert arrivals[0].at_ns == 0
    assert [one.at_ns for one in arrivals] == sorted(one.at_ns for one in arrivals)
    for one in arrivals:
        # Whole blocks only, and all of them: the names say where two prompts part.
        assert len(one.block_keys) == one.prompt_tokens // BLOCK * KEY_BYTES
        assert 1 <= one.output_tokens <= one.max_tokens
        assert one.prompt_tokens <= 130_000
    assert REUSE_PERCENT[kind] < reused(arrivals) < 99


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_names_one_workload(kind: str) -> None:
    first = KINDS[kind](2)
    assert KINDS[kind](2) == first
    assert KINDS[kind](3) != first
