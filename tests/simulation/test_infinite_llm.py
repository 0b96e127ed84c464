"""Instances that lend: what a plan may do, what a step costs, and that only unequal lengths gain."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.papers.experiments.lending import (
    ANSWER_TOKENS,
    CACHE_TOKENS,
    CLIENTS,
    SHORT_TOKENS,
    requests,
    skew_gain,
)
from benchmarks.papers.infinite_llm import (
    NOBODY_LENDS,
    ROUND_TRIP_NS,
    Instance,
    Lending,
    LendingRun,
    LentSequence,
    Planner,
    simulate_infinite_llm,
)
from halfmoon.cli.main import main
from halfmoon.conductor.simulation.profiles import LLAMA2_TWO_A100
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.trace import Arrival

PROFILE = LLAMA2_TWO_A100
PLACED = Lending(move_tokens=0)


def simulated(deviation: float, lending: Lending, *, instances: int = 4, turns: int = 20) -> SimulationReport:
    arrivals = requests(instances * CLIENTS * turns, deviation)
    clients = msgspec.structs.replace(lending, clients=CLIENTS)
    return simulate_infinite_llm(
        arrivals, instances, CACHE_TOKENS, PROFILE, lending=clients, slo=Objectives()
    )


def gain(deviation: float, lending: Lending, *, instances: int = 4) -> float:
    found = [simulated(deviation, one, instances=instances).pools for one in (NOBODY_LENDS, lending)]
    return found[1].tokens_s / found[0].tokens_s


def test_equal_lengths_gain_nothing_and_the_gain_grows_with_their_variance() -> None:
    assert gain(0.0, Lending()) == 1.0
    gains = [gain(deviation, PLACED) for deviation in (0.0, 0.5, 2.0)]
    assert gains == sorted(gains)
    assert gains[-1] > 1.15


def test_where_one_instance_has_the_long_requests_lending_gains_and_without_them_nothing() -> None:
    for long_tokens, least, most in ((SHORT_TOKENS, 1.0, 1.0), (CACHE_TOKENS * 6 // 10, 1.2, 1.4)):
        alone, lent = (report.pools for report in skew_gain(2, long_tokens))
        assert least <= lent.tokens_s / alone.tokens_s <= most


def checked_run(arrivals: list[Arrival], lending: Lending) -> LendingRun:
    """A whole run, its ledger checked after each event."""
    run = LendingRun(arrivals, 4, CACHE_TOKENS, PROFILE, lending)
    begin_steps = run._begin_steps

    def begin_and_check() -> None:
        begin_steps()
        check(run)

    run._begin_steps = begin_and_check  # type: ignore[method-assign]
    run.run()
    return run


def check(run: LendingRun) -> None:
    """The ledger: what is lent is what is borrowed, used and free are all there is, nobody lends what is borrowed."""
    for one in run.instances:
        here = sum(sequence.here_tokens for sequence in one.batch.values())
        assert here + sum(one.lent.values()) + one.free_tokens == one.kv_tokens
        assert one.free_tokens >= 0
        assert one.away_tokens == sum(sum(sequence.away.values()) for sequence in one.batch.values())
        moving = one.move
        for other in run.instances:
            borrowed = sum(sequence.away.get(other.place, 0) for sequence in one.batch.values())
            if moving is not None and moving.lender == other.place:
                borrowed += moving.tokens
            assert other.lent.get(one.place, 0) == borrowed
            assert not (other.lent.get(one.place) and one.lent.get(other.place))


@pytest.mark.parametrize("lending", [PLACED, Lending(placed=False, move_tokens=32), Lending()])
def test_the_ledger_holds_in_every_step_and_is_empty_at_the_end(lending: Lending) -> None:
    arrivals = requests(4 * CLIENTS * 10, 2.0)
    run = checked_run(arrivals, msgspec.structs.replace(lending, clients=CLIENTS))
    assert all(one.free_tokens == one.kv_tokens and not one.lent for one in run.instances)
    assert run.borrowed_tokens + run.moved_tokens > 0
    assert {outcome.end for outcome in run.outcomes.values()} == {"finished"}


def test_who_has_requests_that_wait_lends_nothing_and_a_lender_keeps_its_reserve() -> None:
    owner, busy, idle = (Instance(place, PROFILE, 10_000) for place in range(3))
    owner.join(LentSequence("running", 7_000, 100))
    first = LentSequence("first", 9_000, 100)
    owner.waiting.append(first)
    busy.waiting.append(LentSequence("theirs", 100, 100))
    loans = Planner([owner, busy, idle], Lending(reserve_percent=10)).loans(owner, first)
    assert set(loans) == {2}
    assert 9_100 - 2_900 <= loans[2] <= 9_000
    assert Planner([owner, busy], PLACED).loans(owner, first) == {}
    # Nobody would have room for what is left, were a tenth of the cache kept.
    idle.join(LentSequence("there", 3_000, 100))
    assert Planner([owner, busy, idle], Lending(reserve_percent=10)).loans(owner, first) == {}
    assert Planner([owner, busy, idle], Lending(reserve_percent=0)).loans(owner, first) != {}


def test_a_step_waits_for_a_part_elsewhere_that_takes_longer_than_the_one_here() -> None:
    owner, lender = Instance(0, PROFILE, 20_000), Instance(1, PROFILE, 20_000)
    owner.join(LentSequence("r", 8_000, 100, away={1: 6_000}))
    lender.hold(0, 6_000)
    alone = PROFILE.cost.step_ns(1, 2_000)
    waited = owner.attention_ns(6_000) + 80 * ROUND_TRIP_NS - owner.attention_ns(2_000)
    assert owner.step_ns([owner, lender], 0) == pytest.approx(alone + waited, rel=1e-6)
    assert lender.step_ns([owner, lender], 0) == pytest.approx(PROFILE.cost.step_ns(0, 6_000), rel=1e-6)
    # 16 tokens of a move are free, 32 cost what the paper measured.
    assert owner.step_ns([owner, lender], 16) == owner.step_ns([owner, lender], 0)
    assert owner.step_ns([owner, lender], 0) / owner.step_ns([owner, lender], 32) == pytest.approx(1 - 0.086)


def test_a_request_longer_than_one_cache_is_served_with_loans_and_refused_without() -> None:
    long = Arrival(at_ns=0, prompt_tokens=3 * CACHE_TOKENS, output_tokens=ANSWER_TOKENS)
    longest = 4 * CACHE_TOKENS - 3 * (CACHE_TOKENS * 5 // 100)
    over = Arrival(at_ns=0, prompt_tokens=longest, output_tokens=1)
    ends = []
    for lending in (PLACED, NOBODY_LENDS):
        report = simulate_infinite_llm(
            [long, over], 4, CACHE_TOKENS, PROFILE, lending=lending, slo=Objectives()
        )
        ends.append((report.endings.completed, report.endings.rejected))
    assert ends == [(1, {"too_long": 1}), (0, {"too_long": 2})]


def test_requests_longer_than_a_cache_are_all_served_though_every_instance_has_one_that_waits() -> None:
    long = CACHE_TOKENS + 2_000
    arrivals = [
        Arrival(at_ns=0, prompt_tokens=long if place % 8 < 4 else 1_000, output_tokens=20)
        for place in range(64)
    ]
    for clients in (0, 3):
        run = checked_run(arrivals, msgspec.structs.replace(PLACED, clients=clients))
        assert {outcome.end for outcome in run.outcomes.values()} == {"finished"}
    answer = Arrival(at_ns=0, prompt_tokens=1_000, output_tokens=CACHE_TOKENS)
    refused = checked_run([answer], PLACED)
    assert refused.outcomes["r0"].end == "too_long"


def test_the_same_requests_give_the_same_decisions() -> None:
    one, two = (simulated(1.0, Lending(), turns=5) for _ in range(2))
    assert one.digest == two.digest
    assert one.pools == two.pools


def test_the_command_simulates_lending_and_refuses_what_makes_no_sense(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", "--system", "infinite-llm", "--requests", "60", "--decode", "4"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--profile", "llama2-70b-2xa100"])
    assert not left.value.code
    assert "greedy lending" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main([*words, "--move-tokens", "0"])
    assert left.value.code
    assert "--move-tokens 0: 1 to 160" in capsys.readouterr().err
