"""Each policy by name, in a pool of three prefill and two decode workers."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from conductor_scripts import MS, Script, arrived, decode, keys, prefill, prefilled, stored

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import PolicyChanged
from halfmoon.schemas.policy import Policy, PolicyName


def pool(name: PolicyName, **policy: Any) -> Script:
    script = Script(name=name, heartbeat_ns=10**12, admission="none", **policy)
    for number in range(3):
        script(prefill(number))
    for number in range(2):
        script(decode(number))
    return script


def placed(script: Script, *requests: Any) -> list[tuple[str, str]]:
    """(prefill worker, decode worker) of each request."""
    pairs = []
    for request in requests:
        start, then = script.orders(request)
        assert isinstance(start, StartPrefill)
        assert isinstance(then, StartDecode)
        pairs.append((start.worker_id, then.worker_id))
    return pairs


def requests(count: int, tokens: int = 1_000) -> list[Any]:
    return [arrived(f"r{number}", tokens) for number in range(count)]


def test_round_robin_takes_the_next_id_around_the_end() -> None:
    assert placed(pool("round_robin"), *requests(5)) == [
        ("p0", "d0"),
        ("p1", "d1"),
        ("p2", "d0"),
        ("p0", "d1"),
        ("p1", "d0"),
    ]


def test_random_draws_from_its_seed_and_the_place_in_the_log() -> None:
    first = placed(pool("random", seed=1), *requests(300))
    assert placed(pool("random", seed=1), *requests(300)) == first
    assert placed(pool("random", seed=2), *requests(300)) != first
    counts = Counter(first)
    assert len(counts) == 6
    assert min(counts.values()) > 25
    assert first[:6] == [("p2", "d1"), ("p1", "d1"), ("p2", "d0"), ("p2", "d1"), ("p0", "d0"), ("p0", "d1")]


def test_least_loaded_looks_at_queues_only() -> None:
    script = pool("least_loaded")
    script(stored("p0", keys(9)))
    # p0 has 20 ms in its queue after the first, the others 110 ms.
    assert placed(script, *requests(5)) == [
        ("p0", "d0"),
        ("p1", "d1"),
        ("p2", "d0"),
        ("p0", "d1"),
        ("p0", "d0"),
    ]


def test_local_cache_aware_counts_the_prefix_but_fetches_nothing() -> None:
    script = pool("local_cache_aware")
    script(stored("p2", keys(9)))
    orders = [script.orders(request)[0] for request in requests(6)]
    assert [(o.worker_id, o.local_blocks, o.fetches) for o in orders if isinstance(o, StartPrefill)] == [
        ("p2", 9, []),
        ("p2", 9, []),
        ("p2", 9, []),
        ("p2", 9, []),
        ("p2", 9, []),
        ("p0", 0, []),
    ]


def test_dynamo_takes_the_fewest_blocks_to_compute_and_in_hand() -> None:
    script = pool("dynamo")
    script(stored("p1", keys(8)))
    # 10 blocks: 2 to compute on p1, 10 elsewhere; then p1 has 2 + 10 in hand, so it comes last: 14 against
    # 10.
    assert placed(script, *requests(4)) == [("p1", "d0"), ("p0", "d1"), ("p2", "d0"), ("p1", "d1")]
    state = script.core.state
    assert [
        (w.prompts.pending_blocks, w.prompts.prompt_blocks)
        for w in state.workers.values()
        if w.role == "prefill"
    ] == [
        (10, 10),
        (4, 20),
        (10, 10),
    ]


def test_lmetric_multiplies_what_is_to_compute_by_the_prompts_that_wait() -> None:
    script = pool("lmetric")
    script(stored("p1", keys(8)))
    # 10 blocks, 2 of them to compute on p1: 2 x 1 against 10 x 1. Then 4 x 2 is still less than 10, and 6 x 3 is not.
    assert [pair[0] for pair in placed(script, *requests(5))] == ["p1", "p1", "p0", "p2", "p1"]


def test_sticky_follows_the_longest_prefix_and_else_the_shortest_queue() -> None:
    script = pool("sticky")
    script(stored("p2", keys(8)))
    script(stored("p1", keys(1)))
    assert {pair[0] for pair in placed(script, *requests(5))} == {"p2"}
    # Nobody has the other prompt: the queues decide.
    others = [arrived(f"other{n}", 1_000, block_keys=b"") for n in range(2)]
    assert [pair[0] for pair in placed(script, *others)] == ["p0", "p1"]


def test_halfmoon_replicates_a_hot_prefix_by_routing() -> None:
    script = pool("halfmoon")
    script(stored("p0", keys(9)))
    orders = [script.orders(request)[0] for request in requests(3)]
    assert [(o.worker_id, len(o.fetches)) for o in orders if isinstance(o, StartPrefill)] == [
        ("p0", 0),
        ("p1", 1),
        ("p2", 1),
    ]


def test_a_copy_has_a_price_where_blocks_are_reused() -> None:
    """Nine blocks of ten are on p0, which has a short queue: the rest of the pool is idle."""
    for reused, expected in ((0, "p1"), (900, "p0")):
        script = pool("halfmoon")
        script(stored("p0", keys(9)))
        first = script.orders(arrived("r0", 1_000))[0]
        assert isinstance(first, StartPrefill)
        script(prefilled(first.order_id, "r0", "p0", cached_local_tokens=reused))
        assert placed(script, arrived("r1", 10, block_keys=b""))[0][0] == "p0"
        # Two blocks of 10 ms each, reused nine times out of ten: the copy would cost 18 ms, the queue costs
        # 11 ms.
        assert placed(script, arrived("r2", 300, block_keys=keys(3)))[0][0] == expected, reused


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_without_any_profile_every_policy_spreads_the_load(name: PolicyName) -> None:
    script = Script(name=name, seed=3)
    for number in range(3):
        script(prefill(number, profile=CostProfile()))
        script(decode(number, profile=CostProfile()))
    pairs = placed(script, *[arrived(f"r{n}", 1_000, block_keys=b"") for n in range(30)])
    for half in (0, 1):
        counts = Counter(pair[half] for pair in pairs)
        assert len(counts) == 3
        if name != "random":
            assert list(counts.values()) == [10, 10, 10]


def test_a_change_of_policy_holds_from_the_next_event_on() -> None:
    script = pool("round_robin")
    assert placed(script, *requests(1)) == [("p0", "d0")]
    script(prefilled("12-1", "r0", "p0"))
    script(PolicyChanged(policy=Policy(name="least_loaded")))
    assert placed(script, arrived("x")) == [("p0", "d1")]
    assert script.core.state.policy == Policy(name="least_loaded")


def test_a_policy_is_chosen_by_its_name_alone() -> None:
    for name in get_args(PolicyName):
        script = pool(name)
        script(stored("p1", keys(9)))
        for request in requests(12):
            assert len(script.orders(request)) == 2
        assert script.core.state.workers["p0"].cost.prefill_base_ns == 10 * MS
