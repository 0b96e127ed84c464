"""Workers that obey the batch former: what an iteration takes, what a budget holds, and the papers' orders."""

from __future__ import annotations

import pytest

from benchmarks.papers.batching.iteration_times import ProfileTimes, RooflineTimes, budget_for
from benchmarks.papers.batching.pipeline import run_pipeline
from benchmarks.papers.batching.ways import Batching
from benchmarks.papers.experiments.batching import (
    A100,
    GPT3,
    LENGTHS,
    MISTRAL_7B,
    YI_34B,
    Served,
    drawn,
    objective_ns,
    piggyback_gain,
    serve,
    zipf_lengths,
)
from benchmarks.papers.systems import run_system
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy

YI = RooflineTimes(YI_34B, A100, 2)
MS = 1_000_000


def served(batching: Batching, *, budget: int = 1_024, per_s: float = 0.7, count: int = 60) -> Served:
    requests = drawn("openchat_sharegpt4", count)
    return serve(requests, YI, batching=batching, budget=budget, per_s=per_s, slo_ns=0.0)


def test_weights_are_read_once_for_both_kinds_of_rows() -> None:
    for times in (YI, ProfileTimes(LLAMA3_A800.cost)):
        chunk, decodes = [(1_024, 480)], (32, 32 * 1_024)
        together = times.iteration_ns(chunk, *decodes)
        apart = times.iteration_ns(chunk, 0, 0) + times.iteration_ns([], *decodes)
        assert together < 0.9 * apart
        assert together > max(times.iteration_ns(chunk, 0, 0), times.iteration_ns([], *decodes))


def test_rows_beyond_a_tile_cost_a_whole_one() -> None:
    full, one_more = (YI.iteration_ns([(0, tokens)], 0, 0) for tokens in (256, 257))
    assert one_more / full > 1.25
    assert YI.iteration_ns([(0, 384)], 0, 0) / one_more < 1.02


def test_a_budget_is_whole_tiles_holds_its_objective_and_grows_with_it() -> None:
    budgets = [budget_for(YI, objective_ns(YI, factor)) for factor in (3, 5, 10, 25)]
    assert budgets == sorted(budgets)
    assert budgets[0] < budgets[-1]
    for factor, budget in zip((3, 5, 10, 25), budgets, strict=True):
        assert budget % 128 == 0
        chunk = [(max(0, 4_096 - budget), budget - 32)]
        assert YI.iteration_ns(chunk, 32, 32 * 4_096) <= objective_ns(YI, factor)


def test_iterations_of_a_run_hold_the_objective_that_their_budget_was_chosen_for() -> None:
    slo_ns = objective_ns(YI, 5)
    run = serve(
        drawn("openchat_sharegpt4", 60),
        YI,
        batching=Batching.STALL_FREE,
        budget=budget_for(YI, slo_ns),
        per_s=0.7,
        slo_ns=slo_ns,
    )
    assert run.violations <= 0.05
    assert run.tbt_p99_ns <= slo_ns


def test_the_two_parts_of_stall_free_batching_have_the_papers_order() -> None:
    hybrid, chunks, both = (
        served(batching) for batching in (Batching.HYBRID, Batching.CHUNKED, Batching.STALL_FREE)
    )
    assert hybrid.ttft_s < both.ttft_s < chunks.ttft_s
    assert both.tbt_p99_ns <= chunks.tbt_p99_ns < hybrid.tbt_p99_ns


def test_prefill_first_stalls_for_whole_prefills_and_stall_free_for_an_iteration() -> None:
    first, both = (served(batching, budget=512) for batching in (Batching.PREFILL_FIRST, Batching.STALL_FREE))
    assert both.tbt_p99_ns <= 1.3 * YI.iteration_ns([(3_584, 480)], 32, 131_072)
    assert first.tbt_p99_ns >= 3 * both.tbt_p99_ns
    assert both.tokens_s >= 0.9 * first.tokens_s


def test_piggybacking_gains_most_where_every_chunk_has_its_decodes() -> None:
    least, best, most = (piggyback_gain(256, ratio) for ratio in (5, 51, 200))
    assert best > 1.2
    assert best > least + 0.1
    assert best > most + 0.1


def test_chunks_of_one_size_leave_a_pipeline_few_bubbles() -> None:
    whole, chunks = (
        run_pipeline(
            zipf_lengths(320),
            RooflineTimes(GPT3, A100, 64),
            stages=8,
            batching=batching,
            budget_tokens=256,
            sequences_max=27,
        )
        for batching in (Batching.HYBRID, Batching.STALL_FREE)
    )
    assert whole.bubble_share > 3 * chunks.bubble_share
    assert chunks.tokens_s > whole.tokens_s


def test_a_pipeline_of_one_stage_waits_for_nothing() -> None:
    figures = run_pipeline(
        zipf_lengths(6),
        YI,
        stages=1,
        batching=Batching.STALL_FREE,
        budget_tokens=256,
        sequences_max=4,
    )
    assert figures.bubble_s == 0


def test_drawn_lengths_have_the_published_quantiles() -> None:
    for dataset, ((middle, _), (answer, _), longest) in LENGTHS.items():
        requests = drawn(dataset, 4_000)
        assert requests == drawn(dataset, 4_000)
        prompts = sorted(prompt for prompt, _ in requests)
        # What is too long is drawn again, which takes from the upper end.
        assert prompts[2_000] == pytest.approx(middle, rel=0.15)
        assert sorted(one for _, one in requests)[2_000] == pytest.approx(answer, rel=0.1)
        assert max(prompt + one for prompt, one in requests) <= longest


def test_a_small_cache_preempts_and_every_answer_is_whole() -> None:
    arrivals = [Arrival(at_ns=place * MS, prompt_tokens=1_000, output_tokens=600) for place in range(12)]
    outcomes: dict[str, Outcome] = {}
    report = run_system(
        "sarathi",
        arrivals,
        ClusterShape(prefill=1, decode=0, block_tokens=64, kv_blocks=60),
        Policy(),
        LLAMA3_A800,
        RunOptions(slo=Objectives(ttft_ns=10**12, tbt_ns=200 * MS)),
        outcomes=outcomes,
    )
    assert report.endings.completed == 12
    # Three fit with their prompts and two with their answers: computing anew takes more than the prompts.
    alone = sum(LLAMA3_A800.cost.prefill_ns(1_000, 0) for _ in arrivals)
    assert report.devices.prefill_gpu_s * 1e9 > alone
    firsts = [outcomes[f"r{place}"].first_token_ns for place in range(12)]
    assert firsts == sorted(firsts)


def test_a_mistral_fits_one_device_with_room_for_its_cache() -> None:
    assert 300_000 < RooflineTimes(MISTRAL_7B, A100, 1).kv_tokens < 500_000
