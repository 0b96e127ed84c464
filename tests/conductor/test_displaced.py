"""The price of copies by what displaced blocks are seen to cost."""

from __future__ import annotations

import pytest
from conductor_scripts import Script, arrived, decode, keys, prefill, stored

from halfmoon.conductor.core.placement.candidates import candidates
from halfmoon.conductor.core.placement.prefix_match import match_prefix
from halfmoon.conductor.core.state.displaced import SAMPLE
from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.events import BlocksEvicted, RequestArrived
from halfmoon.schemas.policy import CopiesPrice
from halfmoon.schemas.types import KEY_BYTES

#: Of a chain of so many blocks, ten are in the sample.
BLOCKS = 10 * SAMPLE


def evicted(worker_id: str, block_keys: bytes, **fields: str) -> BlocksEvicted:
    return BlocksEvicted(node_id=f"n-{worker_id}", incarnation="i1", block_keys=block_keys, **fields)


def cluster(price: CopiesPrice = "displaced") -> Script:
    return Script(prefill(0), prefill(1), decode(), copies_price=price, admission="none")


def asked(name: str, block_keys: bytes) -> RequestArrived:
    tokens = len(block_keys) // KEY_BYTES * 100
    return arrived(name, tokens, block_keys=block_keys)


def copies_ns(script: Script, request: RequestArrived) -> dict[str, int]:
    state = script.core.state
    found = candidates(state, request, match_prefix(state, request, script.now_ns), script.now_ns)
    return {one.worker_id: one.copies_ns for one in found}


def test_a_block_that_nobody_has_and_somebody_asks_for_was_dear_to_displace() -> None:
    script, lost = cluster(), keys(BLOCKS, seed=2)
    script(stored("p0", lost))
    script(evicted("p0", lost))
    assert (script.core.state.displaced.evicted, script.core.state.displaced.missed) == (10, 0)
    half = lost[: len(lost) // 2]
    script(asked("again", half))
    assert script.core.state.displaced.missed == 5
    script(asked("again and again", half))  # computed by then: it was lost once
    assert script.core.state.displaced.missed == 5


def test_a_block_that_another_node_has_costs_nothing_to_displace() -> None:
    script, copied = cluster(), keys(BLOCKS, seed=2)
    script(stored("p0", copied))
    script(stored("p1", copied))
    script(evicted("p0", copied))
    script(asked("again", copied))
    assert (script.core.state.displaced.evicted, script.core.state.displaced.missed) == (10, 0)
    # Nor one that its node has moved to its SSD, or that was computed again before it was asked for.
    script(stored("p1", copied, tier="ssd"))
    script(evicted("p1", copied))
    script(asked("from the SSD", copied))
    script(evicted("p1", copied, tier="ssd"))
    script(stored("p0", copied))
    script(asked("from the first", copied))
    assert (script.core.state.displaced.evicted, script.core.state.displaced.missed) == (30, 0)


def test_the_price_is_what_was_asked_for_again_of_what_was_displaced() -> None:
    script, prefix = cluster(), keys(10)
    script(stored("p0", prefix))
    request = asked("r", prefix + keys(2, seed=9))
    least = copies_ns(script, request)
    assert least["p0"] == 0
    script(stored("p0", keys(BLOCKS, seed=2)))
    script(evicted("p0", keys(BLOCKS, seed=2)))
    assert copies_ns(script, request) == least  # none of it was missed
    script.core.state.displaced.missed = 5
    dear = copies_ns(script, request)
    # A twentieth of computing the blocks is the least; now it is half.
    assert (dear["p0"], dear["p1"]) == (0, 10 * least["p1"])


def test_who_computes_displaced_blocks_again_holds_up_all_who_wait() -> None:
    script = cluster()
    script(stored("p0", keys(10)))
    request = asked("r", keys(12))
    idle = copies_ns(script, request)["p1"]
    for number in range(4):  # two prompts a worker
        script(asked(f"w{number}", keys(3, seed=20 + number)))
    assert copies_ns(script, request)["p1"] == 3 * idle
    for number in range(4, 8):  # more than two count as two
        script(asked(f"w{number}", keys(3, seed=20 + number)))
    assert copies_ns(script, request)["p1"] == 3 * idle


@pytest.mark.parametrize(("price", "chosen"), [("reuse", "p0"), ("displaced", "p1")])
def test_where_displaced_blocks_are_not_missed_the_idle_worker_copies_the_prefix(
    price: CopiesPrice, chosen: str
) -> None:
    script = cluster(price)
    script(stored("p0", keys(10)))
    counters = script.core.state.counters
    counters.prompt_tokens, counters.cached_local_tokens = 100, 95  # nearly all is reused
    assert _prefill_worker(script, asked("before it", keys(6, seed=2))) == "p0"
    assert _prefill_worker(script, asked("r", keys(12))) == chosen


def _prefill_worker(script: Script, request: RequestArrived) -> str:
    (order,) = [one for one in script.orders(request) if isinstance(one, StartPrefill)]
    return order.worker_id


def test_no_more_is_remembered_than_the_pools_hold() -> None:
    script = cluster()
    slots = sum(store.slots for store in script.core.state.stores.values())
    for seed in range(2, 2 + 4 * max(64, slots // SAMPLE) // 10):
        script(stored("p0", keys(BLOCKS, seed=seed)))
        script(evicted("p0", keys(BLOCKS, seed=seed)))
    displaced = script.core.state.displaced
    assert len(displaced.gone) == max(64, slots // SAMPLE)
    first = script.core.state.displaced.missed
    script(asked("long ago", keys(BLOCKS, seed=2)))
    assert displaced.missed == first
    script(asked("a moment ago", keys(BLOCKS, seed=seed)))
    assert displaced.missed == first + 10


def test_an_older_policy_remembers_nothing() -> None:
    script = cluster("reuse")
    script(stored("p0", keys(BLOCKS, seed=2)))
    script(evicted("p0", keys(BLOCKS, seed=2)))
    script(asked("again", keys(BLOCKS, seed=2)))
    displaced = script.core.state.displaced
    assert (displaced.evicted, displaced.missed, displaced.gone) == (0, 0, {})
