"""New requests that find no worker: they wait for one, up to a bound, and are then decided on as any that comes."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import MS, S, Script, arrived, decode, pair, prefill, store

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.replay.explain import verdict_text
from halfmoon.schemas.decisions import Decision, RejectRequest, SetTimer
from halfmoon.schemas.events import (
    PolicyChanged,
    RequestArrived,
    RequestCancelled,
    StoreLeft,
    TimerFired,
    WorkerDraining,
    WorkerLeft,
)
from halfmoon.schemas.policy import Policy

WAITING: dict[str, Any] = {"heartbeat_ns": 100 * S, "arrival_wait_ns_max": 10 * S}


def kinds(decisions: list[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def fire(script: Script, key: str) -> list[Decision]:
    script.now_ns = script.core.timers[key]
    return script(TimerFired(key=key, at_ns=script.now_ns))


def drained(worker_id: str, draining: bool = True) -> WorkerDraining:
    return WorkerDraining(worker_id=worker_id, incarnation="i1", draining=draining)


@pytest.mark.parametrize("worker_id", ["p0", "d0"])
def test_a_request_that_comes_while_the_only_worker_restarts_waits_for_it(worker_id: str) -> None:
    script = pair(**WAITING)
    script(drained(worker_id))
    script(WorkerLeft(worker_id=worker_id, incarnation="i1"))
    assert script(arrived()) == [SetTimer(key="unplaced:r1:0", at_ns=script.now_ns + 10 * S)]
    assert script(arrived()) == []  # told again, it is the same
    back = prefill(incarnation="i2") if worker_id == "p0" else decode(incarnation="i2")
    assert kinds(script.orders(back, after_ns=3 * S)) == ["StartPrefill", "StartDecode"]
    (order,) = script.core.state.orders.values()
    assert order.predicted.ttft_ns == 3 * S + 110 * MS  # counted from its arrival
    assert script.core.state.timers.keys() & {"unplaced:r1:0"} == set()
    assert script.core.state.counters.arrived == script.core.state.counters.placed == 1


def test_it_waits_for_a_store_agent_and_for_the_end_of_a_drain_too() -> None:
    script = pair(**WAITING)
    script(StoreLeft(node_id="n-d0", incarnation="i1"))
    assert script.orders(arrived("r1")) == []
    assert kinds(script.orders(store("d0", "i2"))) == ["StartPrefill", "StartDecode"]
    script(drained("p0"))
    assert script.orders(arrived("r2")) == []
    assert kinds(script.orders(drained("p0", draining=False))) == ["StartPrefill", "StartDecode"]


def test_those_that_wait_go_on_in_the_order_of_their_arrival() -> None:
    script = Script(**WAITING)
    script(decode())
    for number in range(3):
        assert script.orders(arrived(f"r{number}")) == []
    started = script.orders(prefill())
    assert [order.request_id for order in started if kinds([order]) == ["StartPrefill"]] == ["r0", "r1", "r2"]


def test_after_the_bound_it_is_refused_as_it_would_have_been_at_once() -> None:
    script, at_once = pair(**WAITING), pair(heartbeat_ns=100 * S)
    for one in (script, at_once):
        one(WorkerLeft(worker_id="d0"))
    script(arrived())
    refused = fire(script, "unplaced:r1:0")
    assert refused == at_once.orders(arrived())
    assert isinstance(refused[0], RejectRequest)
    assert (refused[0].reason, refused[0].message) == ("no_worker", "no decode worker is there")
    assert script.core.state.counters.rejected == {"no_worker": 1}
    assert (script.core.state.parked, script.core.state.requests) == ({}, {})
    assert script.orders(decode(1)) == []
    assert script(arrived()) == []


def test_it_waits_no_longer_than_until_its_first_token_is_late() -> None:
    script = Script(**WAITING)
    assert script(arrived(ttft_slo_ns=2 * S)) == [SetTimer(key="unplaced:r1:0", at_ns=script.now_ns + 2 * S)]


def test_the_time_that_it_waited_counts_when_it_is_decided_on() -> None:
    """110 ms of prefill hold an objective of 2 s; not after 1,950 ms."""
    script = Script(decode(), **WAITING)
    script(arrived(ttft_slo_ns=2 * S))
    (refused,) = script.orders(prefill(), after_ns=1_950 * MS)
    assert isinstance(refused, RejectRequest)
    assert (refused.reason, refused.message) == (
        "ttft_slo",
        "predicted time to first token 2060 ms is over 2000 ms",
    )
    assert script.core.state.requests == {}
    early = Script(decode(), **WAITING)
    early(arrived(ttft_slo_ns=2 * S))
    assert kinds(early.orders(prefill(), after_ns=1_800 * MS)) == ["StartPrefill", "StartDecode"]


def test_so_many_wait_and_no_more() -> None:
    script = Script(queued_max_per_worker=2, **WAITING)
    assert [kinds(script.orders(arrived(f"r{number}"))) for number in range(3)] == [[], [], ["RejectRequest"]]


def test_a_request_that_was_never_placed_may_be_cancelled_while_it_waits() -> None:
    script = Script(**WAITING)
    script(arrived())
    assert script(RequestCancelled(request_id="r1")) == []
    assert (script.core.state.parked, script.core.state.requests, dict(script.core.timers)) == ({}, {}, {})


def test_without_the_bound_nothing_waits_as_in_logs_of_before() -> None:
    assert Policy().arrival_wait_ns_max == 0
    script = Script()
    assert kinds(script(arrived())) == ["RejectRequest"]


def test_why_it_waits_and_what_became_of_it_can_be_explained() -> None:
    script = Script(decode(), **WAITING)
    script.core.explain_requests = lambda _: True
    script(arrived())
    (waits,) = script.core.notes
    assert (waits.lost_reason, verdict_text(waits)) == (
        "no prefill worker is there",
        "no worker could take it: it waits",
    )
    event = arrived("r2")
    assert isinstance(event, RequestArrived)
    assert verdict_text(script.core.explain(event, script.now_ns)) == "no worker could take it: it waits"
    script(prefill())
    (placed,) = script.core.notes
    assert (placed.lost_reason, verdict_text(placed)) == ("it waited for a worker", "placed on p0 and d0")


def test_a_core_that_begins_from_a_snapshot_goes_on_with_those_that_wait() -> None:
    script = Script(decode(), **WAITING)
    script(arrived())
    again = Core.restore(script.core.snapshot(), checked=True)
    script(prefill(), after_ns=1 * S)
    found = [again.step(stamped) for stamped in script.log[-2:]]
    assert found == script.decided[-2:]
    assert kinds(found[-1])[-2:] == ["StartPrefill", "StartDecode"]


# --- what no pool could hold --------------------------------------------------------------------------------


def test_a_prompt_that_no_pool_could_hold_is_refused_at_once_with_the_figures() -> None:
    """The nodes' pools hold 1,000 blocks of 100 tokens; the workers' own caches more."""
    large = {"kv_blocks": 5_000, "context_tokens_max": 400_000}
    script = Script(prefill(**large), decode(**large), pools_bound=True, ttft_slo_ns=1_000 * S)
    assert kinds(script.orders(arrived("r1", tokens=100_000, block_keys=b""))) == [
        "StartPrefill",
        "StartDecode",
    ]
    (refused,) = script.orders(arrived("r2", tokens=100_001, block_keys=b""))
    assert isinstance(refused, RejectRequest)
    assert (refused.reason, refused.message) == (
        "too_long",
        "100001 prompt tokens and 100 more fit no worker: the cluster holds prompts of up to 100000, "
        "400000 with the answer",
    )
    script(PolicyChanged(policy=Policy(ttft_slo_ns=1_000 * S)))  # as before there was such a bound
    assert kinds(script.orders(arrived("r3", tokens=100_001, block_keys=b""))) == [
        "StartPrefill",
        "StartDecode",
    ]


def test_the_bound_follows_the_members() -> None:
    small, large = {"kv_blocks": 20}, {"kv_blocks": 60}
    script = Script(prefill(**small), decode(**small), pools_bound=True)
    assert kinds(script.orders(arrived("a", tokens=3_000))) == ["RejectRequest"]
    script(prefill(1, **large))
    assert kinds(script.orders(arrived("b", tokens=3_000))) == ["RejectRequest"]
    script(decode(1, **large))
    assert kinds(script.orders(arrived("c", tokens=3_000))) == ["StartPrefill", "StartDecode"]
    script(WorkerLeft(worker_id="p1", incarnation="i1"))
    assert kinds(script.orders(arrived("d", tokens=3_000))) == ["RejectRequest"]
