"""Mixed workers in the simulator: the iterations of a live one, in the time that the profile says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.conductor.simulation.mixed import SimulatedMixed, SimulatedMixedOrder
from halfmoon.conductor.simulation.options import ClusterShape, ConfigurationImpossible, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import PrefillFinished, Stamped, WorkerJoined
from halfmoon.schemas.policy import Policy
from halfmoon.workers.batch_former import Iteration
from halfmoon.workers.mixed.actions import RunIteration
from tests.workers.mixed_script import BLOCK_TOKENS, FAST, LAYOUT, Script, order

S, MS = 1_000_000_000, 1_000_000
ALL = Policy(admission="none")
#: Blocks of the size that the live machine of the tests has.
SMALL = ClusterShape(prefill=0, decode=0, mixed=1, block_tokens=BLOCK_TOKENS, pool_blocks=16, token_budget=8)
SEQUENCES = 6
#: Iterations of 20 to 60 ms have a few tokens each.
COST = CostProfile(
    prefill_base_ns=10 * MS,
    prefill_per_token_ps=5_000 * MS,
    prefill_per_token2_fs=200_000 * MS,
    decode_base_ns=10 * MS,
    decode_per_sequence_ns=1 * MS,
)

Rows = tuple[list[str], list[tuple[str, int, int]]]


def request(at_ms: int, tokens: int, answer: int = 10, chain: int = 1, block: int = 512) -> Arrival:
    keys = b"".join(chain.to_bytes(8, "big") + place.to_bytes(8, "big") for place in range(tokens // block))
    return Arrival(at_ns=at_ms * MS, prompt_tokens=tokens, output_tokens=answer, block_keys=keys)


def mixed(count: int, **fields: int) -> ClusterShape:
    return ClusterShape(prefill=0, decode=0, mixed=count, **fields)


def simulated(
    requests: list[tuple[int, int]], numerics: str, kv_blocks: int, budget: int = 8, iteration_ns: int = 0
) -> tuple[list[Rows], SimulatedMixed]:
    """The iterations of one worker, to which all of the (prompt, answer) come while the first one is computed."""
    profile = msgspec.structs.replace(LLAMA3_A800, cost=COST, batch_max=SEQUENCES, numerics=numerics)
    shape = {"kv_blocks": kv_blocks, "token_budget": budget, "iteration_ns": iteration_ns}
    world = World(msgspec.structs.replace(SMALL, **shape), ALL, profile)
    (worker,) = world.mixed_workers.values()
    made: list[Rows] = []
    form = worker.former.form

    def name_of(order_id: str) -> str:
        """That of the live machine."""
        return f"{int(worker.open[order_id].order.request_id[1:]) + 1}-1"

    def formed() -> Iteration:
        found = form()
        if found.tokens:
            chunks = [(name_of(chunk.name), chunk.start, chunk.tokens) for chunk in found.chunks]
            made.append(([name_of(name) for name in found.decodes], chunks))
        return found

    finish = worker._finish

    def finished(known: SimulatedMixedOrder) -> None:
        assert len(known.intervals) == known.output_tokens - 1, "no token twice, whatever was preempted"
        finish(known)

    worker.former.form, worker._finish = formed, finished  # type: ignore[method-assign]
    arrivals = [
        msgspec.structs.replace(request(0, prompt, answer, number, BLOCK_TOKENS), max_tokens=answer)
        for number, (prompt, answer) in enumerate(requests)
    ]
    assert world.run(arrivals, sample_ns=S)
    assert [outcome.end for outcome in world.outcomes.values()] == ["finished"] * len(requests)
    return made, worker


def live(
    requests: list[tuple[int, int]], numerics: str, kv_blocks: int, budget: int, iteration_ns: int
) -> list[RunIteration]:
    """The same of the live machine."""
    layout = FAST if numerics == "fast" else LAYOUT
    script = Script(
        layout,
        profile=COST,
        kv_blocks=kv_blocks,
        batch_max=SEQUENCES,
        budget_tokens=budget,
        iteration_ns=iteration_ns,
    )
    first, *others = [
        order(number, prompt, answer) for number, (prompt, answer) in enumerate(requests, start=1)
    ]
    script.begin(first)
    while script.step is None:
        script.advance()
    for other in others:
        script.begin(other)
    script.run()
    return script.steps


def live_rows(made: RunIteration) -> Rows:
    """Exact numerics have a row for each block of a chunk."""
    chunks: dict[str, tuple[str, int, int]] = {}
    for row in made.chunks:
        name = row.sequence.order_id
        _, start, tokens = chunks.get(name, (name, row.start, 0))
        chunks[name] = (name, start, tokens + len(row.token_ids))
    return [row.sequence.order_id for row in made.decodes], [*chunks.values()]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@given(
    requests=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=1, max_size=7),
    kv_blocks=st.integers(9, 20),
    budget=st.sampled_from([4, 5, 8, 13]),
    iteration_ms=st.sampled_from([0, 20, 40, 60]),
)
@settings(max_examples=60, deadline=None)
def test_iterations_are_those_of_the_live_machine(
    numerics: str, requests: list[tuple[int, int]], kv_blocks: int, budget: int, iteration_ms: int
) -> None:
    bounds = (kv_blocks, budget, iteration_ms * MS)
    here, worker = simulated(requests, numerics, *bounds)
    assert here == [live_rows(step) for step in live(requests, numerics, *bounds)]
    assert (worker.open, worker.former.running, worker.former.waiting) == ({}, (), ())


def test_who_is_preempted_computes_its_prompt_again_and_repeats_no_token() -> None:
    made, worker = simulated([(8, 12), (8, 12)], "exact", 7)
    assert worker.preemptions > 0
    again = [name for _, chunks in made for name, start, _ in chunks if start == 0]
    assert len(again) == 2 + worker.preemptions


def test_an_iteration_takes_what_the_profile_says_of_its_rows() -> None:
    outcomes: dict[str, Outcome] = {}
    cost = LLAMA3_A800.cost
    report = simulate(
        [request(0, 2_000, answer=40), request(300, 3_000, answer=1, chain=2)],
        mixed(1, token_budget=1_001),
        ALL,
        LLAMA3_A800,
        outcomes=outcomes,
    )
    first, second = outcomes.values()
    # Alone, by chunks of 1,001 and 999 tokens: the base counts in each.
    assert first.ttft_ns == cost.iteration_ns([(0, 1_001)], 0, 0) + cost.iteration_ns([(1_001, 999)], 0, 0)
    assert cost.iteration_ns([], 3, 5_000) == cost.step_ns(3, 5_000)
    assert cost.iteration_ns([(0, 700)], 0, 0) == cost.prefill_ns(700, 0)
    # Of two bases the larger one counts, whichever it is.
    learned = msgspec.structs.replace(cost, prefill_base_ns=0)
    both_ns = cost.iteration_ns([(0, 700)], 3, 5_000)
    assert both_ns == cost.prefill_ns(700, 0) + cost.step_ns(3, 5_000) - cost.decode_base_ns
    assert learned.iteration_ns([(0, 700)], 3, 5_000) == learned.prefill_ns(700, 0) + cost.step_ns(3, 5_000)
    assert cost.prefill_base_ns == cost.decode_base_ns
    # Beside a decode the second one has a thousand tokens an iteration; the first waits for these.
    chunk_ns = [cost.iteration_ns([(at, 1_000)], 1, 2_010) for at in (0, 1_000, 2_000)]
    assert second.ttft_ns == pytest.approx(sum(chunk_ns), abs=2 * cost.step_ns(1, 2_040))
    assert first.tbt_ns == pytest.approx(sum(chunk_ns) / 3, rel=0.05)
    # What a chunk adds is a prefill's time, the rest a decode's: together the time that the device computed.
    computed_s = report.devices.prefill_gpu_s + report.devices.decode_gpu_s
    assert first.compute_ns + second.compute_ns == pytest.approx(
        report.devices.prefill_gpu_s * 1e9, rel=0.001
    )
    assert computed_s == pytest.approx(report.service.duration_s, rel=0.01)


def test_a_prefix_is_read_from_its_own_node_and_from_another() -> None:
    """Two workers: each turn begins with the one before, and the same prompts come to both."""
    outcomes: dict[str, Outcome] = {}
    arrivals = [
        request(0, 8_192, answer=200),
        request(4_000, 8_192, answer=200),
        request(4_001, 8_192, answer=200),
        request(4_002, 8_192, answer=200),
    ]
    report = simulate(arrivals, mixed(2), ALL, LLAMA3_A800, outcomes=outcomes)
    cold, *warm = outcomes.values()
    assert cold.local_tokens + cold.fetched_tokens == 0
    assert all(each.local_tokens + each.fetched_tokens == 15 * 512 for each in warm)
    assert any(each.fetched_tokens for each in warm)
    assert report.traffic.bytes_fetched == sum(each.fetched_tokens * LLAMA3_A800.token_bytes for each in warm)
    assert all(each.ttft_ns < cold.ttft_ns / 2 for each in warm)
    assert {each.prefill_id for each in warm} == {"mixed-0", "mixed-1"}


@pytest.mark.parametrize("waits", [True, False])
def test_many_questions_about_one_new_text_compute_it_once(waits: bool) -> None:
    outcomes: dict[str, Outcome] = {}
    arrivals = [request(at_ms, 8_192, answer=20) for at_ms in range(5)]
    policy = Policy(admission="none", coming_blocks=True, coming_at_mixed=waits)
    simulate(arrivals, mixed(1, token_budget=12_000), policy, LLAMA3_A800, outcomes=outcomes)
    reused = [outcome.local_tokens for outcome in outcomes.values()]
    assert reused == ([0, *[15 * 512] * 4] if waits else [0, 0, 0, 0, 15 * 512])


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (8_192, 900 * MS)),
        ({"token_budget": 700}, (700, 0)),
        ({"token_budget": 700, "iteration_ns": 5 * MS}, (700, 5 * MS)),
    ],
)
def test_what_is_told_to_the_log_is_what_a_live_worker_tells(
    options: dict[str, int], bounds: tuple[int, int]
) -> None:
    world = World(mixed(1, **options), ALL, LLAMA3_A800)
    seen: list[Stamped] = []
    world.after_step = lambda stamped, _: seen.append(stamped)
    assert world.run([request(0, 1_024, answer=3)], sample_ns=S)
    while world.core.state.requests:
        world.clock.step()
    assert [type(each.event).__name__ for each in seen if hasattr(each.event, "order_id")] == [
        "PrefillFinished",
        "RequestFinished",
    ]
    (joined,) = [each.event for each in seen if isinstance(each.event, WorkerJoined)]
    assert (joined.role, joined.may_become) == ("mixed", [])
    assert (joined.token_budget, joined.iteration_ns) == bounds
    (prefilled,) = [each.event for each in seen if isinstance(each.event, PrefillFinished)]
    assert (prefilled.prompt_tokens, prefilled.cached_local_tokens, prefilled.pushed_bytes) == (1_024, 0, 0)
    assert prefilled.compute_ns == world.outcomes["r0"].compute_ns > 0


def test_who_is_preempted_computes_the_cached_part_of_its_prompt_too() -> None:
    """Its blocks were let go of when its first token was drawn."""
    profile = msgspec.structs.replace(LLAMA3_A800, numerics="exact")
    world = World(msgspec.structs.replace(SMALL, kv_blocks=7), ALL, profile)
    (worker,) = world.mixed_workers.values()
    starts: list[int] = []
    made = worker.former.made

    def noted() -> Iteration:
        found = made()
        starts.extend(chunk.start for chunk in found.chunks)
        return found

    worker.former.made = noted  # type: ignore[method-assign]
    arrivals = [
        msgspec.structs.replace(request(at_ms, 8, answer, block=BLOCK_TOKENS), max_tokens=answer)
        for at_ms, answer in ((0, 1), (9_000, 12), (9_000, 12))
    ]
    assert world.run(arrivals, sample_ns=S)
    assert worker.preemptions > 0
    # The first one is cold. Of two blocks the others read one, but not again.
    assert starts[:3] == [0, 4, 4]
    assert starts.count(0) == 1 + worker.preemptions


def test_loading_a_prefix_takes_its_time_where_it_is_slower_than_computing() -> None:
    slow = msgspec.structs.replace(LLAMA3_A800, load_bytes_s=1_000_000_000)
    outcomes: dict[str, Outcome] = {}
    arrivals = [request(0, 4_096, answer=1), request(9_000, 4_096, answer=1)]
    simulate(arrivals, mixed(1, token_budget=8_192), ALL, slow, outcomes=outcomes)
    assert outcomes["r1"].local_tokens == 3_584
    assert outcomes["r1"].ttft_ns == 3_584 * slow.token_bytes


def test_an_order_that_is_taken_back_leaves_nothing_and_holds_up_nobody() -> None:
    world = World(mixed(1, token_budget=512), ALL, LLAMA3_A800)
    (worker,) = world.mixed_workers.values()
    begun = [
        request(0, 2_048, answer=1),
        request(9_000, 4_096, answer=20),  # its first half is cached
        request(9_001, 4_096, answer=20, chain=2),
    ]

    def take_back() -> None:
        order_id = next(iter(worker.open))
        assert worker.former.progress(order_id) == (2_560, 4_096)
        assert worker.node.pool.held == 4
        worker.cancel(order_id)
        world.ended("r1", "cancelled")

    # In its second iteration.
    first_ns = LLAMA3_A800.cost.iteration_ns([(2_048, 512)], 0, 0)
    world.clock.after(9 * S + first_ns + MS, take_back)
    assert world.run(begun, sample_ns=S)
    assert [each.end for each in world.outcomes.values()] == ["finished", "cancelled", "finished"]
    assert (worker.open, worker.former.running, worker.former.waiting) == ({}, (), ())
    assert worker.node.pool.held == 0
    assert len(worker.node.pool) == 4 + 8  # the blocks of those that were computed whole


@pytest.mark.parametrize("policy", ["halfmoon", "random", "mooncake"])
def test_beside_two_pools_every_request_ends(conversation: list[Arrival], policy: str) -> None:
    outcomes: dict[str, Outcome] = {}
    report = simulate(
        conversation[:150],
        ClusterShape(prefill=1, decode=1, mixed=2),
        Policy(name=policy, ttft_slo_ns=10 * S, tbt_slo_ns=200 * MS),
        LLAMA3_A800,
        RunOptions(seed=3, noise_percent=10),
        outcomes=outcomes,
    )
    assert report.endings.completed + sum(report.endings.rejected.values()) == 150
    finished = [each for each in outcomes.values() if each.end == "finished"]
    assert {each.prefill_id for each in finished} == {"prefill-0", "mixed-0", "mixed-1"}
    for each in finished:
        assert each.arrived_ns < each.first_token_ns <= each.ended_ns
        assert (each.prefill_id == each.decode_id) == each.prefill_id.startswith("mixed")
    assert (report.load[-1].prefill, report.load[-1].decode, report.load[-1].mixed) == (1, 1, 2)
    assert sum(each.compute_ns for each in finished) <= report.devices.prefill_gpu_s * 1.001e9


def test_without_a_token_budget_an_iteration_keeps_the_objective_however_long_the_prompts_are() -> None:
    policy = Policy(admission="none", tbt_slo_ns=100 * MS)
    arrivals = [request(0, 2_000, answer=400), *(request(300 + n, 40_000, 2, n + 2) for n in range(3))]

    def run(shape: ClusterShape) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        simulate(arrivals, shape, policy, LLAMA3_A800, outcomes=outcomes)
        return list(outcomes.values())

    first, *long = run(mixed(1))
    assert 80 * MS < first.tbt_ns <= 90 * MS
    # So many tokens as hold it at the prompts' start: at their end they take longer.
    tokens = next(n for n in range(2_000) if LLAMA3_A800.cost.iteration_ns([(0, n)], 1, 2_000) > 90 * MS)
    slow, *_ = run(mixed(1, token_budget=tokens))
    assert slow.tbt_ns > 200 * MS
    # Each iteration has what it can take: little is lost to the time that decodes take beside them.
    alone_ns = LLAMA3_A800.cost.prefill_ns(40_000, 0)
    assert long[0].ttft_ns < 1.25 * alone_ns


def test_a_long_cached_prefix_is_loaded_beside_decodes_that_keep_the_objective() -> None:
    policy = Policy(admission="none", tbt_slo_ns=100 * MS)
    world = World(mixed(1), policy, LLAMA3_A800)
    (worker,) = world.mixed_workers.values()
    longest: dict[str, int] = {}
    finish = worker._finish

    def finished(known: SimulatedMixedOrder) -> None:
        longest[known.order.request_id] = max(known.intervals, default=0)
        finish(known)

    worker._finish = finished  # type: ignore[method-assign]
    arrivals = [
        request(0, 122_880, 1),
        request(200_000, 2_000, 400, chain=2),
        request(200_300, 122_880, 1),
        request(300_000, 122_880, 1),
    ]
    assert world.run(arrivals, sample_ns=S)
    _, _, beside, alone = world.outcomes.values()
    assert beside.local_tokens == alone.local_tokens == 239 * 512
    load_ns = 239 * 512 * LLAMA3_A800.token_bytes * S // LLAMA3_A800.load_bytes_s
    assert load_ns > 300 * MS
    assert longest["r1"] <= 90 * MS
    assert beside.ttft_ns > alone.ttft_ns > load_ns


@pytest.mark.parametrize(("prefill", "decode", "count"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (0, 1, 0)])
def test_workers_that_serve_nobody_are_refused(prefill: int, decode: int, count: int) -> None:
    with pytest.raises(ConfigurationImpossible, match="at least one worker is needed"):
        World(ClusterShape(prefill=prefill, decode=decode, mixed=count), ALL, LLAMA3_A800)
