"""Simulated prefill workers that compute prompts together: the pipeline's time, who waits for it, and the aim."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.papers.experiments.stages import GROUPS, PROFILE, SHARE_MAX, traffic_gb
from halfmoon.cli.main import main
from halfmoon.conductor.simulation.options import ClusterShape, ConfigurationImpossible
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.stages import stage_times
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import LayerStage
from halfmoon.schemas.policy import Policy

MS, S = 1_000_000, 1_000_000_000
#: 1 ms a token in all four layers, 1,024 bytes of its KV in each.
EVEN = Profile(
    name="even",
    cost=CostProfile(prefill_per_token_ps=1_000_000_000, decode_base_ns=MS),
    layers=4,
    kv_heads=4,
    head_dim=64,
    activation_bytes=1_024,
    kv_bytes=10**9,
    pool_bytes=10**9,
    link_bytes_s=1_024_000_000,
    link_latency_ns=0,
    load_bytes_s=10**12,
)


def parts(*layers: int) -> list[LayerStage]:
    firsts = [sum(layers[:place]) for place in range(len(layers))]
    return [
        LayerStage(worker_id=f"p{place}", first_layer=first, layers=count)
        for place, (first, count) in enumerate(zip(firsts, layers, strict=True))
    ]


def test_stages_compute_at_the_same_time_but_for_filling_and_emptying() -> None:
    times = stage_times(EVEN, parts(2, 2), range(0, 1_000, 100), link_bytes_s=10**15)
    # Ten chunks of 100 ms, half of each on either; the last begins when the first chunk has come.
    assert times.ends_ns == [500 * MS, 550 * MS]
    assert times.busy_ns == [500 * MS, 500 * MS]
    assert times.moved_bytes == 1_000 * (2 * 1_024 + 1_024)
    assert stage_times(EVEN, parts(3, 1), range(0, 1_000, 100), link_bytes_s=10**15).ends_ns == [
        750 * MS,
        775 * MS,
    ]


def test_a_slow_link_holds_the_last_stage_up_and_cached_layers_the_first() -> None:
    slow = stage_times(EVEN, parts(2, 2), range(0, 1_000, 100), link_bytes_s=1_024_000)
    # 1,024 bytes of KV a layer and token, in two layers, and a residual: 3 ms a token.
    assert slow.ends_ns == [500 * MS, 3_100 * MS]
    cached = stage_times(EVEN, parts(2, 2), range(900, 1_000, 100), link_bytes_s=1_024_000)
    assert cached.ends_ns == [1_850 * MS, 2_200 * MS]


def run(size: int, *tokens: int, gap_ns: int = S) -> tuple[list[Outcome], object]:
    found: dict[str, Outcome] = {}
    report = simulate(
        [
            Arrival(at_ns=(1 + place) * gap_ns, prompt_tokens=n, output_tokens=2)
            for place, n in enumerate(tokens)
        ],
        ClusterShape(prefill=GROUPS[-1], decode=1),
        Policy(admission="none", ttft_slo_ns=1_000 * S, prefill_group=size),
        PROFILE,
        outcomes=found,
    )
    assert report.endings.completed == len(tokens)
    return [found[f"r{place}"] for place in range(len(tokens))], report


def test_the_longest_prompt_on_four_workers_holds_the_aim_and_is_as_predicted() -> None:
    ((alone,), _), ((four,), report) = run(1, 131_072), run(4, 131_072)
    assert four.ttft_ns <= SHARE_MAX * alone.ttft_ns
    assert four.predicted_ttft_ns == pytest.approx(four.ttft_ns, rel=0.02)
    ours, best, ring, reduced = traffic_gb(
        131_072, 4, report.traffic.bytes_moved - report.traffic.bytes_pushed
    )  # type: ignore[attr-defined]
    assert best < ours < ring < reduced


def test_prompts_that_come_meanwhile_wait_for_a_part_or_go_to_who_is_idle() -> None:
    found, _ = run(4, 131_072, 4_096, 4_096, 131_072, 8_192, gap_ns=500 * MS)
    assert found[0].ttft_ns < 15 * S
    assert found[1].ttft_ns > 5 * S, "all four compute the first prompt"
    assert run(2, 131_072, 4_096, gap_ns=500 * MS)[0][1].ttft_ns < S, "two are idle"


def test_a_profile_without_bytes_of_a_residual_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    bare = msgspec.structs.replace(PROFILE, activation_bytes=0)
    with pytest.raises(ConfigurationImpossible, match=r"prefill_group: .* activation_bytes"):
        simulate([], ClusterShape(prefill=2, decode=1), Policy(prefill_group=2), bare)
    with pytest.raises(SystemExit):
        main(["simulate", "--requests", "3", "--prefill-group", "65"])
    assert "--prefill-group 65: 1 to 64" in capsys.readouterr().err
