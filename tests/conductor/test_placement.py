"""Algorithm 1, worked by hand.

A block is 100 tokens and 100,000 bytes in ten layers; a prompt takes 10 ms and 0.1 ms a token; a link 0.5 ms
and 0.05 ms a block, unless a test says otherwise.
"""

from __future__ import annotations

import random
from typing import Any

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
    keys,
    prefill,
    store,
    stored,
)

from halfmoon.conductor.core.placement.candidates import candidates
from halfmoon.conductor.core.placement.decode_candidates import decode_candidates
from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.placement.prefix_match import match_prefix
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import Link
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Fetch, StartDecode, StartPrefill
from halfmoon.schemas.events import RequestArrived, StoreLeft, StoreSuspected, TierLost

US = 1_000


def pool(**policy: Any) -> Script:
    """Two prefill workers and two decode workers, each with its store."""
    script = Script(**policy)
    for number in (0, 1):
        script(prefill(number))
        script(decode(number))
    return script


def found(script: Script, request: RequestArrived) -> list[Candidate]:
    state = script.core.state
    return candidates(state, request, match_prefix(state, request, script.now_ns), script.now_ns)


def costs(script: Script, request: RequestArrived) -> list[tuple[str, int, int, int, int, int, list[Fetch]]]:
    """(worker, queue, transfer, prefill, ttft, cached tokens, fetches), times in µs."""
    return [
        (
            c.worker_id,
            c.queue_ns // US,
            c.transfer_ns // US,
            c.prefill_ns // US,
            c.ttft_ns // US,
            c.cached_tokens,
            c.fetches,
        )
        for c in found(script, request)
    ]


def fetch(worker_id: str, first: int, blocks: int) -> Fetch:
    return Fetch(node_id=f"n-{worker_id}", first_block=first, blocks=blocks)


def chosen(script: Script, request: RequestArrived) -> tuple[str, str, int, list[Fetch]]:
    """(prefill worker, decode worker, local blocks, fetches) of the order that `request` gets."""
    start, then = script.orders(request)
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    assert start.order_id == then.order_id
    assert start.predicted == then.predicted
    return start.worker_id, then.worker_id, start.local_blocks, start.fetches


def test_with_nothing_cached_every_worker_computes_all() -> None:
    script = pool()
    assert costs(script, arrived()) == [
        ("p0", 0, 0, 110_000, 110_000, 0, []),
        ("p1", 0, 0, 110_000, 110_000, 0, []),
    ]
    assert chosen(script, arrived()) == ("p0", "d0", 0, [])


def test_a_local_prefix_is_used_and_another_node_may_fetch_it() -> None:
    script = pool()
    script(stored("p0", keys(5)))
    # Fetching five blocks takes 0.5 + 5·0.05 ms, its first layer 0.5 + 5·0.005 ms: 0.525 + max(0.75, 60) ms.
    assert costs(script, arrived()) == [
        ("p0", 0, 0, 60_000, 60_000, 500, []),
        ("p1", 0, 750, 60_000, 60_525, 500, [fetch("p0", 0, 5)]),
    ]
    assert chosen(script, arrived("r1")) == ("p0", "d0", 5, [])
    # p0 now has 60 ms in its queue, so the other fetches.
    assert chosen(script, arrived("r2")) == ("p1", "d1", 0, [fetch("p0", 0, 5)])


def test_only_what_is_missing_is_fetched() -> None:
    script = pool()
    script(stored("p0", keys(8)))
    script(stored("p1", keys(3)))
    assert costs(script, arrived())[1] == ("p1", 0, 750, 30_000, 30_525, 800, [fetch("p0", 3, 5)])


def test_at_least_one_token_is_computed() -> None:
    script = pool()
    script(stored("p0", keys(10)))
    assert costs(script, arrived(tokens=1_000))[0] == ("p0", 0, 0, 20_000, 20_000, 900, [])
    assert costs(script, arrived(tokens=1_001))[0] == ("p0", 0, 0, 10_100, 10_100, 1_000, [])
    assert costs(script, arrived(tokens=1))[0] == ("p0", 0, 0, 10_100, 10_100, 0, [])


def test_a_fetch_is_cut_where_the_next_block_is_cheaper_computed() -> None:
    # A block takes 10 ms by this link and 10 ms to compute. Five: 0.5 + 5 ms, then max(50.5, 60); six: 6.5 +
    # max(60.5, 50).
    script = pool(link_bytes_s=10_000_000)
    script(stored("p0", keys(9)))
    assert costs(script, arrived())[1] == ("p1", 0, 50_500, 60_000, 65_500, 500, [fetch("p0", 0, 5)])


def test_a_fetch_that_costs_more_than_computing_is_not_made() -> None:
    script = pool(link_bytes_s=100_000)
    script(stored("p0", keys(9)))
    assert costs(script, arrived())[1] == ("p1", 0, 0, 110_000, 110_000, 0, [])


def test_loading_overlaps_with_the_queue() -> None:
    script = pool()
    script(stored("p0", keys(9)))
    script.core.state.workers["p1"].prompts.orders["x"] = 6 * MS
    script.core.state.workers["p1"].prompts.reserved_ns = 6 * MS
    script.core.state.workers["p1"].prompts.head_since_ns = script.now_ns
    assert costs(script, arrived())[1] == ("p1", 6_000, 950, 20_000, 26_000, 900, [fetch("p0", 0, 9)])


def test_a_fetch_may_end_where_its_first_layer_is_still_hidden_by_the_queue() -> None:
    # A block takes 20 ms by this link (2 ms its first layer) and 1 ms to compute, beside 1 s in any case. Ten
    # blocks' first layers are there when the queue of 20 ms ends: 20 + 1,040; all forty would be 80 + 1,010.
    profile = CostProfile(prefill_base_ns=1 * S, prefill_per_token_ps=10_000_000)
    script = Script(prefill(0), prefill(1, profile=profile), link_bytes_s=5_000_000, link_latency_ns=0)
    script(stored("p0", keys(40)))
    worker = script.core.state.workers["p1"]
    worker.prompts.orders["x"] = worker.prompts.reserved_ns = 20 * MS
    worker.prompts.head_since_ns = script.now_ns
    assert costs(script, arrived(tokens=5_000))[1] == (
        "p1",
        20_000,
        200_000,
        1_040_000,
        1_060_000,
        1_000,
        [fetch("p0", 0, 10)],
    )


def test_the_threshold_is_a_bias_against_fetching() -> None:
    script = pool(fetch_threshold_percent=200)
    script(stored("p0", keys(8)))
    script(stored("p1", keys(4)))
    assert costs(script, arrived())[1] == ("p1", 0, 0, 70_000, 70_000, 400, [])
    script(stored("p0", keys(9)))
    assert costs(script, arrived())[1][-1] == [fetch("p0", 4, 5)]


def test_transfers_share_the_bandwidth_of_their_source() -> None:
    script = pool()
    script(stored("p0", keys(5)))
    script.core.state.leaving["n-p0"] = {
        "x": script.now_ns + 1,
        "y": script.now_ns + 1,
        "over": script.now_ns,
    }
    assert costs(script, arrived())[1][2] == 500 + 3 * 250
    script.core.state.leaving.clear()


def test_the_source_is_the_one_with_the_fastest_link_then_the_smallest_id() -> None:
    script = pool()
    script(prefill(2))
    script(stored("p0", keys(5)))
    script(stored("d0", keys(5)))
    assert costs(script, arrived())[1][-1] == [fetch("d0", 0, 5)]  # n-d0 before n-p0
    state = script.core.state
    state.links["n-p1"] = {"n-p0": Link(bytes_s=4_000_000_000, measured_ns=script.now_ns)}
    state.members_changed()  # so that pools see what was changed behind their back
    assert [c[-1] for c in costs(script, arrived())] == [[], [fetch("p0", 0, 5)], [fetch("d0", 0, 5)]]


def test_a_shorter_prefix_on_a_fast_link_may_beat_a_longer_one_on_a_slow_link() -> None:
    script = pool()
    script(stored("p0", keys(9)))
    script(stored("d0", keys(8)))
    script.core.state.links["n-p1"] = {"n-p0": Link(bytes_s=1_000_000, measured_ns=script.now_ns)}
    assert costs(script, arrived())[1][-1] == [fetch("d0", 0, 8)]


def test_a_suspected_store_is_not_read_from_for_a_while() -> None:
    script = pool(suspected_ns=5 * S, heartbeat_ns=100 * S)
    script(stored("p0", keys(5)))
    script(StoreSuspected(node_id="n-p0", reporter_id="p1", reason="timeout"))
    assert [c[-2:] for c in costs(script, arrived())] == [(0, []), (0, [])]
    script.now_ns += 5 * S
    assert [c[-2:] for c in costs(script, arrived())] == [(500, []), (500, [fetch("p0", 0, 5)])]


def test_the_blocks_of_a_store_that_left_are_gone_and_its_worker_is_passed_over() -> None:
    script = pool()
    script(stored("p0", keys(5)))
    script(StoreLeft(node_id="n-p0"))
    assert [candidate.worker_id for candidate in found(script, arrived())] == ["p1"]
    assert chosen(script, arrived("r1")) == ("p1", "d0", 0, [])
    script(store("p0", "i2"))
    assert chosen(script, arrived("r2")) == ("p0", "d1", 0, [])


def test_a_worker_without_blocks_needs_no_store() -> None:
    null = {"layout": NULL_LAYOUT}
    script = Script(prefill(**null), decode(**null), stores=False)
    assert chosen(script, arrived(block_keys=b"")) == ("p0", "d0", 0, [])


def test_workers_on_one_node_share_its_blocks() -> None:
    script = pool()
    script(prefill(5, node_id="n-p0"))
    script(stored("p0", keys(5)))
    assert [(c[0], c[-2], c[-1]) for c in costs(script, arrived())] == [
        ("p0", 500, []),
        ("p1", 500, [fetch("p0", 0, 5)]),
        ("p5", 500, []),
    ]


def test_blocks_on_an_ssd_are_loaded_when_that_is_cheaper_than_computing() -> None:
    # From SSD a block takes 100,000 B / 500 MB/s = 0.2 ms; its first layer 0.02 ms.
    script = pool()
    script(stored("p0", keys(3)))
    script(stored("p0", keys(5)[48:], tier="ssd"))
    assert costs(script, arrived()) == [
        ("p0", 0, 400, 60_000, 60_040, 500, [fetch("p0", 3, 2)]),
        ("p1", 0, 500 + 150 + 400, 60_000, 60_000 + 500 + 15 + 40, 500, [fetch("p0", 0, 5)]),
    ]
    assert [c.from_ssd for c in found(script, arrived())] == [True, True]
    assert chosen(script, arrived()) == ("p0", "d0", 3, [fetch("p0", 3, 2)])
    lost = TierLost(node_id="n-p0", incarnation="i1", tier="ssd", reason="the disk is full")
    assert script(lost) == []
    assert [c[-2:] for c in costs(script, arrived())] == [(300, []), (300, [fetch("p0", 0, 3)])]


def test_blocks_on_a_slow_ssd_are_computed_again() -> None:
    script = pool(ssd_bytes_s=1_000_000)
    script(stored("p0", keys(5), tier="ssd"))
    assert [c[-3:] for c in costs(script, arrived())] == [(110_000, 0, []), (110_000, 0, [])]


def test_without_blocks_nothing_is_matched_or_moved() -> None:
    script = Script(prefill(layout=NULL_LAYOUT), decode(layout=NULL_LAYOUT))
    script(stored("p0", keys(5)))
    assert costs(script, arrived()) == [("p0", 0, 0, 110_000, 110_000, 0, [])]


def test_the_papers_own_rule_fetches_all_or_nothing_and_adds_its_time() -> None:
    script = pool(name="mooncake", link_bytes_s=10_000_000)
    script(stored("p0", keys(9)))
    assert costs(script, arrived()) == [
        ("p0", 0, 0, 20_000, 20_000, 900, []),
        ("p1", 0, 90_500, 20_000, 110_500, 900, [fetch("p0", 0, 9)]),
    ]


def test_the_papers_threshold_decides_between_fetch_and_recompute() -> None:
    script = pool(name="mooncake", fetch_threshold_percent=200)
    script(stored("p0", keys(8)))
    script(stored("p1", keys(4)))
    assert costs(script, arrived())[1] == ("p1", 0, 0, 70_000, 70_000, 400, [])
    script(stored("p0", keys(9)))
    assert costs(script, arrived())[1] == ("p1", 0, 750, 20_000, 20_750, 900, [fetch("p0", 4, 5)])


def test_the_queue_runs_down_with_time() -> None:
    script = pool(heartbeat_ns=100 * S)
    assert chosen(script, arrived("r1"))[0] == "p0"
    assert chosen(script, arrived("r2"))[0] == "p1"
    assert chosen(script, arrived("r3"))[0] == "p0"
    assert [c.queue_ns for c in found(script, arrived())] == [220 * MS, 110 * MS]
    script.now_ns += 50 * MS
    assert [c.queue_ns for c in found(script, arrived())] == [170 * MS, 60 * MS]
    script.now_ns += 500 * MS  # the oldest is late; the one behind it is still to come
    assert [c.queue_ns for c in found(script, arrived())] == [110 * MS, 0]


# --- decode -------------------------------------------------------------------------------------------------


def test_decode_goes_to_the_lowest_predicted_time_between_tokens() -> None:
    script = pool()
    state, request = script.core.state, arrived(max_tokens=100)
    assert chosen(script, request)[1] == "d0"
    after = decode_candidates(state, request, match_prefix(state, request, script.now_ns), 100)
    # 10 ms + 1 ms a sequence + 1 µs a token: two with 1,100 tokens each, and one.
    assert [(c.worker_id, c.tbt_ns, c.reserved_blocks) for c in after] == [
        ("d0", 14_200 * US, 11),
        ("d1", 12_100 * US, 0),
    ]
    assert chosen(script, arrived("r2"))[1] == "d1"


def test_a_prefix_on_the_decode_node_decides_between_equals() -> None:
    script = pool()
    script(stored("d1", keys(2)))
    assert chosen(script, arrived())[1] == "d1"


def test_a_worker_without_room_is_passed_over() -> None:
    script = Script(prefill(), decode(0, kv_blocks=20), decode(1, profile=slow_decode()))
    assert [chosen(script, arrived(f"r{n}", max_tokens=100))[1] for n in range(2)] == ["d0", "d1"]
    script = Script(prefill(), decode(0, batch_max=1), decode(1, profile=slow_decode()))
    assert [chosen(script, arrived(f"r{n}", max_tokens=100))[1] for n in range(2)] == ["d0", "d1"]


def slow_decode() -> CostProfile:
    return CostProfile(decode_base_ns=500 * MS)


# --- against every cut of every source ----------------------------------------------------------------------


def cheapest_by_trying(state: State, request: RequestArrived, worker_id: str, now_ns: int, queue: int) -> int:
    worker = state.workers[worker_id]
    n, size = request.prompt_tokens, worker.block_tokens
    cap = (n - 1) // size
    matched = match_prefix(state, request, now_ns)
    local = min(matched.held.get(worker.node_id, 0), cap)
    best = queue + worker.cost.prefill_ns(n, local * size)
    for node_id, blocks, _, sharing in matched.sources():
        link = state.links.get(worker.node_id, {}).get(node_id)
        bytes_s = link.bytes_s if link else state.policy.link_bytes_s
        for cut in range(local + 1, min(blocks, cap) + 1):
            moved = (cut - local) * sharing * S
            first = state.policy.link_latency_ns + moved * worker.layout.layer_block_bytes // bytes_s
            whole = state.policy.link_latency_ns + moved * worker.block_bytes // bytes_s
            best = min(best, max(queue, first) + max(whole, worker.cost.prefill_ns(n, cut * size)))
    return best


@pytest.mark.parametrize("seed", range(10))
def test_the_chosen_cut_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    fetched = partial = 0
    for _ in range(60):
        profile = CostProfile(
            prefill_base_ns=draw.choice([0, 10 * MS]),
            prefill_per_token_ps=draw.choice([0, 1_000_000, 100_000_000]),
            prefill_per_token2_fs=draw.choice([0, 1_000_000, 50_000_000]),
        )
        script = Script(link_bytes_s=10 ** draw.randrange(6, 11), link_latency_ns=draw.choice([0, 500_000]))
        count = draw.randrange(1, 5)
        for number in range(count):
            script(prefill(number, profile=profile))
            script(stored(f"p{number}", keys(draw.choice([0, draw.randrange(50), 50]))))
        state = script.core.state
        for number in range(count):
            state.links[f"n-p{number}"] = {
                f"n-p{other}": Link(bytes_s=10 ** draw.randrange(6, 11), measured_ns=script.now_ns)
                for other in range(count)
                if draw.random() < 0.5
            }
            worker = state.workers[f"p{number}"]
            worker.prompts.orders["x"] = worker.prompts.reserved_ns = draw.choice(
                [0, 1_000, 5 * MS, 500 * MS]
            )
            worker.prompts.head_since_ns = script.now_ns
        request = arrived(tokens=draw.choice([5_000, draw.randrange(1, 5_000)]), block_keys=keys(50))
        for candidate in found(script, request):
            tried = cheapest_by_trying(state, request, candidate.worker_id, script.now_ns, candidate.queue_ns)
            assert candidate.ttft_ns == pytest.approx(tried, abs=10), candidate
            fetched += bool(candidate.fetches)
            partial += bool(candidate.fetches) and candidate.cached_tokens < 4_900
    assert fetched > 10
    assert partial > 0


def test_the_layout_of_the_examples_is_what_they_say() -> None:
    assert (LAYOUT.block_bytes, LAYOUT.layer_block_bytes) == (100_000, 10_000)
    assert PROFILE.prefill_ns(1_000, 500) == 60 * MS
