"""What experiments are made of; `.ci/run` runs some of them, `make experiments` all."""

from __future__ import annotations

import msgspec

from halfmoon.conductor.simulation.experiments.ablations import agents, scaled
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.schemas.types import KEY_BYTES


def test_only_the_named_part_of_a_profile_is_scaled() -> None:
    cost, slower = LLAMA3_A800.cost, scaled(LLAMA3_A800, "decode", 300).cost
    changed = [name for name in cost.__struct_fields__ if getattr(slower, name) != getattr(cost, name)]
    assert changed == ["decode_base_ns", "decode_per_sequence_ns", "decode_per_context_token_ps"]
    assert all(getattr(slower, name) == 3 * getattr(cost, name) for name in changed)
    assert msgspec.structs.replace(scaled(LLAMA3_A800, "decode", 300), cost=cost) == LLAMA3_A800


def test_drawn_sessions_are_the_same_each_time_in_order_and_begin_alike() -> None:
    drawn = agents(1, 500)
    assert drawn == agents(1, 500) != agents(2, 500)
    assert [one.at_ns for one in drawn] == sorted(one.at_ns for one in drawn)
    assert all(len(one.block_keys) == one.prompt_tokens // 512 * KEY_BYTES for one in drawn)
    assert len({one.block_keys[: 4 * KEY_BYTES] for one in drawn}) <= 40
