"""What experiments are made of; `.ci/run` runs some of them, `make experiments` all."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest

from benchmarks.papers.experiments.ablations import agents, scaled
from benchmarks.papers.experiments.attention import LENGTHS, lengths
from benchmarks.papers.experiments.lending import CACHE_TOKENS, CLIENTS, FILL, requests
from benchmarks.papers.experiments.runner import Context
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


def test_laminas_lengths_have_the_published_means_and_kimis_conversation_is_the_trace(
    trace_file: Path, tmp_path: Path
) -> None:
    context = Context(trace_file, tmp_path, synthetic=trace_file)
    for name, (prompt, answer, *_) in LENGTHS.items():
        drawn = lengths(context, name, 6_000)
        assert statistics.mean(one.prompt_tokens for one in drawn) == pytest.approx(prompt, rel=0.06)
        assert statistics.mean(one.output_tokens for one in drawn) == pytest.approx(answer, rel=0.06)
        assert drawn == lengths(context, name, 6_000)
    whole = lengths(context, "Kimi-Conv", 20_000)
    assert statistics.mean(one.prompt_tokens for one in whole) == pytest.approx(12_035.1, abs=0.05)
    assert statistics.mean(one.output_tokens for one in whole) == pytest.approx(342.6, abs=0.05)


def test_infinite_llms_lengths_keep_their_mean_and_fit_one_cache() -> None:
    for deviation in (0.0, 0.25, 0.5):
        drawn = requests(4_000, deviation)
        tokens = [one.prompt_tokens + one.output_tokens for one in drawn]
        assert statistics.mean(tokens) == pytest.approx(FILL * CACHE_TOKENS / CLIENTS, rel=0.02)
        assert max(tokens) <= CACHE_TOKENS * 95 // 100
    assert len({one.prompt_tokens for one in requests(100, 0.0)}) == 1
