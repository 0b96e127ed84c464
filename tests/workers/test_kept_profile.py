"""A profile that a busy moment made is not believed for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import PrefillFinished, WorkerHeartbeat
from halfmoon.workers.kept_profile import (
    COMPARED,
    MeasuredProfile,
    ProfileCheck,
    apart_permille,
    doubt,
    kept_profile,
    measured_often,
)

TRUE = CostProfile(
    prefill_base_ns=5_000_000, prefill_per_token_ps=400_000_000, prefill_per_token2_fs=150_000_000,
    decode_base_ns=30_000_000, decode_per_sequence_ns=340_000, decode_per_context_token_ps=6_200_000,
    linear_group_ns=20_000_000, linear_row_ns=200_000, group_rows=16, attention_group_ns=900_000,
    attention_row_ns=150_000, attention_token_ps=4_000_000, channel_trip_ns=11_000, channel_byte_ps=250,
    query_row_bytes=2_304,
)  # fmt: skip


def times(factor: float, *, but: str = "group_rows query_row_bytes") -> CostProfile:
    """The true profile with every time `factor` as long, without those that begin as a word of `but` does."""
    left = tuple(but.split())
    return replace(
        TRUE,
        **{
            name: int(value * factor)
            for name, value in ((name, getattr(TRUE, name)) for name in TRUE.__struct_fields__)
            if not name.startswith(left)
        },
    )


class Measurements:
    """Gives one after another; each is held against `now`."""

    def __init__(self, *profiles: CostProfile, now: CostProfile = TRUE) -> None:
        self.left, self.now, self.count = list(profiles), now, 0

    def measure(self) -> CostProfile:
        self.count += 1
        return self.left.pop(0)

    def apart(self, profile: CostProfile) -> int:
        return apart_permille([(profile.prefill_ns(256, 0), self.now.prefill_ns(256, 0))])

    def often(self) -> MeasuredProfile:
        return measured_often(self.measure, self.apart)

    def kept(self) -> CostProfile:
        return kept_profile("k", self.measure, self.apart)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "halfmoon" / "profiles" / "k.json"


def test_one_measurement_is_enough_where_what_is_timed_after_it_agrees() -> None:
    found = Measurements(times(1.1)).often()
    assert (found.profile, found.measurements, found.agreed) == (times(1.1), 1, True)
    assert 1_090 < found.spread_permille < 1_110


def test_one_busy_moment_is_outvoted_and_the_faster_of_each_part_counts() -> None:
    slow_prefill = times(1.1, but="decode linear attention channel group query")
    slow_steps = times(1.2, but="prefill group query")
    found = Measurements(times(6), slow_prefill, slow_steps).often()
    assert (found.profile, found.measurements, found.agreed) == (TRUE, 3, True)
    assert 1_150 < found.spread_permille <= 1_250
    found = Measurements(TRUE, times(1.1), now=times(5)).often()
    assert (found.profile, found.measurements, found.agreed) == (TRUE, 2, True)


def test_what_never_agrees_serves_one_start_and_is_measured_anew(cache: Path) -> None:
    assert Measurements(times(9), times(6), times(3)).kept() == times(3)
    assert json.loads(cache.read_text())["agreed"] is False
    assert Measurements(times(1.05)).kept() == times(1.05)
    assert Measurements().kept() == times(1.05), "kept"


def test_a_file_of_before_or_a_broken_one_is_measured_anew(cache: Path) -> None:
    for text in ("{}", "[", json.dumps({"prefill_base_ns": 1}), json.dumps({"profile": {}, "agreed": True})):
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(text)
        found = Measurements(TRUE)
        assert found.kept() == TRUE
        assert found.count == 1


def prefilled(compute_ns: float, tokens: int = 1_000, cached: int = 200) -> PrefillFinished:
    return PrefillFinished(
        order_id="1-1", request_id="r1", worker_id="p0", queue_ns=0, transfer_ns=0, compute_ns=int(compute_ns),
        cached_local_tokens=cached, prompt_tokens=tokens,
    )  # fmt: skip


def beat(step_ns: float, steps: int = 9) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker_id="p0", incarnation="i", queued=0, running=4, kv_blocks_used=9, steps=steps, step_ns=int(step_ns),
        step_sequences=4, step_context_tokens=4_000,
    )  # fmt: skip


@pytest.mark.parametrize("what", ["prefill", "step"])
def test_a_worker_that_is_far_from_its_profile_has_the_next_start_measure_anew(
    what: str, cache: Path
) -> None:
    assert Measurements(times(3), now=times(3)).kept() == times(3)

    def doubted(why: str) -> None:
        said.append(why)
        doubt("k")

    for factor, expected in ((0.2, 1), (0.7, 0), (1, 0), (2.5, 0), (4, 1)):
        said: list[str] = []
        check = ProfileCheck(TRUE, doubted, steps=True)
        seen = (
            prefilled(TRUE.prefill_ns(1_000, 200) * factor)
            if what == "prefill"
            else beat(TRUE.step_ns(4, 4_000) * factor)
        )
        for _ in range(COMPARED - 1):
            check.saw(seen)
        assert said == [], "fewer say nothing"
        for _ in range(COMPARED):
            check.saw(seen)
        assert len(said) == expected, factor
        assert all(what in why for why in said)
    assert not cache.exists()
    assert Measurements(TRUE).kept() == TRUE


def test_what_says_nothing_of_the_formula_is_left_out() -> None:
    said: list[str] = []
    check = ProfileCheck(TRUE, said.append, steps=False)
    for _ in range(3 * COMPARED):
        check.saw(prefilled(1, tokens=100, cached=0))
        check.saw(prefilled(1, tokens=1_000, cached=900))
        check.saw(prefilled(1, tokens=0, cached=0))
        check.saw(beat(1))
    fair = ProfileCheck(TRUE, said.append, steps=True)
    for place in range(3 * COMPARED):
        fair.saw(prefilled(TRUE.prefill_ns(1_000, 200) * (50 if place % 3 == 0 else 1)))
        fair.saw(beat(0, steps=0))
    assert said == [], "single ones are outvoted"
