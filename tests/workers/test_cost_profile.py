"""Cost coefficients: the fit finds what made the times, and a measured profile predicts the engine it
measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict
from msgspec.structs import replace as replace_struct

from halfmoon.cli import profile as profile_command
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers import channel_cost, part_costs, profiler
from halfmoon.workers import kept_profile as keeping
from halfmoon.workers.cost_fit import (
    DecodeTime,
    PartTime,
    PrefillTime,
    by_prompt,
    fit_attention,
    fit_channel,
    fit_linear,
    fit_non_negative,
    fit_profile,
)
from halfmoon.workers.model.attention.engine import AttentionEngine
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.null_engine import NullEngine
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.model.sampling_params import SampleRequest, SamplingParams
from halfmoon.workers.profiler import attention_profile, measured_profile, profile_key

TRUE = CostProfile(
    prefill_base_ns=5_000_000, prefill_per_token_ps=400_000_000, prefill_per_token2_fs=150_000_000,
    decode_base_ns=30_000_000, decode_per_sequence_ns=340_000, decode_per_context_token_ps=6_200_000,
)  # fmt: skip


#: Of a step.
PARTS = {
    "linear_group_ns": 30_000_000, "linear_row_ns": 200_000, "group_rows": 16, "attention_group_ns": 900_000,
    "attention_row_ns": 150_000, "attention_token_ps": 4_000_000,
}  # fmt: skip


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    prefills = [
        PrefillTime(n, p, TRUE.prefill_ns(n, p)) for n, p in ((64, 0), (256, 0), (512, 256), (4096, 3840))
    ]
    decodes = [DecodeTime(b, c, TRUE.step_ns(b, c)) for b, c in ((1, 16), (1, 4000), (8, 128), (8, 8000))]
    found = fit_profile(prefills, decodes)
    for name in TRUE.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name


def test_no_coefficient_is_negative() -> None:
    assert fit_non_negative([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.5])[1] == 0.0
    assert fit_non_negative([(1, 1), (1, 2), (1, 3)], [1.0, 2.5, 4.0])[0] == 0.0


def test_a_prompt_pays_the_base_of_every_chunk() -> None:
    prompt = by_prompt(TRUE, 256, 4_000_000)
    chunks = sum(TRUE.prefill_ns(at + 256, at) for at in range(0, 4096, 256)) + 4_000_000
    assert prompt.prefill_ns(4096, 0) == pytest.approx(chunks, rel=0.01)


def test_the_fit_of_a_steps_parts_finds_what_made_their_times() -> None:
    true = CostProfile(**PARTS, channel_trip_ns=11_000, channel_byte_ps=250, query_row_bytes=2_304)
    shapes = ((1, 1), (1, 2_000), (4, 4_000), (8, 8), (8, 16_000))
    found = fit_attention(
        CostProfile(), [PartTime(rows, size, true.attention_ns(1, rows, size)) for rows, size in shapes]
    )
    found = fit_linear(found, [PartTime(rows, 0, true.linear_ns(1, rows)) for rows in (1, 8, 16)], 16)
    trips = [PartTime(0, size, true.channel_ns(1, size)) for size in (0, 10_000, 200_000)]
    found = fit_channel(found, trips, 2_304)
    for name in true.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3), name
    assert true.linear_ns(2, 20) == 2 * true.linear_group_ns + 20 * true.linear_row_ns
    assert true.attention_ns(2, 20, 0) == 2 * true.attention_group_ns + 20 * true.attention_row_ns


class _Timed:
    """Stands in for `time` in the profiler: a clock that only the engine's work moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9


class _TimedEngine(Engine):
    """Computes nothing; each call takes what `TRUE` says of its shape."""

    def __init__(self, clock: _Timed, model: LoadedModel, *, num_blocks: int = 16) -> None:
        super().__init__(model, num_blocks=num_blocks, block_tokens=128, exact=True)
        self.clock = clock
        #: The last token of each chunk.
        self.asked: list[int] = []

    def prefill_chunk(self, token_ids: Sequence[int], start: int, *args: Any, **fields: Any) -> Any:
        self.asked.append(start + len(token_ids))
        self.clock.now_ns += TRUE.prefill_ns(start + len(token_ids), start)

    def decode(self, token_ids: Sequence[int], positions: Sequence[int], *args: Any) -> torch.Tensor:
        self.clock.now_ns += TRUE.step_ns(len(positions), sum(positions) + len(positions))
        return torch.zeros(len(positions), 1)


class _ComputingEngine(_TimedEngine):
    """Computes its chunks too, in no time of the clock's."""

    def prefill_chunk(self, token_ids: Sequence[int], start: int, *args: Any, **fields: Any) -> Any:
        super().prefill_chunk(token_ids, start)
        return Engine.prefill_chunk(self, token_ids, start, *args, **fields)


@pytest.fixture
def small_model(model_bf16: LoadedModel) -> LoadedModel:
    return replace(model_bf16, config=replace(model_bf16.config, layers=1))


@pytest.mark.realtime
def test_a_measured_profile_is_that_of_the_engine(
    small_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Timed()
    monkeypatch.setattr(profiler, "time", clock)
    engine = _TimedEngine(clock, small_model)
    measured = profiler.measure(engine, budget_s=5.0)
    expected = by_prompt(TRUE, engine.block_tokens, 0)
    assert engine.allocator.free_blocks == 16
    for tokens, cached in ((128, 0), (1024, 0), (1024, 512)):
        assert measured.prefill_ns(tokens, cached) == pytest.approx(
            expected.prefill_ns(tokens, cached), rel=0.02
        )
    for batch, context in ((1, 100), (8, 4000)):
        assert measured.step_ns(batch, context) == pytest.approx(TRUE.step_ns(batch, context), rel=0.02)


@pytest.mark.realtime
def test_a_small_cache_is_measured_with_prompts_that_outgrow_it(
    small_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of larger caches read the same profile: the square of the prompt must show in it."""
    clock = _Timed()
    monkeypatch.setattr(profiler, "time", clock)
    engine = _ComputingEngine(clock, small_model, num_blocks=2)
    measured = profiler.measure(engine, budget_s=1.0)
    assert max(engine.asked) == 2048, "beyond the cache of two blocks: as far as half a second goes"
    expected = by_prompt(TRUE, engine.block_tokens, 0)
    assert measured.prefill_ns(4096, 0) == pytest.approx(expected.prefill_ns(4096, 0), rel=0.02)
    assert engine.allocator.free_blocks == 2


@pytest.mark.slow
@pytest.mark.realtime
def test_a_real_engine_is_measured_once(
    small_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Measured this briefly, times agree on an idle machine only.
    monkeypatch.setattr(keeping, "AGREE_PERMILLE", 10**9)
    engine = Engine(small_model, num_blocks=16, block_tokens=128, exact=True)
    profile = measured_profile(engine, budget_s=0.1)
    assert engine.allocator.free_blocks == 16
    assert all(type(value) is int and value >= 0 for value in asdict(profile).values())
    assert profile.prefill_ns(1024, 0) > 0
    assert profile.attention_ns(1, 8, 8_000) > 0
    assert profile.channel_ns(1, 100_000) > 0
    assert profile.group_rows == engine.group_rows
    place = tmp_path / "halfmoon" / "profiles" / f"{profile_key(engine)}.json"
    kept = place.read_text()
    with monkeypatch.context() as unmeasurable:
        unmeasurable.setattr(Engine, "prefill_chunk", None)
        assert measured_profile(engine) == profile
    place.write_text("{}")
    assert measured_profile(engine, budget_s=0.1) is not None
    assert set(json.loads(place.read_text())) == set(json.loads(kept))


def test_an_attention_worker_measures_its_attention_alone_and_once(
    small_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Measured this briefly, times agree on an idle machine only.
    monkeypatch.setattr(keeping, "AGREE_PERMILLE", 10**9)
    engine = AttentionEngine(
        small_model.config,
        kv_heads=1,
        num_blocks=8,
        block_tokens=128,
        segment_tokens=256,
        dtype=torch.bfloat16,
    )
    found = attention_profile(engine, budget_s=0.1)
    assert found.attention_ns(1, 8, 8_000) > 0
    others = {name for name, value in asdict(found).items() if value} - {
        "attention_group_ns", "attention_row_ns", "attention_token_ps",
    }  # fmt: skip
    assert not others
    with monkeypatch.context() as unmeasurable:
        unmeasurable.setattr(profiler, "attention_times", None)
        assert attention_profile(engine) == found


def test_where_attention_runs_nowhere_else_its_parts_are_not_measured(small_model: LoadedModel) -> None:
    engine = Engine(small_model, num_blocks=8, block_tokens=128, exact=False)
    found = profiler.measure(engine, budget_s=0.1)
    assert (found.linear_group_ns, found.attention_token_ps, found.channel_trip_ns) == (0, 0, 0)
    assert "not measured" in profile_command.of_parts(found)[0]
    shown = profile_command.of_parts(CostProfile(attention_token_ps=4, channel_trip_ns=11_000, group_rows=16))
    assert "11.0 µs a round trip" in shown[-1]


def test_a_channel_that_cannot_be_had_costs_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_cost.sys, "executable", "/nowhere/python")
    assert channel_cost.channel_times([0, 1024], 0.1) == []


def test_the_parts_of_a_step_explain_the_whole(
    small_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step takes the time of its parts, and attention alone the time of attention."""
    true, clock = replace_struct(TRUE, **PARTS), _Timed()

    def step(rows: int, cached: int) -> None:
        clock.now_ns += true.linear_ns(1, rows) + true.attention_ns(1, rows, cached)

    def attention_alone(engine: Engine, blocks: Sequence[int], rows: int, tokens: int) -> Callable[[], None]:
        def alone() -> None:
            clock.now_ns += true.attention_ns(1, rows, rows * tokens)

        return alone

    monkeypatch.setattr(profiler, "time", clock)
    monkeypatch.setattr(part_costs, "time", clock)
    monkeypatch.setattr(part_costs, "_attention_step", attention_alone)
    monkeypatch.setattr(part_costs, "channel_times", lambda sizes, budget_s: [])
    engine = _TimedEngine(clock, small_model)
    monkeypatch.setattr(engine, "decode", lambda tokens, positions, _: step(len(tokens), sum(positions)))
    found = profiler.measure(engine, budget_s=4.0)
    for rows, tokens in ((1, 16), (1, 500), (8, 16), (8, 500)):
        begin_ns = clock.now_ns
        step(rows, rows * tokens)
        told_ns = found.linear_ns(1, rows) + found.attention_ns(1, rows, rows * tokens)
        assert told_ns == pytest.approx(clock.now_ns - begin_ns, rel=0.01)
    for name in PARTS:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.01), name


def null_engine(model: LoadedModel) -> NullEngine:
    return NullEngine(model.config, num_blocks=4, block_tokens=64)


#: For KV that is elsewhere, of which a null engine has none.
OF_ELSEWHERE = {"groups_of", "pooled_segments"}
#: For groups of rows, which a null engine does not multiply.
OF_GROUPS = {"group_rows", "product_rows", "rows_apart"}
#: For layers that several workers share, of which a null engine has none.
OF_STAGES = {"activation", "prefill_stage"}
#: For rows that a similar prompt's KV spares, of which a null engine computes none.
OF_REFERENCES = {"transformer"}


def test_the_null_engine_has_every_public_name_of_the_engine(model_f32: LoadedModel) -> None:
    real = Engine(model_f32, num_blocks=1, block_tokens=16, exact=True)
    names = {name for name in dir(real) if not name.startswith("_")} - {"attention", "device"}
    names -= OF_ELSEWHERE | OF_GROUPS | OF_STAGES | OF_REFERENCES
    assert names <= set(dir(null_engine(model_f32)))
    cache = {name for name in dir(real.cache) if not name.startswith("_")} - {"k", "v", "device", "dtype"}
    assert cache <= set(dir(null_engine(model_f32).cache))


def test_the_null_engine_goes_on_with_the_same_text_wherever_it_resumes(model_f32: LoadedModel) -> None:
    engine = null_engine(model_f32)
    assert engine.config == replace(model_f32.config, layers=0)
    assert engine.cache.block_bytes == 0
    request = SampleRequest(params=SamplingParams(temperature=0.0), index=0)
    row = engine.prefill_chunk([1] * 10, 0, [0], want_logits=True)
    assert row is not None
    beside = PromptRows([1] * 10, 0, [0], want_logits=True)
    assert engine.mixed([beside], [2], [4], [[1]]) == (engine.decode([2], [4], [[1]]), [row])
    tokens = [engine.sample_rows(row, [request])[0].token_id]
    for position in range(10, 20):
        tokens += [
            s.token_id for s in engine.sample_rows(engine.decode(tokens[-1:], [position], [[0]]), [request])
        ]
    resumed = engine.prefill_chunk([1] * 15, 0, [0], want_logits=True)
    assert engine.argmax(resumed if resumed is not None else 0) == [tokens[5]]
    assert len(set(tokens)) == 11
    assert engine.logits_digest(row) != engine.logits_digest(row + 1)
    banned = SampleRequest(params=SamplingParams(logprobs=1), index=0, banned_ids=[tokens[0]])
    assert engine.sample_rows(row, [banned])[0].token_id == tokens[0] + 1
