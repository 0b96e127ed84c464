"""Mixed workers in the simulated world: obeyed as live, accounted for, and compared with pools of their own."""

from __future__ import annotations

import msgspec
import pytest

from halfmoon.conductor.simulation.batching.iteration_times import ProfileTimes
from halfmoon.conductor.simulation.batching.mixed_worker import SimulatedMixedOrder, SimulatedMixedWorker
from halfmoon.conductor.simulation.cluster_shape import ClusterShape, ConfigurationImpossible
from halfmoon.conductor.simulation.profiles import Profile, load_profile
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import DecodeStarted, PrefillFinished, RequestFinished, Stamped
from halfmoon.schemas.policy import Policy

S, MS = 1_000_000_000, 1_000_000
POLICY = Policy(ttft_slo_ns=60 * S, tbt_slo_ns=S, admission="none")
ALONE = ClusterShape(prefill=0, decode=0, mixed=1, token_budget=2_048)
KEYS = b"".join(bytes([place] * 16) for place in range(7))


def profile() -> Profile:
    return load_profile("a800")


def arrival(at_ns: int = 0, prompt: int = 4_000, output: int = 10, keys: bytes = b"") -> Arrival:
    return Arrival(at_ns=at_ns, prompt_tokens=prompt, output_tokens=output, block_keys=keys)


def played(arrivals: list[Arrival], cluster: ClusterShape, policy: Policy = POLICY) -> World:
    world = World(cluster, policy, profile())
    world.run(arrivals, sample_ns=10**10)
    while world.core.state.requests:
        world.clock.step()
    return world


def test_a_prompt_goes_through_in_chunks_of_the_budget_and_decodes_one_token_an_iteration() -> None:
    world = played([arrival(prompt=5_000, output=4)], ALONE)
    outcome, times = world.outcomes["r0"], ProfileTimes(profile().cost)
    chunks = [(0, 2_048), (2_048, 2_048), (4_096, 904)]
    assert outcome.ttft_ns == sum(int(times.iteration_ns([chunk], 0, 0)) for chunk in chunks)
    steps = [int(times.iteration_ns([], 1, 5_000 + drawn)) for drawn in (1, 2, 3)]
    assert outcome.ended_ns - outcome.first_token_ns == sum(steps)
    assert outcome.tbt_ns == steps[-1]
    assert (outcome.prefill_id, outcome.decode_id) == ("mixed-0", "mixed-0")


def test_who_decodes_waits_for_a_chunk_and_no_longer() -> None:
    first, second = arrival(prompt=400, output=60), arrival(100 * MS, prompt=10_000, output=2)
    world = played([first, second], ALONE)
    times, most = ProfileTimes(profile().cost), 0.0
    for start in range(0, 10_000, 2_047):
        most = max(most, times.iteration_ns([(start, min(2_047, 10_000 - start))], 1, 500))
    assert 0.5 * most < world.outcomes["r0"].tbt_ns <= most
    whole = profile().cost.prefill_ns(10_000, 0)
    assert world.outcomes["r0"].tbt_ns < whole / 3
    # What is the chunks', without what the decodes beside them would have taken.
    assert world.outcomes["r1"].compute_ns == pytest.approx(whole, rel=0.05)
    # It came in the middle of a step.
    assert 0 < world.outcomes["r1"].queue_ns < times.iteration_ns([], 1, 500)


def test_cached_blocks_are_used_where_they_are_and_fetched_from_a_prefill_node() -> None:
    again = played([arrival(keys=KEYS), arrival(10 * S, keys=KEYS)], ALONE).outcomes
    assert (again["r0"].local_tokens, again["r1"].local_tokens) == (0, 7 * 512)
    assert again["r1"].ttft_ns < again["r0"].ttft_ns / 3
    # Beside a pair: whoever computes the second prompt takes the blocks from where the first one was computed.
    cluster = msgspec.structs.replace(ALONE, prefill=1, decode=1)
    later = played([arrival(keys=KEYS, output=3_000), arrival(S, keys=KEYS)], cluster).outcomes["r1"]
    assert later.local_tokens + later.fetched_tokens == 7 * 512


def test_a_cache_that_is_too_small_for_all_preempts_and_draws_no_token_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    finish = SimulatedMixedWorker._finish

    def noted(worker: SimulatedMixedWorker, known: SimulatedMixedOrder) -> None:
        drawn.append(1 + len(known.intervals))
        finish(worker, known)

    monkeypatch.setattr(SimulatedMixedWorker, "_finish", noted)
    small = msgspec.structs.replace(ALONE, kv_blocks=24, block_tokens=64)
    # From short answers the conductor learns to expect short ones, so that it books too little for the last.
    short = [arrival(n * S, prompt=300, output=10) for n in range(30)]
    long = [arrival(60 * S + n * MS, prompt=300, output=400) for n in range(4)]
    arrivals = [msgspec.structs.replace(one, max_tokens=400) for one in short + long]
    world = played(arrivals, small)
    worker = world.mixed_workers["mixed-0"]
    assert worker.preemptions > 0
    assert [one.end for one in world.outcomes.values()] == ["finished"] * 34
    assert sorted(drawn) == [10] * 30 + [400] * 4
    assert not worker.open
    assert not worker.former.running
    assert not worker.former.waiting


def test_each_order_is_answered_once_and_in_order() -> None:
    world = World(msgspec.structs.replace(ALONE, prefill=1, decode=1), POLICY, profile())
    said: dict[str, list[type]] = {}

    def note(stamped: Stamped, _: list[Decision]) -> None:
        if isinstance(stamped.event, PrefillFinished | DecodeStarted | RequestFinished):
            said.setdefault(stamped.event.request_id, []).append(type(stamped.event))

    world.after_step = note
    world.run([arrival(n * S // 4, prompt=3_000, output=50) for n in range(40)], sample_ns=10**10)
    while world.core.state.requests:
        world.clock.step()
    assert set(map(tuple, said.values())) == {(PrefillFinished, DecodeStarted, RequestFinished)}
    assert {one.prefill_id for one in world.outcomes.values()} == {"mixed-0", "prefill-0"}


def test_the_same_in_gives_the_same_out() -> None:
    arrivals = [arrival(n * S // 8, prompt=2_000 + 37 * n, output=20 + n) for n in range(50)]
    cluster = msgspec.structs.replace(ALONE, mixed=2)
    digests = {simulate(arrivals, cluster, POLICY, profile(), noise_percent=10).digest for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        (ClusterShape(prefill=0, decode=0), "prefill: at least one"),
        (ClusterShape(prefill=1, decode=0, mixed=1), "decode: at least one"),
    ],
)
def test_a_pool_without_its_other_half_is_refused(cluster: ClusterShape, named: str) -> None:
    with pytest.raises(ConfigurationImpossible, match=named):
        World(cluster, POLICY, profile())
