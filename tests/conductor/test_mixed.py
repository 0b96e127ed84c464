"""Mixed workers in the core: when one is chosen over a pair, what is booked there, and what becomes of its orders."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from conductor_scripts import (
    LAYOUT,
    MS,
    NULL_LAYOUT,
    PROFILE,
    S,
    Script,
    arrived,
    decode,
    finished,
    keys,
    prefill,
    prefilled,
    stored,
    worker,
)

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.mixed_candidates import chunks_beside, least_mixed, mixed_candidates
from halfmoon.conductor.core.placement.policies import Least, mixed_rule
from halfmoon.conductor.core.placement.prefix_match import match_prefix
from halfmoon.conductor.replay.explain import remarks, verdict_text
from halfmoon.conductor.replay.state_text import described
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import (
    CancelOrder,
    RejectRequest,
    ReleaseOrder,
    StartDecode,
    StartMixed,
    StartPrefill,
)
from halfmoon.schemas.events import (
    DecodeStarted,
    FrontendJoined,
    PolicyChanged,
    PrefillFailed,
    RequestCancelled,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import Policy


def mixed(number: int = 0, **fields: Any) -> WorkerJoined:
    return worker(f"m{number}", "mixed", **{"token_budget": 216, **fields})


def cluster(*workers: WorkerJoined, **policy: Any) -> Script:
    return Script(*workers, FrontendJoined(frontend_id="f1", incarnation="i1"), **policy)


def placed(script: Script, request_id: str = "r1", **fields: Any) -> StartMixed:
    (order,) = script.orders(arrived(request_id, **fields))
    assert isinstance(order, StartMixed), order
    return order


@pytest.mark.parametrize("older", [False, True])
def test_a_cluster_of_one_mixed_worker_serves(older: bool) -> None:
    script = cluster(mixed())
    order = placed(script)
    assert (order.worker_id, order.prompt_tokens, order.max_tokens, order.placement) == ("m0", 1_000, 100, 1)
    record = script.core.state.workers["m0"]
    assert list(record.prompts.orders) == list(record.orders) == [order.order_id]
    # 10 ms and 0.1 ms a token; a step of one sequence beside nobody.
    assert order.predicted.ttft_ns == 110 * MS
    assert order.predicted.tbt_ns < 15 * MS
    told = prefilled(order.order_id, "r1", "m0", compute_ns=100 * MS, decodes=not older)
    script(told, after_ns=110 * MS)
    assert script.core.state.orders[order.order_id].decode.running is not older
    assert (record.prompts.orders, record.prompts.reserved_ns) == ({}, 0)
    assert list(record.orders) == [order.order_id]
    if older:
        script(DecodeStarted(order_id=order.order_id, request_id="r1", worker_id="m0"))
        assert script.core.state.orders[order.order_id].decode.running
    script(finished(order.order_id, "r1", "m0"), after_ns=S)
    assert (record.orders, record.reserved_blocks, record.context_tokens) == ({}, 0, 0)
    assert script.core.state.requests == {}


def test_prompts_wait_for_prompts_and_take_longer_beside_decodes() -> None:
    script = cluster(mixed())
    first = placed(script, "r1")
    second = placed(script, "r2")
    assert second.predicted.queue_ns == 110 * MS
    # Another is in hand: its iterations carry chunks of two blocks, 10 + 20 ms.
    assert second.predicted.tbt_ns - first.predicted.tbt_ns > 30 * MS
    for order in (first, second):
        script(prefilled(order.order_id, order.request_id, "m0", compute_ns=110 * MS), after_ns=120 * MS)
    third = placed(script, "r3")
    assert third.predicted.queue_ns == 0
    # 1,000 tokens in five iterations, each with a step of both.
    assert third.predicted.prefill_ns > 110 * MS + 5 * 12 * MS


@pytest.mark.parametrize(
    ("budget", "decoding", "numerics", "tokens"),
    [
        (216, 0, "exact", 200),
        (216, 16, "exact", 200),
        (216, 17, "exact", 100),
        (50, 9, "exact", 100),
        (50, 9, "fast", 41),
    ],
)
def test_a_chunk_is_whole_blocks_in_exact_numerics(
    budget: int, decoding: int, numerics: str, tokens: int
) -> None:
    layout = msgspec.structs.replace(LAYOUT, numerics=numerics)
    script = cluster(mixed(layout=layout, token_budget=budget))
    assert chunks_beside(script.core.state.workers["m0"], decoding, 0).tokens == tokens


def test_the_time_of_an_iteration_bounds_its_chunks_and_the_time_between_tokens() -> None:
    """Iterations of 60 ms: two blocks of 100 tokens take 20 ms in each beside a step of 12 and more."""
    free, bound = (
        cluster(mixed(iteration_ns=ns, token_budget=10_000), admission="none") for ns in (0, 60 * MS)
    )
    predicted = []
    for script in (free, bound):
        orders = [placed(script, f"r{number}") for number in range(2)]
        for order in orders:
            script(prefilled(order.order_id, order.request_id, "m0", compute_ns=110 * MS), after_ns=120 * MS)
        predicted.append(placed(script, "long", tokens=9_000, max_tokens=10).predicted)
    long_free, long_bound = predicted
    # Ten thousand tokens in one iteration stop the others for a second.
    assert long_free.tbt_ns > 1_000 * MS
    assert 60 * MS <= long_bound.tbt_ns < 65 * MS
    step_ns = free.core.state.workers["m0"].cost.step_ns(2, 2 * 1_100)
    assert long_free.prefill_ns == 910 * MS + step_ns
    assert long_bound.prefill_ns == 910 * MS + -(-910 * MS // (60 * MS - step_ns)) * step_ns


def test_an_iteration_that_is_too_short_for_a_block_has_one_all_the_same() -> None:
    script = cluster(mixed(iteration_ns=1 * MS))
    worker = script.core.state.workers["m0"]
    assert chunks_beside(worker, 3, 3_000).ns == worker.cost.chunk_ns(0, 100) > 1 * MS


def test_the_earlier_first_token_decides_between_a_pair_and_a_mixed_worker() -> None:
    script = cluster(prefill(), decode(), mixed())
    # All are idle: as early, as fast between tokens, and nothing moves.
    first = placed(script, "r1")
    # Now the mixed worker has a queue.
    start, then = script.orders(arrived("r2"))
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    # And now both have; the mixed one's is as long, and it has others in its batch.
    script(prefilled(first.order_id, "r1", "m0", compute_ns=100 * MS), after_ns=10 * MS)
    assert placed(script, "r3").worker_id == "m0"


def test_where_nothing_is_predicted_the_fewest_orders_decide() -> None:
    nothing = {"layout": NULL_LAYOUT, "profile": CostProfile()}
    script = cluster(prefill(**nothing), decode(**nothing), mixed(**nothing))
    kinds = [type(script.orders(arrived(f"r{number}"))[0]) for number in range(6)]
    assert kinds == [StartMixed, StartPrefill] * 3


def test_a_prefix_on_the_mixed_workers_node_counts() -> None:
    script = cluster(prefill(), decode(), mixed(), mixed(1))
    script(stored("m1", keys(9)))
    order = placed(script)
    assert (order.worker_id, order.local_blocks) == ("m1", 9)


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        ("never", [StartPrefill, StartDecode]),
        ("preferred", [StartMixed]),
        ("predicted", [StartPrefill, StartDecode]),
    ],
)
def test_an_operator_may_choose(choice: Any, kinds: list[type]) -> None:
    script = cluster(prefill(), decode(), mixed())
    placed(script, "r1")
    script(PolicyChanged(policy=Policy(mixed_choice=choice)))
    assert [type(order) for order in script.orders(arrived("r2"))] == kinds


def test_what_no_pair_takes_a_mixed_worker_does_and_the_reverse() -> None:
    small = cluster(prefill(), decode(kv_blocks=5), mixed())
    assert placed(small).worker_id == "m0"
    reverse = cluster(prefill(), decode(), mixed(kv_blocks=5))
    assert isinstance(reverse.orders(arrived())[0], StartPrefill)
    neither = cluster(prefill(), decode(kv_blocks=5), mixed(kv_blocks=6))
    (refused,) = neither.orders(arrived())
    assert isinstance(refused, RejectRequest)
    assert refused.reason == "too_long"


@pytest.mark.parametrize(
    ("fields", "slo", "reason"),
    [
        ({}, {"ttft_slo_ns": 100 * MS}, "ttft_slo"),
        ({}, {"tbt_slo_ns": 5 * MS}, "tbt_slo"),
        ({"kv_blocks": 11, "batch_max": 1}, {}, "no_room"),
    ],
)
def test_a_mixed_worker_refuses_early_by_what_is_predicted(
    fields: dict[str, Any], slo: dict[str, Any], reason: str
) -> None:
    script = cluster(mixed(**fields))
    if reason == "no_room":
        placed(script, "r0")
        script(prefilled("4-1", "r0", "m0"))
    (refused,) = script.orders(arrived("r1", **slo))
    assert isinstance(refused, RejectRequest)
    assert refused.reason == reason
    assert refused.retry_after_ns >= 0


def test_a_full_queue_refuses() -> None:
    script = cluster(mixed(), queued_max_per_worker=1)
    placed(script)
    (refused,) = script.orders(arrived("r2"))
    assert isinstance(refused, RejectRequest)
    assert refused.reason == "queue_full"


def test_an_engine_that_computes_nothing_has_room_for_any_number() -> None:
    script = cluster(mixed(layout=NULL_LAYOUT, profile=CostProfile()))
    assert {placed(script, f"r{number}").worker_id for number in range(200)} == {"m0"}


@pytest.mark.parametrize("decodes", [False, True])
def test_a_mixed_worker_that_dies_has_its_requests_placed_again(decodes: bool) -> None:
    script = cluster(mixed(), mixed(1))
    order = placed(script)
    if decodes:
        script(prefilled(order.order_id, "r1", order.worker_id))
    again = [
        one for one in script(WorkerLeft(worker_id=order.worker_id)) if not isinstance(one, ReleaseOrder)
    ]
    (anew,) = [one for one in again if isinstance(one, StartMixed)]
    assert (anew.worker_id, anew.placement) == ({"m0": "m1", "m1": "m0"}[order.worker_id], 2)
    assert not any(isinstance(one, CancelOrder) for one in again)


def test_what_a_mixed_worker_has_may_be_taken_over_by_a_pair_and_the_reverse() -> None:
    script = cluster(prefill(), decode(), mixed())
    order = placed(script)
    start = [one for one in script(WorkerLeft(worker_id="m0")) if isinstance(one, StartPrefill)]
    assert [one.worker_id for one in start] == ["p0"]
    script(mixed(incarnation="i2"))
    lost = script(WorkerLeft(worker_id="d0"))
    assert [one.worker_id for one in lost if isinstance(one, StartMixed)] == ["m0"]
    assert [one.worker_id for one in lost if isinstance(one, CancelOrder)] == ["p0"]
    assert order.order_id not in script.core.state.orders


def test_an_order_that_fails_is_not_cancelled_and_is_placed_elsewhere() -> None:
    script = cluster(prefill(), decode(), mixed())
    order = placed(script)
    failed = PrefillFailed(
        order_id=order.order_id, request_id="r1", worker_id="m0", reason="its store was full"
    )
    decided = script(failed)
    assert not any(isinstance(one, CancelOrder) for one in decided)
    # The mixed worker would be as good, but it has failed it.
    assert [one.worker_id for one in decided if isinstance(one, StartPrefill)] == ["p0"]


@pytest.mark.parametrize("decodes", [False, True])
def test_a_cancelled_request_is_cancelled_once(decodes: bool) -> None:
    script = cluster(mixed())
    order = placed(script)
    if decodes:
        script(prefilled(order.order_id, "r1", "m0"))
    decided = script(RequestCancelled(request_id="r1"))
    assert [one.worker_id for one in decided if isinstance(one, CancelOrder)] == ["m0"]
    assert [one.node_id for one in decided if isinstance(one, ReleaseOrder)] == ["n-m0"]
    assert script.core.state.workers["m0"].orders == {}


def test_an_order_that_its_worker_does_not_list_is_lost() -> None:
    script = cluster(mixed(), mixed(1))
    order = placed(script)
    seq = script.core.seq

    def beat() -> list[Any]:
        beat = WorkerHeartbeat(worker_id=order.worker_id, incarnation="i1", orders=[], obeyed_seq=seq)
        return script(beat, after_ns=S)

    assert beat() == []
    decided = beat()
    assert [one.worker_id for one in decided if isinstance(one, CancelOrder)] == [order.worker_id]
    assert [one.worker_id != order.worker_id for one in decided if isinstance(one, StartMixed)] == [True]


def test_a_worker_learns_both_of_its_costs() -> None:
    script = cluster(mixed())
    record = script.core.state.workers["m0"]
    before = record.cost
    for number in range(20):
        order = placed(script, f"r{number}", block_keys=keys(10, seed=number))
        script(prefilled(order.order_id, f"r{number}", "m0", compute_ns=300 * MS), after_ns=300 * MS)
        beat = WorkerHeartbeat(
            worker_id="m0",
            incarnation="i1",
            steps=10,
            step_ns=40 * MS,
            step_sequences=1,
            step_context_tokens=1_000,
        )
        script(beat, after_ns=S)
        script(finished(order.order_id, f"r{number}", "m0"), after_ns=MS)
    assert record.cost.prefill_ns(1_000, 0) == pytest.approx(300 * MS, rel=0.1)
    assert record.cost.step_ns(1, 1_000) == pytest.approx(40 * MS, rel=0.1)
    assert before != record.cost


def test_explanations_say_why_one_way_was_taken() -> None:
    script = cluster(prefill(), decode(), mixed())
    script.core.explain_requests = lambda _: True
    placed(script, "r1")
    (why,) = script.core.notes
    assert verdict_text(why) == "placed on m0, which prefills and decodes"
    told = remarks(why, None)
    assert told[0].startswith("> m0, mixed: first token 110")
    assert told[1] == "not p0 and d0: nothing would be better there, and KV would move"
    script(arrived("r2"))
    (why,) = script.core.notes
    assert verdict_text(why) == "placed on p0 and d0"
    assert remarks(why, None)[1].startswith("not m0: the first token would come 110")
    script.core.explain_requests = lambda _: True
    script(PolicyChanged(policy=Policy(mixed_choice="preferred")))
    script(arrived("r3"))
    (why,) = script.core.notes
    assert remarks(why, None)[1].endswith("less between tokens, but mixed workers are preferred")
    assert "mixed workers" in described(script.core)


def test_a_snapshot_keeps_what_is_booked() -> None:
    script = cluster(mixed())
    placed(script)
    core = Core.restore(script.core.snapshot(), checked=True, examined=True)
    assert core.digest() == script.core.digest()
    assert core.state.workers["m0"].prompts.orders == script.core.state.workers["m0"].prompts.orders


def test_a_worker_that_joins_once_more_keeps_its_prompts() -> None:
    script = cluster(mixed())
    order = placed(script)
    script(mixed())
    assert list(script.core.state.workers["m0"].prompts.orders) == [order.order_id]


def wide_fleet(draw: random.Random) -> Script:
    """Three to thirty mixed workers, many of them alike; they hold blocks, compute prompts and decode."""
    script = cluster(
        name=draw.choice(["halfmoon", "local_cache_aware", "mooncake"]),
        mixed_by_policy=draw.choice([True, False]),
        coming_blocks=True,
        coming_at_mixed=draw.choice([True, False]),
        admission=draw.choice(["none", "none", "predicted"]),
        queued_max_per_worker=draw.choice([2, 100]),
        link_bytes_s=10 ** draw.randrange(7, 11),
    )
    count = draw.randrange(3, 31)
    costs = [
        PROFILE,
        msgspec.structs.replace(PROFILE, prefill_per_token_ps=100_000_001),
        # Worth a queue, while others are idle.
        msgspec.structs.replace(PROFILE, prefill_per_token_ps=10_000_000),
        msgspec.structs.replace(PROFILE, decode_per_sequence_ns=3 * MS),
    ]
    kv_blocks, tiers = draw.choice([22, 1_000]), draw.choice([["dram"], ["dram", "ssd"]])
    for number in range(count):
        own = {"kv_blocks": kv_blocks, "batch_max": draw.choice([1, 3, 100]), "profile": draw.choice(costs)}
        script(mixed(number, **own))
    for number in range(draw.choice([0, 2, count])):
        tier = draw.choice(tiers)
        script(stored(f"m{number}", keys(draw.choice([1, 9, 20])), tier=tier))
    state = script.core.state
    state.counters.prompt_tokens, state.counters.cached_local_tokens = 1_000, draw.choice([0, 300])
    for number in range(draw.choice([0, 5, 20, 60])):
        for order in script.orders(
            arrived(f"r{number}", draw.choice([100, 950]), block_keys=keys(draw.choice([0, 0, 1, 9])))
        ):
            if isinstance(order, StartMixed) and draw.random() < 0.7:
                script(prefilled(order.order_id, order.request_id, order.worker_id), after_ns=MS)
    return script


@pytest.mark.parametrize("seed", range(3))
def test_in_a_wide_fleet_no_mixed_worker_is_passed_over_that_would_be_taken(seed: int) -> None:
    draw, known = random.Random(seed), 0
    for _ in range(40):
        script = wide_fleet(draw)
        state, now_ns = script.core.state, script.now_ns
        request = arrived(tokens=draw.choice([100, 500, 950, 2_100]), block_keys=keys(20))
        matched = match_prefix(state, request, now_ns)
        every = mixed_candidates(state, request, matched, now_ns, 50)
        able = [one for one in every if not one.full]
        roomy = [one for one in able if one.decode.room]
        if not roomy and state.policy.admission == "none":
            roomy = able
        rule = mixed_rule(state.policy.name, state.policy.mixed_by_policy)
        best = least_mixed(state, request, matched, now_ns, 50, rule)
        assert isinstance(rule, Least)
        assert best == min(roomy, key=rule.rank, default=None)
        assert len(every) == len(state.loads.mixed.workers)
        known += best is not None
    assert known > 20
