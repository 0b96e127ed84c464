"""Simulated decode workers that lend by the core's own planner: room, time of a step, moves, refusals."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from halfmoon.cli import up
from halfmoon.cli.main import main
from halfmoon.cli.processes import options
from halfmoon.cli.simulation import simulate
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.simulation.batch import Steps
from halfmoon.conductor.simulation.cluster_shape import ClusterShape, ConfigurationImpossible
from halfmoon.conductor.simulation.experiments.lending import PLACED
from halfmoon.conductor.simulation.experiments.lending_arrivals import arrivals, dealt_capacity
from halfmoon.conductor.simulation.lending import MoveUnderWay, longest_wait_ns, with_parts
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA2_TWO_A100, Profile
from halfmoon.conductor.simulation.systems.infinite_llm import NOBODY_LENDS
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Decision, EndMove, Loan, MoveKv
from halfmoon.schemas.events import KvMoved, KvMoveRefused, Stamped
from halfmoon.schemas.policy import Policy

MS, S = 1_000_000, 1_000_000_000
BLOCK = 256
#: Steps of 10 ms, 1 us for each token; a cache of 40 blocks.
SMALL = Profile(
    name="small",
    cost=CostProfile(
        prefill_per_token_ps=1_000_000, decode_base_ns=10 * MS, decode_per_context_token_ps=1_000_000
    ),
    layers=2,
    kv_heads=1,
    head_dim=64,
    activation_bytes=128,
    kv_bytes=40 * BLOCK * 512,
    pool_bytes=10**9,
    link_bytes_s=10**12,
    load_bytes_s=10**12,
)
LENDS = Policy(
    admission="none", tbt_slo_ns=0, ttft_slo_ns=10_000 * S, move_period_ns=S // 10, move_step_tokens=16
)


class Played:
    """A world that has run, with its log."""

    def __init__(
        self, arrivals: list[Arrival], policy: Policy = LENDS, *, lend: bool = True, decode: int = 2
    ) -> None:
        shape = ClusterShape(prefill=1, decode=decode, block_tokens=BLOCK, lend=lend)
        self.world = World(shape, policy, SMALL)
        self.log: list[tuple[Stamped, list[Decision]]] = []
        self.world.after_step = lambda event, decided: self.log.append((event, list(decided)))
        assert self.world.run(arrivals, sample_ns=S)
        for _ in range(20):  # what the last answers have decided
            self.world.clock.step()

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self.world.outcomes.values())

    def events(self, kind: type) -> list[object]:
        return [stamped.event for stamped, _ in self.log if isinstance(stamped.event, kind)]

    def decisions(self, kind: type) -> list[object]:
        return [one for _, decided in self.log for one in decided if isinstance(one, kind)]

    def nothing_held(self) -> bool:
        workers = self.world.decode_workers.values()
        return all(one.blocks_free == 40 and not one.held.orders and not one._lent_tokens for one in workers)


def arrival(at_ms: int, prompt: int, output: int) -> Arrival:
    return Arrival(at_ns=at_ms * MS, prompt_tokens=prompt, output_tokens=output)


#: Two long ones fill both caches in part; then those that come wait for room at one of them.
CROWD = [arrival(1_000, 9_000, 1_200), *(arrival(1_100 + at, 2_000, 600) for at in range(7))]


def test_a_request_longer_than_one_cache_is_served_where_workers_lend_and_refused_where_not() -> None:
    long = [arrival(1_000, 15_000, 50)]
    assert [one.end for one in Played(long, lend=False).outcomes] == ["too_long"]
    played = Played(long)
    assert [one.end for one in played.outcomes] == ["finished"]
    assert played.nothing_held()
    # Three caches hold it too, two of them have it: their attention is not added up but made side by side.
    alone = 10 * MS + 15_000 * 1_000
    assert played.outcomes[0].tbt_ns < 0.8 * alone


def test_moves_make_room_for_who_waits_and_every_request_ends() -> None:
    played = Played(CROWD)
    moved = played.events(KvMoved)
    assert moved
    assert {one.end for one in played.outcomes} == {"finished"}
    assert played.nothing_held()
    assert len(played.decisions(MoveKv)) == len(moved) + len(played.events(KvMoveRefused))
    still = Played(CROWD, msgspec.structs.replace(LENDS, move_period_ns=0))
    assert not still.decisions(MoveKv)
    ends = [max(one.ended_ns for one in each.outcomes) for each in (played, still)]
    assert ends[0] < ends[1], "who waited joins in the room, so the same tokens are made in less time"


def test_a_run_with_loans_and_moves_is_the_same_again_and_replays_identically() -> None:
    played = Played(CROWD)
    assert played.world.digest() == Played(CROWD).world.digest()
    core = Core()
    assert [core.step(stamped) for stamped, _ in played.log] == [decided for _, decided in played.log]


def test_a_move_that_takes_too_long_is_given_up_and_nothing_stays_held() -> None:
    slow = msgspec.structs.replace(LENDS, move_step_tokens=1, move_answer_ns=S)
    played = Played(CROWD, slow)
    assert played.decisions(EndMove)
    assert not played.events(KvMoved)
    assert {one.end for one in played.outcomes} == {"finished"}
    assert played.nothing_held()


def test_a_move_to_one_without_room_is_refused_and_changes_nothing() -> None:
    played = Played(CROWD)
    world = played.world
    owner, lender = world.decode_workers.values()
    lender.blocks_free = 3
    order = next(one for one in played.decisions(MoveKv) if isinstance(one, MoveKv))
    said: list[object] = []
    world.context.say = said.append
    owner.batch[order.order_id] = owner.waiting  # type: ignore[assignment]
    owner.move(msgspec.structs.replace(order, segments=4, lender_id=lender.worker_id))
    assert isinstance(said[0], KvMoveRefused)
    assert said[0].reason == "the lender has no room"
    assert (lender.blocks_free, lender.held.orders) == (3, {})
    assert lender.hold("o", "p", 2)
    lender.end_move(EndMove(plan_id="another", order_id="o", worker_id=lender.worker_id))
    assert lender.blocks_free == 1
    lender.end_move(EndMove(plan_id="p", order_id="o", worker_id=lender.worker_id))
    assert (lender.blocks_free, lender.held.orders) == (3, {})


def test_a_step_takes_the_longer_of_both_parts_and_what_is_lent_on_top() -> None:
    steps = Steps(SMALL.cost)
    steps.join("one", 1_000, 1_000)
    assert steps.step_ns(1, 1_000) == 11 * MS
    steps.away_tokens, steps.away_ns = 600, 0.5 * MS
    assert steps.step_ns(1, 1_000) == 10.5 * MS, "400 us here are hidden behind what others take"
    steps.lent_tokens = 2_000
    assert steps.step_ns(1, 1_000) == 12.5 * MS
    # A hundred steps until its own part takes as long: none of them is longer than the one before.
    steps.start_run(0, 1.0)
    assert steps.waiting_steps == 100
    assert steps.run_ns(100) == 1_250 * MS
    steps.advance(100)
    steps.start_run(0, 1.0)
    assert (steps.waiting_steps, steps.run_ns(2)) == (0, 25 * MS + 1_000)


def test_the_slowest_lender_counts_with_a_round_trip_for_each_layer() -> None:
    priced = with_parts(LLAMA2_TWO_A100)
    none = longest_wait_ns(priced, 256, [])
    one = longest_wait_ns(priced, 256, [[Loan(worker_id="a", segments=40)]])
    both = longest_wait_ns(
        priced, 256, [[Loan(worker_id="a", segments=40)], [Loan(worker_id="b", segments=10)]]
    )
    assert none == 0.0
    assert both == one > 80 * 33_000 + priced.cost.decode_per_context_token_ps * 40 * 256 / 1e3
    assert with_parts(priced) is priced


def test_more_tokens_a_step_make_a_move_short_and_its_steps_long() -> None:
    order = MoveKv(
        plan_id="p",
        order_id="o",
        request_id="r",
        worker_id="a",
        lender_id="b",
        segments=1,
        tokens_per_step=16,
    )
    free, fast = (
        MoveUnderWay(msgspec.structs.replace(order, tokens_per_step=each), 256) for each in (16, 32)
    )
    for one in (free, fast):
        one.begin(100)
    assert (free.steps_left(100), fast.steps_left(103)) == (16, 5)
    assert (free.slower, fast.slower) == (1.0, pytest.approx(1 / (1 - 0.086)))


def test_dealt_instances_bear_more_arrivals_by_lending_where_lengths_differ_and_no_more_where_they_do_not() -> (
    None
):
    gains = []
    for deviation in (0.0, 4.0):
        requests = arrivals(2, 1_500, deviation)
        alone, lent = (dealt_capacity(2, requests, one) for one in (NOBODY_LENDS, PLACED))
        gains.append(lent / alone)
    assert gains[0] == pytest.approx(1.0, abs=0.03)
    assert gains[1] > 1.3


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationImpossible, match="lend: workers that change roles do not lend"):
        World(ClusterShape(prefill=1, decode=2, lend=True), LENDS, SMALL, elastic=True)
    for words, told in (
        (["--system", "lamina"], "--lend: --system lamina"),
        (["--move-period-s", "-1"], "--move-period-s -1: 0 to 1,000,000"),
    ):
        with pytest.raises(SystemExit):
            main(["simulate", "--lend", "--requests", "2", *words])
        assert told in capsys.readouterr().err


def test_lending_is_simulated_under_the_policy_of_a_live_cluster() -> None:
    live, simulated = argparse.ArgumentParser(), argparse.ArgumentParser()
    up.add(live)
    simulate.add(simulated)
    started = options.policy_of(live.parse_args(["--lend"]))
    assumed = simulate.policy_of(simulated.parse_args(["--lend"]))
    for name in ("move_period_ns", "move_answer_ns", "arrival_wait_ns_max", "room_wait_ns_max"):
        assert getattr(assumed, name) == getattr(started, name) > 0, name
    assert simulate.policy_of(simulated.parse_args([])).move_period_ns == 0
