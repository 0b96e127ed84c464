"""Other holders are named with a fetch, and a prefix that many read gets one more; only where the policy says
so.
"""

from __future__ import annotations

from typing import Any

import msgspec
from conductor_scripts import S, Script, arrived, decode, keys, prefill, store, stored

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import Decision, Fetch, ReplicateBlocks, StartPrefill
from halfmoon.schemas.events import FrontendJoined, StoreHeartbeat, StoreSuspected


def nodes(**policy: Any) -> Script:
    """Four prefill nodes and a decode node; the first three of the former hold the prompt's ten blocks."""
    script = Script(FrontendJoined(frontend_id="f1", incarnation="i1"), **policy)
    for number in range(4):
        script(prefill(number))
    script(decode())
    return script


def fetches(decided: list[Decision]) -> list[Fetch]:
    return [fetch for each in decided if isinstance(each, StartPrefill) for fetch in each.fetches]


def copies(decided: list[Decision]) -> list[tuple[str, str, int]]:
    return [
        (each.node_id, each.source_node_id, len(each.block_keys) // 16)
        for each in decided
        if isinstance(each, ReplicateBlocks)
    ]


def busy(script: Script, *numbers: int) -> None:
    """These workers get a long prompt of their own, so that the next one goes elsewhere."""
    for number in numbers:
        own = arrived(f"long{number}", 20_000, block_keys=keys(200, seed=100 + number))
        (start, *_) = script.orders(own)
        assert isinstance(start, StartPrefill)


def test_other_holders_are_named_with_a_fetch_as_many_as_the_policy_says() -> None:
    for wanted, named in ((0, []), (1, ["n-p1"]), (5, ["n-p1", "n-p2"])):
        script = nodes(fetch_replicas=wanted)
        busy(script, 0, 1, 2)
        for worker_id in ("p0", "p1", "p2"):
            script(stored(worker_id, keys(10)))
        script(stored("d0", keys(3)))  # has less
        assert fetches(script.orders(arrived())) == [
            Fetch(node_id="n-p0", first_block=0, blocks=9, replicas=named)
        ]


def test_a_node_that_shares_with_nobody_gets_no_copy_and_is_no_holder() -> None:
    script = nodes(fetch_replicas=5, hot_transfers=1)
    busy(script, 0, 1, 2)
    for worker_id in ("p2", "d0"):
        script(msgspec.structs.replace(store(worker_id), shares=False))
    for worker_id in ("p0", "p2"):
        script(stored(worker_id, keys(10)))
    decided = script.orders(arrived())
    assert fetches(decided) == [Fetch(node_id="n-p0", first_block=0, blocks=9)]
    assert copies(decided) == [("n-p1", "n-p0", 9)]


def test_a_suspected_holder_is_not_named() -> None:
    script = nodes(fetch_replicas=5)
    busy(script, 0, 1, 2)
    for worker_id in ("p0", "p1", "p2"):
        script(stored(worker_id, keys(10)))
    script(StoreSuspected(node_id="n-p1", reporter_id="n-p3", reason="silent"))
    assert fetches(script.orders(arrived())) == [
        Fetch(node_id="n-p0", first_block=0, blocks=9, replicas=["n-p2"])
    ]


def test_a_prefix_that_many_read_gets_a_holder_on_the_emptiest_node_that_lacks_it() -> None:
    script = nodes(hot_transfers=2)
    busy(script, 0)
    script(stored("p0", keys(10)))
    for worker_id, used in (("p1", 500), ("p2", 100), ("p3", 200), ("d0", 900)):
        script(
            StoreHeartbeat(
                node_id=f"n-{worker_id}", incarnation="i1", slots_used=used, slots_leased=0, leases=0
            )
        )
    first = script.orders(arrived("r1"))
    assert [fetch.node_id for fetch in fetches(first)] == ["n-p0"]
    assert copies(first) == []  # one transfer leaves it: not hot
    second = script.orders(arrived("r2"))
    start = second[0]
    assert isinstance(start, StartPrefill)
    lacking = {"n-p2": 100, "n-p3": 200, "n-p1": 500, "n-d0": 900}
    emptiest = next(node for node in lacking if node != f"n-{start.worker_id}")
    assert copies(second) == [(emptiest, "n-p0", 9)]
    script(stored(emptiest.removeprefix("n-"), keys(10)))
    assert emptiest not in [node for node, _, _ in copies(script.orders(arrived("r3")))]


def test_without_the_policy_nothing_is_copied_and_the_state_is_as_before() -> None:
    script = nodes()
    busy(script, 0)
    script(stored("p0", keys(10)))
    decided = [decision for number in range(6) for decision in script.orders(arrived(f"r{number}"))]
    assert len(fetches(decided)) >= 2
    assert copies(decided) == []
    assert all(fetch.replicas == [] for fetch in fetches(decided))
    again = Core(checked=True)
    for stamped in script.log:
        again.step(stamped)
    assert again.digest() == script.core.digest()
    assert script.now_ns == 1_000 * S
