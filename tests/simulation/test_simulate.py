"""The core over a trace: every request ends, the same in gives the same out, and what is reported is what
happened.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from halfmoon.conductor.simulation.options import ClusterShape, ConfigurationImpossible, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800, PROFILES
from halfmoon.conductor.simulation.report import SimulationReport
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.policy import AdmissionName, Policy, PolicyName
from tests.lengths import sizes

S, MS = 1_000_000_000, 1_000_000
EIGHT = ClusterShape(prefill=8, decode=8)
TWO = ClusterShape(prefill=2, decode=2)


def same(report: SimulationReport) -> dict[str, object]:
    return {**report.plain(), "wall_s": 0}


def request(at_ms: int, tokens: int, answer: int = 10, chain: int = 1) -> Arrival:
    keys = b"".join(chain.to_bytes(8, "big") + place.to_bytes(8, "big") for place in range(tokens // 512))
    return Arrival(at_ns=at_ms * MS, prompt_tokens=tokens, output_tokens=answer, block_keys=keys)


@pytest.mark.parametrize("requests", sizes(1_000, 3_000))
def test_the_beginning_of_the_conversation_trace_is_served_whole(
    conversation: list[Arrival], requests: int
) -> None:
    report = simulate(
        conversation[:requests], EIGHT, Policy(admission="none", tbt_slo_ns=100 * MS), LLAMA3_A800
    )
    assert (report.endings.requests, report.endings.completed, report.endings.open, report.complete) == (
        requests,
        requests,
        0,
        True,
    )
    assert 0.1 < report.service.token_reuse < 0.3734
    assert report.service.effective_capacity > 0.98


@pytest.mark.slow
def test_the_whole_conversation_trace_is_served_whole(conversation: list[Arrival]) -> None:
    report = simulate(conversation, EIGHT, Policy(admission="none", tbt_slo_ns=100 * MS), LLAMA3_A800)
    assert (report.endings.requests, report.endings.completed, report.endings.open, report.complete) == (
        12_031,
        12_031,
        0,
        True,
    )
    assert 0.33 < report.service.token_reuse < 0.3734  # never more than one boundless pool
    assert report.service.effective_capacity > 0.98


@pytest.mark.parametrize("requests", sizes(100, 300))
@pytest.mark.parametrize("admission", get_args(AdmissionName))
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_every_request_ends_under_every_policy(
    conversation: list[Arrival], policy: PolicyName, admission: AdmissionName, requests: int
) -> None:
    outcomes: dict[str, Outcome] = {}
    chosen = Policy(name=policy, admission=admission, ttft_slo_ns=5 * S, tbt_slo_ns=20 * MS)
    report = simulate(
        conversation[:requests], TWO, chosen, LLAMA3_A800, RunOptions(seed=3), outcomes=outcomes
    )
    assert report.endings.requests == len(outcomes) == requests
    assert report.endings.completed + sum(report.endings.rejected.values()) == requests
    assert (sum(report.endings.rejected.values()) > 0) == (admission != "none")
    for outcome in outcomes.values():
        if outcome.end == "finished":
            assert outcome.arrived_ns < outcome.first_token_ns <= outcome.ended_ns
            assert outcome.local_tokens + outcome.fetched_tokens < outcome.prompt_tokens


@pytest.mark.parametrize("waits", [False, True])
def test_a_prompt_waits_for_blocks_that_one_before_it_computes(waits: bool) -> None:
    outcomes: dict[str, Outcome] = {}
    arrivals = [request(0, 10_240), request(1, 10_240), request(2, 20_480), request(3, 10_240, chain=2)]
    policy = Policy(admission="none", coming_blocks=waits)
    simulate(arrivals, ClusterShape(prefill=1, decode=1), policy, LLAMA3_A800, outcomes=outcomes)
    # At least one token is computed, so of twenty blocks that are here nineteen are used.
    expected = [0, 19 * 512, 20 * 512, 0] if waits else [0, 0, 0, 0]
    assert [one.local_tokens for one in outcomes.values()] == expected


@pytest.mark.slow
def test_earlier_simulations_take_no_memory(conversation: list[Arrival]) -> None:
    frozen = gc.get_freeze_count()
    for _ in range(4):
        simulate(conversation[:100], TWO, Policy(), LLAMA3_A800)
    assert sum(type(one) is World for one in gc.get_objects()) <= 1
    assert gc.get_freeze_count() == frozen


def test_what_a_process_holds_is_frozen_for_a_simulation_alone(trace_file: Path) -> None:
    program = (
        "import gc, sys; from halfmoon.conductor.simulation.simulate import simulate\n"
        "from halfmoon.conductor.simulation.profiles import LLAMA3_A800\n"
        "from halfmoon.conductor.simulation.options import RunOptions\n"
        "from halfmoon.conductor.simulation.trace import read_trace\n"
        "from halfmoon.conductor.simulation.options import ClusterShape\n"
        "from halfmoon.schemas.policy import Policy\n"
        "arrivals = read_trace(sys.argv[1])[:120]\n"
        "def run():\n"
        "    frozen = []\n"
        "    note = lambda done: frozen.append(gc.get_freeze_count() > 0)\n"
        "    simulate(arrivals, ClusterShape(prefill=2, decode=2), Policy(), LLAMA3_A800, RunOptions(progress=note))\n"
        "    print(frozen[0], gc.get_freeze_count() > 0)\n"
        "run(); gc.freeze(); run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(trace_file)], capture_output=True, text=True, check=True
    )
    # Thawed at its end; what was frozen before stays so.
    assert done.stdout.split() == ["True", "False", "True", "True"]


@pytest.mark.parametrize("requests", sizes(400, 1_500))
def test_a_run_is_the_same_again_in_another_process(
    conversation: list[Arrival], trace_file: Path, requests: int
) -> None:
    program = (
        "import sys; from halfmoon.conductor.simulation.simulate import simulate\n"
        "from halfmoon.conductor.simulation.profiles import LLAMA3_A800\n"
        "from halfmoon.conductor.simulation.options import RunOptions\n"
        "from halfmoon.conductor.simulation.trace import read_trace\n"
        "from halfmoon.conductor.simulation.options import ClusterShape\n"
        "from halfmoon.schemas.policy import Policy\n"
        "report = simulate(read_trace(sys.argv[1])[:int(sys.argv[2])], ClusterShape(prefill=8, decode=8), "
        "Policy(), LLAMA3_A800, RunOptions(noise_percent=5, seed=4))\n"
        "print(report.digest, report.service.ttft_ms.mean)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(trace_file), str(requests)],
        capture_output=True,
        text=True,
        check=True,
    )
    report = simulate(
        conversation[:requests], EIGHT, Policy(), LLAMA3_A800, RunOptions(noise_percent=5, seed=4)
    )
    assert run.stdout.split() == [report.digest, str(report.service.ttft_ms.mean)]
    again = simulate(
        conversation[:requests], EIGHT, Policy(), LLAMA3_A800, RunOptions(noise_percent=5, seed=4)
    )
    assert same(again) == same(report)
    other = simulate(
        conversation[:requests], EIGHT, Policy(), LLAMA3_A800, RunOptions(noise_percent=5, seed=5)
    )
    assert other.digest != report.digest


def test_one_request_alone_takes_what_the_profile_says() -> None:
    """Prefill of 4,096 tokens; the last layer's KV goes to the decode node; then nine steps."""
    outcomes: dict[str, Outcome] = {}
    simulate([request(0, 4_096)], TWO, Policy(admission="none"), LLAMA3_A800, outcomes=outcomes)
    cost = LLAMA3_A800.cost
    prefill = cost.prefill_base_ns + cost.prefill_per_token_ps * 4_096 // 1_000
    prefill += cost.prefill_per_token2_fs * 4_096**2 // 1_000_000
    outcome = outcomes["r0"]
    assert outcome.ttft_ns == prefill
    last_layer = 4_096 * 327_680 // 80 * S // LLAMA3_A800.link_bytes_s + LLAMA3_A800.link_latency_ns
    steps = sum(
        cost.decode_base_ns
        + cost.decode_per_sequence_ns
        + cost.decode_per_context_token_ps * (4_097 + done) / 1_000
        for done in range(9)
    )
    assert outcome.ended_ns == pytest.approx(prefill + last_layer + steps, abs=10)


@pytest.mark.parametrize("tokens", [2, 512 + 3, 1_024])
def test_the_tokens_of_a_prompt_are_pushed_and_no_more(tokens: int) -> None:
    report = simulate([request(0, tokens)], TWO, Policy(admission="none"), LLAMA3_A800)
    assert report.traffic.bytes_pushed == tokens * 327_680


def test_a_second_turn_reuses_the_first_one_and_says_where_from() -> None:
    outcomes: dict[str, Outcome] = {}
    arrivals = [request(0, 8_192), request(60_000, 8_192)]
    report = simulate(arrivals, TWO, Policy(admission="none"), LLAMA3_A800, outcomes=outcomes)
    # One token at least is computed, so the last whole block is.
    assert outcomes["r1"].local_tokens + outcomes["r1"].fetched_tokens == 8_192 - 512
    assert outcomes["r1"].ttft_ns < outcomes["r0"].ttft_ns // 5
    assert report.service.token_reuse == pytest.approx((8_192 - 512) / (2 * 8_192), abs=1e-6)


def test_without_a_pool_nothing_is_reused() -> None:
    cluster = msgspec.structs.replace(TWO, pool_blocks=0)
    report = simulate(
        [request(0, 8_192), request(60_000, 8_192)], cluster, Policy(admission="none"), LLAMA3_A800
    )
    assert report.service.token_reuse == 0


@pytest.mark.slow
def test_a_slow_network_is_felt(conversation: list[Arrival]) -> None:
    fast, slow = (
        simulate(
            conversation[:400],
            msgspec.structs.replace(TWO, link_bytes_s=bytes_s),
            Policy(admission="none"),
            LLAMA3_A800,
        )
        for bytes_s in (100_000_000_000, 500_000_000)
    )
    # What is not fetched may be found on the spot later, so that as much is reused in the end.
    assert slow.service.hits_by_source["fetched"] < fast.service.hits_by_source["fetched"] / 2
    assert slow.service.tbt_ms.p90 > fast.service.tbt_ms.p90


@pytest.mark.slow
def test_faster_replay_waits_longer(conversation: list[Arrival]) -> None:
    policy = Policy(admission="none")
    slow, fast = (
        simulate(conversation[:400], EIGHT, policy, LLAMA3_A800, RunOptions(speed=speed))
        for speed in (1.0, 3.0)
    )
    assert fast.service.ttft_ms.mean > 1.5 * slow.service.ttft_ms.mean


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_every_profile_is_complete(profile) -> None:  # type: ignore[no-untyped-def]
    report = simulate([request(0, 1_024)], TWO, Policy(admission="none"), profile)
    assert report.endings.completed == 1
    assert len(profile.notes) >= 3


def test_impossible_configurations_say_why() -> None:
    for cluster, message in (
        (ClusterShape(prefill=0, decode=1), "prefill: at least one"),
        (ClusterShape(prefill=1, decode=0), "decode: at least one"),
        (ClusterShape(prefill=1, decode=1, kv_blocks=0), "holds no block"),
    ):
        with pytest.raises(ConfigurationImpossible, match=message):
            simulate([request(0, 512)], cluster, Policy(), LLAMA3_A800)


def test_an_interrupted_run_reports_what_it_has(conversation: list[Arrival]) -> None:
    def interrupt(done: int) -> None:
        if done >= 200:
            raise KeyboardInterrupt

    report = simulate(conversation[:400], EIGHT, Policy(), LLAMA3_A800, RunOptions(progress=interrupt))
    assert not report.complete
    assert 200 <= report.endings.requests < 400
    assert report.endings.open > 0
