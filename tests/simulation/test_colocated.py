"""Colocated workers: what a prefill does to those who decode, what a budget changes, what a prefix cache
saves.
"""

from __future__ import annotations

import pytest

from benchmarks.papers.colocated import COLOCATED
from benchmarks.papers.systems import run_system
from halfmoon.conductor.simulation.options import ClusterShape, ConfigurationImpossible, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy

MS = 1_000_000
COST = LLAMA3_A800.cost


def request(at_ms: int, tokens: int, answer: int = 10, chain: int = 1) -> Arrival:
    keys = b"".join(chain.to_bytes(8, "big") + place.to_bytes(8, "big") for place in range(tokens // 512))
    return Arrival(at_ns=at_ms * MS, prompt_tokens=tokens, output_tokens=answer, block_keys=keys)


def run(
    system: str, *arrivals: Arrival, workers: int = 1, **cluster: int
) -> tuple[SimulationReport, list[Outcome]]:
    outcomes: dict[str, Outcome] = {}
    report = run_system(
        system,
        arrivals,
        ClusterShape(prefill=workers, decode=0, **cluster),
        Policy(),
        LLAMA3_A800,
        RunOptions(slo=Objectives()),
        outcomes=outcomes,
    )
    return report, list(outcomes.values())


def prefill_ns(tokens: int) -> int:
    return (
        COST.prefill_base_ns
        + COST.prefill_per_token_ps * tokens // 1_000
        + COST.prefill_per_token2_fs * tokens**2 // 1_000_000
    )


@pytest.mark.parametrize("system", ["vllm", "vllm-prefix"])
def test_one_request_alone_takes_what_the_profile_says(system: str) -> None:
    _, (outcome,) = run(system, request(0, 4_096))
    steps = sum(
        COST.decode_base_ns
        + COST.decode_per_sequence_ns
        + COST.decode_per_context_token_ps * (4_097 + done) / 1_000
        for done in range(9)
    )
    assert outcome.ttft_ns == prefill_ns(4_096)
    assert outcome.ended_ns == pytest.approx(prefill_ns(4_096) + steps, abs=10)


def test_a_prefill_stalls_whoever_decodes_and_chunks_stall_less() -> None:
    # 100 intervals; the second prompt, of 16,384 tokens, comes into the middle of them.
    arrivals = (request(0, 1_024, answer=101), request(1_000, 16_384, chain=2))
    _, (whole, _) = run("vllm", *arrivals)
    _, (chunked, _) = run("vllm-chunked", *arrivals, chunk_tokens=512)
    quiet = COST.decode_base_ns
    # The longest ten of 100 intervals: one holds the whole prefill, or 32 hold a chunk each.
    assert whole.tbt_ns == pytest.approx(prefill_ns(16_384) / 10 + quiet, rel=0.03)
    assert 50 * MS < chunked.tbt_ns < 95 * MS < whole.tbt_ns


def test_chunks_cost_a_base_each() -> None:
    _, (one,) = run("vllm-chunked", request(0, 16_384), chunk_tokens=512)
    assert one.ttft_ns == pytest.approx(prefill_ns(16_384) + 31 * COST.prefill_base_ns, rel=1e-6)


def test_only_prefix_caching_reuses() -> None:
    arrivals = (request(0, 8_192), request(60_000, 8_192))
    for system in COLOCATED:
        report, (first, second) = run(system, *arrivals)
        caches = system in ("vllm-prefix", "dynamo")
        assert second.local_tokens == (8_192 - 512 if caches else 0), system
        assert (second.ttft_ns < first.ttft_ns / 4) == caches
        assert (report.service.token_reuse > 0) == caches


def test_what_fits_only_after_another_has_ended_waits() -> None:
    arrivals = [request(0, 8_192, answer=500, chain=1), request(10, 8_192, answer=2, chain=2)]
    _, (first, second) = run("vllm", *arrivals, kv_blocks=20)
    assert second.first_token_ns > first.ended_ns
    _, (first, second) = run("vllm", *arrivals, kv_blocks=40)
    assert second.first_token_ns < first.ended_ns


def test_a_full_cache_gives_way_to_running_requests() -> None:
    arrivals = [request(10_000 * chain, 8_192, chain=chain) for chain in (1, 2, 1)]
    report, outcomes = run("vllm-prefix", *arrivals, kv_blocks=20)
    assert report.endings.completed == 3
    assert outcomes[2].local_tokens < 8_192 - 512


def test_dynamo_weighs_cached_blocks_against_blocks_in_hand() -> None:
    arrivals = [request(0, 8_192), request(60_000, 8_192), request(60_001, 8_192, chain=2)]
    _, outcomes = run("dynamo", *arrivals, workers=2)
    assert [outcome.prefill_id for outcome in outcomes] == ["worker-0", "worker-0", "worker-1"]


@pytest.mark.parametrize("system", COLOCATED)
def test_a_trace_ends_and_is_the_same_again(conversation: list[Arrival], system: str) -> None:
    one, _ = run(system, *conversation[:400], workers=4)
    two, _ = run(system, *conversation[:400], workers=4)
    assert (one.endings.requests, one.endings.completed) == (400, 400)
    assert {**one.plain(), "wall_s": 0} == {**two.plain(), "wall_s": 0}


def test_what_no_worker_could_hold_is_refused_and_no_worker_at_all_is_an_error() -> None:
    report, _ = run("vllm", request(0, 8_192), kv_blocks=10)
    assert report.endings.rejected == {"too_long": 1}
    with pytest.raises(ConfigurationImpossible, match="at least one worker"):
        run("vllm", request(0, 512), workers=0)
