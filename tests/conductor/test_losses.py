"""Heartbeats that list orders: what the worker does not know is lost, what the core does not know is
cancelled.
"""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import MS, S, Script, arrived, decode, finished, pair, prefill, prefilled
from msgspec.structs import replace

from halfmoon.schemas.decisions import (
    CancelOrder,
    Decision,
    FailRequest,
    ReleaseOrder,
    StartDecode,
    StartPrefill,
)
from halfmoon.schemas.events import (
    DecodeFailed,
    FrontendJoined,
    RequestCancelled,
    StoreHeartbeat,
    WorkerDraining,
    WorkerHeartbeat,
)


def beat(worker_id: str, orders: list[str] | None, obeyed_seq: int = 1_000, **fields: Any) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker_id=worker_id, incarnation="i1", orders=orders, obeyed_seq=obeyed_seq, **fields
    )


def crowd(**policy: Any) -> Script:
    """Two of each worker; the next event has sequence 11."""
    script = Script(prefill(0), decode(0), prefill(1), decode(1), **policy)
    script(FrontendJoined(frontend_id="f1", incarnation="i1"))
    return script


def kinds(decisions: list[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def test_a_prefill_that_two_heartbeats_do_not_list_is_placed_elsewhere() -> None:
    script = crowd()
    script(arrived())
    assert script(beat("p0", []), after_ns=1 * S) == []
    decisions = script(beat("p0", []), after_ns=1 * S)
    assert decisions[:4] == [
        CancelOrder(order_id="11-1", request_id="r1", worker_id="p0"),  # in case that it has it after all
        CancelOrder(order_id="11-1", request_id="r1", worker_id="d0"),
        ReleaseOrder(order_id="11-1", node_id="n-p0"),
        ReleaseOrder(order_id="11-1", node_id="n-d0"),
    ]
    start, then = decisions[4:]
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    assert (start.worker_id, then.worker_id, then.placement) == ("p1", "d0", 2)
    assert script.core.state.requests["r1"].avoid == ["p0"]


@pytest.mark.parametrize(("in_doubt", "prefill_id"), [(False, "p0"), (True, "p1")])
def test_a_decode_half_that_fails_has_its_prefill_worker_avoided_where_that_may_be_at_fault(
    in_doubt: bool, prefill_id: str
) -> None:
    script = crowd()
    script(arrived())
    failed = DecodeFailed(
        order_id="11-1", request_id="r1", worker_id="d0", reason="no KV", prefill_in_doubt=in_doubt
    )
    start, then = script(failed)[-2:]
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    assert (start.worker_id, then.worker_id) == (prefill_id, "d1")


def test_a_decode_is_missed_until_it_is_finished_and_a_prefill_until_it_is_done() -> None:
    script = crowd()
    script(arrived())
    script(prefilled("11-1"))
    for _ in range(3):
        assert script(beat("p0", []), after_ns=1 * S) == []  # it has answered
    assert script(beat("d0", []), after_ns=1 * S) == []
    decisions = script(beat("d0", []), after_ns=1 * S)
    assert kinds(decisions) == ["CancelOrder", "ReleaseOrder", "ReleaseOrder", "StartPrefill", "StartDecode"]
    assert decisions[0] == CancelOrder(order_id="11-1", request_id="r1", worker_id="d0")
    assert isinstance(decisions[4], StartDecode)
    assert decisions[4].worker_id == "d1"
    script(prefilled(decisions[4].order_id, worker_id="p0"))
    assert script(finished(decisions[4].order_id, worker_id="d1")) == []
    for _ in range(3):
        assert script(beat("d1", []), after_ns=1 * S) == []


def test_an_order_that_is_listed_goes_on() -> None:
    script = crowd()
    script(arrived())
    for _ in range(5):
        for worker_id in ("p0", "d0"):
            assert script(beat(worker_id, ["11-1"]), after_ns=500 * MS) == []


def test_the_two_heartbeats_must_follow_each_other() -> None:
    script = crowd()
    script(arrived())
    for between in (["11-1"], None):
        assert script(beat("p0", []), after_ns=1 * S) == []
        assert script(beat("p0", between), after_ns=1 * S) == []
        assert script(beat("p0", []), after_ns=1 * S) == []
        assert script(beat("p0", ["11-1"]), after_ns=1 * S) == []


def test_heartbeats_that_waited_for_the_bus_together_count_as_one() -> None:
    script = crowd()
    script(arrived())
    script(beat("p0", []), after_ns=10 * S)
    for _ in range(3):
        assert script(beat("p0", []), after_ns=100 * MS) == []
    assert script(beat("p0", []), after_ns=300 * MS)[:1] == [
        CancelOrder(order_id="11-1", request_id="r1", worker_id="p0")
    ]


def test_an_order_that_has_not_reached_its_worker_is_not_missed_however_long_ago_it_was_decided() -> None:
    script = crowd()
    script(arrived())
    # No conductor was there for a minute: the workers go on, and hear of the order when one is back.
    for _ in range(60):
        for worker_id in ("p0", "d0"):
            assert script(beat(worker_id, [], obeyed_seq=10), after_ns=500 * MS) == []
    assert script(beat("p0", ["11-1"], obeyed_seq=11), after_ns=1 * S) == []
    assert script(prefilled("11-1")) == []


def test_heartbeats_that_list_no_orders_lose_none() -> None:
    script = crowd()
    script(arrived())
    for _ in range(10):
        assert script(beat("p0", None), after_ns=1 * S) == []
        assert script(beat("d0", None)) == []


def test_all_that_one_heartbeat_loses_is_taken_back_before_any_is_placed() -> None:
    script = pair(placements_max=2)
    for number in range(3):
        script(arrived(f"r{number}"))
    script(beat("p0", ["8-1"]), after_ns=1 * S)
    decisions = script(beat("p0", ["8-1"]), after_ns=1 * S)
    assert (
        kinds(decisions)
        == ["CancelOrder", "CancelOrder", "ReleaseOrder", "ReleaseOrder"] * 2
        + [
            "StartPrefill",
            "StartDecode",
        ]
        * 2
    )
    assert list(script.core.state.workers["p0"].orders) == ["8-1", "11-1", "11-2"]
    # Lost once more: that was too often.
    script(beat("p0", ["8-1"]), after_ns=1 * S)
    ended = script(beat("p0", ["8-1"]), after_ns=1 * S)[-1]
    message = "placed 2 times, and each time lost; last: worker p0 knows nothing of the order"
    assert ended == FailRequest(request_id="r2", frontend_id="f1", message=message)


def test_a_lost_order_waits_when_no_worker_takes_it() -> None:
    script = pair()
    script(arrived())
    script(WorkerDraining(worker_id="p0", incarnation="i1"))
    script(beat("p0", []), after_ns=1 * S)
    assert kinds(script(beat("p0", []), after_ns=1 * S))[-1] == "SetTimer"
    assert list(script.core.state.parked) == ["r1"]


def test_an_order_that_the_core_does_not_know_is_cancelled_again() -> None:
    script = crowd()
    script(arrived())
    script(RequestCancelled(request_id="r1"))
    assert script(beat("d0", ["11-1", "3-7"]), after_ns=1 * S) == []
    assert script(beat("d0", ["11-1", "3-7"]), after_ns=1 * S) == [
        CancelOrder(order_id="11-1", worker_id="d0"),
        CancelOrder(order_id="3-7", worker_id="d0"),
    ]
    # Once for two heartbeats, for as long as it lists them.
    assert script(beat("d0", ["11-1"]), after_ns=1 * S) == []
    assert script(beat("d0", ["11-1"]), after_ns=1 * S) == [CancelOrder(order_id="11-1", worker_id="d0")]
    for _ in range(3):
        assert script(beat("d0", []), after_ns=1 * S) == []


def test_a_cancellation_that_is_still_on_its_way_is_not_repeated_at_once() -> None:
    script = crowd()
    script(arrived())
    script(DecodeFailed(order_id="11-1", request_id="r1", worker_id="d0", reason="x", retryable=False))
    assert script(beat("p0", ["11-1"])) == []
    assert script(beat("p0", []), after_ns=1 * S) == []
    assert script(beat("p0", ["11-1"]), after_ns=1 * S) == []


def test_an_order_whose_other_half_goes_on_is_left_alone() -> None:
    script = crowd()
    script(arrived())
    script(prefilled("11-1"))
    for _ in range(3):
        assert script(beat("p0", ["11-1"]), after_ns=1 * S) == []


def test_a_heartbeat_of_another_incarnation_says_nothing_of_orders() -> None:
    script = crowd()
    script(arrived())
    for _ in range(3):
        old = WorkerHeartbeat(worker_id="p0", incarnation="i0", orders=["x"], obeyed_seq=1_000)
        assert "CancelOrder" not in kinds(script(old, after_ns=1 * S))
        script(StoreHeartbeat(node_id="n-p0", incarnation="i1"))
    assert list(script.core.state.orders) == ["11-1"]


def lacking(order_id: str = "11-1", *, worker_id: str = "d0") -> WorkerHeartbeat:
    return beat(worker_id, [order_id], lacking=[order_id])


def test_kv_that_did_not_come_after_the_end_of_prefill_has_the_request_placed_again() -> None:
    script = crowd()
    script(arrived())
    for _ in range(5):
        assert script(lacking(), after_ns=1 * S) == []  # the prefill takes its time
    script(prefilled("11-1"))
    assert script(lacking(), after_ns=900 * MS) == []  # may be under way
    assert script(lacking(), after_ns=200 * MS) == []
    decisions = script(lacking(), after_ns=1 * S)
    assert kinds(decisions) == ["CancelOrder", "ReleaseOrder", "ReleaseOrder", "StartPrefill", "StartDecode"]
    assert decisions[0] == CancelOrder(order_id="11-1", request_id="r1", worker_id="d0")
    assert script.core.state.requests["r1"].avoid == []  # nobody's fault


def test_kv_that_came_after_all_leaves_the_order_alone() -> None:
    script = crowd()
    script(arrived())
    script(prefilled("11-1"))
    assert script(lacking(), after_ns=2 * S) == []
    assert script(beat("d0", ["11-1"]), after_ns=1 * S) == []
    assert script(lacking(), after_ns=1 * S) == []  # counts from here
    assert script(lacking("9-1"), after_ns=1 * S) == [], (
        "an order of nobody's is cancelled by the second word only"
    )


def test_an_answer_that_is_lost_with_its_worker_has_the_request_placed_again() -> None:
    script = crowd(queued_max_per_worker=1)
    request = arrived()
    script(request)
    assert script(replace(request, answer_lost=True)) == []  # it runs
    script(prefilled("11-1"))
    script(finished("11-1"))
    assert script(request) == []  # a repeat
    for number in range(2):
        script(arrived(f"other{number}"))  # queues are full, and nothing else is taken
    start, then = script(replace(request, answer_lost=True))
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    assert (then.request_id, then.placement) == ("r1", 2)
    assert script(replace(request, answer_lost=True)) == []
    assert script(prefilled(start.order_id, worker_id=start.worker_id)) == []
    assert script(finished(start.order_id, worker_id=then.worker_id)) == []
    assert script.core.state.counters.finished == 2
