"""Roles that change in a simulated cluster: by command at any time, and by the planner under a load that swings."""

from __future__ import annotations

import random

import pytest

from benchmarks.papers.experiments.elastic import SLO, WORKERS, Swinging
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.events import RoleWanted
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import ELASTIC_ROLES

CHANGES = 200


def test_two_hundred_changes_lose_and_repeat_no_request() -> None:
    draw = random.Random(3)
    arrivals = [
        Arrival(
            at_ns=number * SECOND_NS // 2,
            prompt_tokens=draw.randrange(10, 4_000),
            output_tokens=draw.randrange(1, 60),
        )
        for number in range(600)
    ]
    world = World(ClusterShape(prefill=4, decode=4), Policy(admission="none"), LLAMA3_A800, elastic=True)
    ends: list[str] = []
    ended = world.context.ended
    world.context.ended = lambda request_id, end: (ends.append(request_id), ended(request_id, end))[1]
    for number in range(4 * CHANGES):
        worker_id = draw.choice([*world.prefill_workers, *world.decode_workers])
        wanted = RoleWanted(target_id=worker_id, role=draw.choice(ELASTIC_ROLES))
        world.clock.at(number * SECOND_NS * 3 // 8, world.say, wanted)
    assert world.run(arrivals, sample_ns=10 * SECOND_NS)
    assert world.role_changes >= CHANGES
    assert len(ends) == len({*ends}) == len(arrivals)
    assert {outcome.end for outcome in world.outcomes.values()} == {"finished"}
    for _ in range(10):  # the last end is told before the log has it
        world.clock.step()
    assert not any(worker.orders for worker in world.core.state.workers.values())


@pytest.mark.slow
def test_roles_that_follow_a_swing_do_better_than_the_split_that_they_begin_with() -> None:
    load = Swinging(name="", prompt=9_000, answer=400, prompts_share=0.0, seed=5)
    arrivals = load.arrivals(2)
    stays, follows = (
        simulate(
            arrivals,
            ClusterShape(prefill=WORKERS // 2, decode=WORKERS // 2),
            Policy(ttft_slo_ns=SLO.ttft_ns, tbt_slo_ns=SLO.tbt_ns, elastic=mode),
            LLAMA3_A800,
            RunOptions(slo=SLO),
        )
        for mode in ("off", "on")
    )
    assert (stays.role_changes, follows.role_changes > 2) == (0, True)
    assert follows.service.goodput_s > 1.05 * stays.service.goodput_s
