"""`halfmoon size --from-log`: the split that a recorded run would have wanted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import simulated_log, status_of

from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.profiles import load_profile
from halfmoon.conductor.simulation.report import Workers
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy

S, MS = 1_000_000_000, 1_000_000
PROFILE = load_profile("a800")
POLICY = Policy(ttft_slo_ns=4 * S, tbt_slo_ns=30 * MS)
#: Long prompts, which one prefill worker cannot do; and long answers, whose batch is too large for one decode worker.
PROMPTS = [Arrival(at_ns=n * S // 2, prompt_tokens=8_000, output_tokens=40) for n in range(60)]
ANSWERS = [Arrival(at_ns=n * S // 8, prompt_tokens=400, output_tokens=900) for n in range(160)]


def log_of(
    path: Path, cluster: ClusterShape, arrivals: list[Arrival] = PROMPTS[:30], policy: Policy = POLICY
) -> Path:
    simulated_log(path, cluster, arrivals, policy)
    return path


@pytest.mark.parametrize(
    ("arrivals", "recorded"), [(PROMPTS, (1, 3)), pytest.param(ANSWERS, (3, 1), marks=pytest.mark.slow)]
)
def test_the_split_that_is_proposed_holds_more_than_the_one_that_was_recorded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arrivals: list[Arrival],
    recorded: tuple[int, int],
) -> None:
    prefill, decode = recorded
    log = log_of(tmp_path / "log.jsonl.zst", ClusterShape(prefill=prefill, decode=decode), arrivals)
    assert status_of("size", "--from-log", log, "--workers-max", 4, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    was = next(one for one in found["splits"] if (one["prefill"], one["decode"]) == recorded)
    best = found["best"]
    assert [(one["prefill"], one["decode"], one["mixed"]) for one in found["splits"]] == [
        (1, 3, 0),
        (2, 2, 0),
        (3, 1, 0),
        (0, 0, 4),
    ]
    assert best["held"] > was["held"] + 0.1
    held = {
        workers: simulate(
            arrivals,
            ClusterShape(**workers._asdict()),
            POLICY,
            PROFILE,
        ).service.effective_capacity
        for workers in (Workers(1, 3), Workers(2, 2), Workers(3, 1), Workers(0, 0, 4))
    }
    chosen = Workers(best["prefill"], best["decode"], best["mixed"])
    assert held[chosen] == max(held.values()), (held, found)
    assert found["slo"] == {"ttft_ns": POLICY.ttft_slo_ns, "tbt_ns": POLICY.tbt_slo_ns}
    fewest = found["fewest"]
    assert fewest["held"] >= 0.9
    assert status_of("size", "--from-log", log, "--workers-max", 4, "--workers", 3) == 0
    told = capsys.readouterr().out
    assert f"recorded with {recorded[0]} prefill + {recorded[1]} decode" in told
    assert "of 3 workers: " in told
    assert f"fewest, two pools: {fewest['prefill']} prefill + {fewest['decode']} decode" in told


def test_objectives_of_ones_own_and_more_than_any_number_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(tmp_path / "log.jsonl.zst", ClusterShape(prefill=1, decode=1), PROMPTS[:40])
    assert status_of("size", "--from-log", log, "--workers-max", 2, "--ttft-ms", 1) == 0
    told = capsys.readouterr().out
    assert "TTFT <= 0.001 s" in told
    assert "fewest, two pools: no number that was tried holds for 90% of the requests" in told
    assert "fewest, mixed: no number that was tried holds for 90% of the requests" in told


def test_a_run_of_mixed_workers_is_compared_with_two_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An iteration of a whole budget takes a quarter of a second.
    policy = Policy(ttft_slo_ns=4 * S, tbt_slo_ns=500 * MS)
    cluster = ClusterShape(prefill=0, decode=0, mixed=3, token_budget=1_000)
    log = log_of(tmp_path / "log.jsonl.zst", cluster, policy=policy)
    assert status_of("size", "--from-log", log, "--workers-max", 3, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recorded"] == [0, 0, 3]
    assert [one["mixed"] for one in found["splits"]] == [0, 0, 3]
    told = simulate(PROMPTS[:30], cluster, policy, PROFILE)
    assert found["splits"][-1]["held"] == pytest.approx(told.service.effective_capacity, abs=0.1)
    assert found["fewest_mixed"]["mixed"] <= 3
    assert status_of("size", "--from-log", log, "--workers-max", 3) == 0
    text = capsys.readouterr().out
    assert "recorded with 3 mixed" in text
    assert text.count("as recorded") == 1
    assert f"fewest, mixed: {found['fewest_mixed']['mixed']} mixed hold for" in text


def test_a_split_that_was_recorded_is_among_those_that_are_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(tmp_path / "log.jsonl.zst", ClusterShape(prefill=1, decode=1, mixed=1))
    assert status_of("size", "--from-log", log, "--workers-max", 2, "--json") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert [(one["prefill"], one["decode"], one["mixed"]) for one in splits] == [
        (1, 2, 0),
        (2, 1, 0),
        (0, 0, 3),
        (1, 1, 1),
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workers", "-1"], "--workers -1"),
        (["--ttft-ms", "0"], "--ttft-ms 0"),
        (["--speed", "0"], "--speed 0"),
    ],
)
def test_nonsense_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    log = log_of(tmp_path / "log.jsonl.zst", ClusterShape(prefill=1, decode=1), PROMPTS[:5])
    assert status_of("size", "--from-log", log, *options) != 0
    assert named in capsys.readouterr().err
