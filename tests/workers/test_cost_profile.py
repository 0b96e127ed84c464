"""Cost coefficients: the fit finds what made the times, and a measured profile predicts the engine it
measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers import profiler
from halfmoon.workers.cost_fit import (
    DecodeTime,
    PrefillTime,
    by_prompt,
    fit_non_negative,
    fit_profile,
)
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.files import LoadedModel
from halfmoon.workers.model.null_engine import NullEngine
from halfmoon.workers.model.sampling_params import SampleRequest, SamplingParams
from halfmoon.workers.profiler import measured_profile, profile_key

TRUE = CostProfile(
    prefill_base_ns=5_000_000, prefill_per_token_ps=400_000_000, prefill_per_token2_fs=150_000_000,
    decode_base_ns=30_000_000, decode_per_sequence_ns=340_000, decode_per_context_token_ps=6_200_000,
)  # fmt: skip


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

    def __init__(self, clock: _Timed, model: LoadedModel) -> None:
        super().__init__(model, num_blocks=16, block_tokens=128, exact=True)
        self.clock, self.calls = clock, 0

    def prefill_chunk(self, token_ids: Sequence[int], start: int, *args: Any, **fields: Any) -> None:
        self.calls += 1
        self.clock.now_ns += TRUE.prefill_ns(start + len(token_ids), start)

    def decode(self, token_ids: Sequence[int], positions: Sequence[int], *args: Any) -> torch.Tensor:
        self.calls += 1
        self.clock.now_ns += TRUE.step_ns(len(positions), sum(positions) + len(positions))
        return torch.zeros(len(positions), 1)


@pytest.fixture
def small_model(model_bf16: LoadedModel) -> LoadedModel:
    return replace(model_bf16, config=replace(model_bf16.config, layers=1))


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


def test_a_small_cache_is_measured_with_prompts_that_outgrow_it(
    small_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of larger caches read the same profile: the square of the prompt must show in it."""
    asked: list[int] = []
    whole = Engine.prefill_chunk

    def noted(self: Engine, token_ids: Sequence[int], start: int, *args: Any, **named: Any) -> Any:
        asked.append(start + len(token_ids))
        return whole(self, token_ids, start, *args, **named)

    monkeypatch.setattr(Engine, "prefill_chunk", noted)
    engine = Engine(small_model, num_blocks=2, block_tokens=128, exact=True)
    profiler.measure(engine, budget_s=1.0)
    assert max(asked) > 4 * 2 * 128
    assert engine.allocator.free_blocks == 2


def test_a_real_engine_is_measured_once(
    small_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(small_model, num_blocks=16, block_tokens=128, exact=True)
    profile = measured_profile(engine, budget_s=0.1)
    assert engine.allocator.free_blocks == 16
    assert all(type(value) is int and value >= 0 for value in asdict(profile).values())
    assert profile.prefill_ns(1024, 0) > profile.prefill_ns(128, 0) > 0
    place = tmp_path / "halfmoon" / "profiles" / f"{profile_key(engine)}.json"
    kept = place.read_text()
    with monkeypatch.context() as unmeasurable:
        unmeasurable.setattr(Engine, "prefill_chunk", None)
        assert measured_profile(engine) == profile
    place.write_text("{}")
    assert measured_profile(engine, budget_s=0.1) is not None
    assert set(json.loads(place.read_text())) == set(json.loads(kept))


def null_engine(model: LoadedModel) -> NullEngine:
    return NullEngine(model.config, num_blocks=4, block_tokens=64)


#: For KV that is elsewhere, of which a null engine has none.
OF_ELSEWHERE = {"decode_rows_multiple", "pooled_segments"}


def test_the_null_engine_has_every_public_name_of_the_engine(model_f32: LoadedModel) -> None:
    real = Engine(model_f32, num_blocks=1, block_tokens=16, exact=True)
    names = {name for name in dir(real) if not name.startswith("_")} - {"attention", "device"} - OF_ELSEWHERE
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
