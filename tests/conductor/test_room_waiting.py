"""Requests that must borrow and find no room wait in a line for the soonest, and who comes later does not take it."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import MS, S, Script, arrived, decode, finished, prefill, prefilled, worker
from test_lending import SEGMENTS, cluster, lender, lent, loans, placed

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.replay.explain import remarks, verdict_text
from halfmoon.schemas.decisions import Decision, RejectRequest, StartDecode
from halfmoon.schemas.events import (
    FrontendJoined,
    RequestCancelled,
    TimerFired,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import Policy

WAITS: dict[str, Any] = {"admission": "none", "room_wait_ns_max": 60 * S}


def started(decisions: list[Decision]) -> list[tuple[str, str]]:
    """Which request is decoded where."""
    return [(one.request_id, one.worker_id) for one in decisions if isinstance(one, StartDecode)]


def refusals(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(one.request_id, one.reason) for one in decisions if isinstance(one, RejectRequest)]


def fire(script: Script, key: str) -> list[Decision]:
    script.now_ns = script.core.timers[key]
    return script(TimerFired(key=key, at_ns=script.now_ns))


def kept(script: Script) -> tuple[str, dict[str, int]] | None:
    claim = script.core.state.claim
    return None if claim is None else (claim.request_id, claim.blocks)


def full(**policy: Any) -> tuple[Script, StartDecode]:
    """Two workers of eight blocks, of which a request that is decoded at the first one has ten."""
    script = cluster(8, 8, **WAITS | policy)
    first = placed(script.orders(arrived("r1", tokens=900)))
    assert (first.worker_id, loans(first)) == ("d0", [("d1", 1)])
    script(prefilled(first.order_id, "r1"))
    return script, first


@pytest.mark.parametrize("admission", ["none", "predicted", "early", "late"])
def test_what_must_borrow_waits_and_gets_the_room_that_another_leaves(admission: str) -> None:
    script, first = full(admission=admission)
    assert script.orders(arrived("r2", tokens=1_000)) == []
    assert (list(script.core.state.line), list(script.core.state.parked)) == (["r2"], ["r2"])
    assert kept(script) == ("r2", {"d0": 7, "d1": 4})
    after = script.orders(finished(first.order_id, "r1", "d0"), after_ns=S)
    assert started(after) == [("r2", "d0")]
    state = script.core.state
    assert (state.line, state.parked, state.claim, lent(script)) == ({}, {}, None, {"d1": 4})
    (order,) = state.orders.values()
    assert order.predicted.queue_ns == S  # what it waited is part of the time to its first token


def test_the_first_that_came_is_the_first_that_goes_though_a_later_one_would_fit() -> None:
    script, first = full()
    script(arrived("r2", tokens=1_400))  # all of both
    script(arrived("r3", tokens=1_000))
    assert list(script.core.state.line) == ["r2", "r3"]
    again = placed(script.orders(finished(first.order_id, "r1", "d0")))
    assert again.request_id == "r2"
    script(prefilled(again.order_id, "r2"))
    assert list(script.core.state.line) == ["r3"]
    assert started(script.orders(finished(again.order_id, "r2", again.worker_id))) == [("r3", "d0")]


def test_what_fits_a_cache_does_not_take_the_room_that_is_kept_and_comes_after() -> None:
    """Else one short request after the other would keep the long one out for ever."""
    script, first = full()
    script(arrived("r2", tokens=1_400))
    assert started(script.orders(arrived("s1", tokens=500))) == []  # d1 has six blocks for it now
    assert list(script.core.state.line) == ["r2", "s1"]
    # Behind it there is no more to keep: what fits a cache is queued there.
    after = started(script.orders(finished(first.order_id, "r1", "d0")))
    assert after[0] == ("r2", "d0")
    assert [each for each, _ in after] == ["r2", "s1"]


def test_it_may_use_the_room_where_it_ends_before_and_only_then() -> None:
    script, _ = full()
    script(arrived("r2", tokens=1_400))
    assert script.core.state.claim is not None
    script.core.state.claim.at_ns = script.now_ns + 10_000 * S
    assert started(script.orders(arrived("s1", tokens=500))) == [("s1", "d1")]
    script.core.state.claim.at_ns = script.now_ns
    assert started(script.orders(arrived("s2", tokens=100, max_tokens=1))) == []


def test_a_worker_of_which_nothing_is_kept_takes_what_fits_it() -> None:
    script = cluster(8, 8, 4, **WAITS)
    first = placed(script.orders(arrived("r1", tokens=1_500)))
    script(arrived("r2", tokens=1_400))
    claim = kept(script)
    assert claim is not None
    free = [each for each in ("d0", "d1", "d2") if each not in claim[1]]
    assert [worker for _, worker in started(script.orders(arrived("s1", tokens=100)))] == free
    assert first.request_id == "r1"


def test_after_its_time_it_is_refused_and_the_next_one_is_first() -> None:
    script, _ = full()
    script(arrived("r2", tokens=1_000))
    script(arrived("r3", tokens=1_000), after_ns=S)
    assert refusals(fire(script, "unplaced:r2:0")) == [("r2", "no_room")]
    assert (list(script.core.state.line), kept(script)) == (["r3"], ("r3", {"d0": 7, "d1": 4}))
    script(RequestCancelled(request_id="r3"))
    state = script.core.state
    assert (state.line, state.claim, state.parked) == ({}, None, {})


def test_whose_first_token_would_be_late_is_refused_at_once_and_told_when_there_is_room() -> None:
    script, _ = full(admission="predicted")
    (refused,) = script.orders(arrived("r2", tokens=1_000, ttft_slo_ns=900 * MS))
    assert isinstance(refused, RejectRequest)
    room_ns = script.core.state.orders[next(iter(script.core.state.orders))]
    expected = room_ns.prefill_end_ns + room_ns.decode_ns - script.now_ns
    assert (refused.reason, refused.retry_after_ns) == ("no_room", expected)


def test_behind_others_it_is_expected_later() -> None:
    script, _ = full()
    script.core.explain_requests = lambda _: True
    expected = []
    for number in range(2, 5):
        script(arrived(f"r{number}", tokens=1_400))
        (why,) = script.core.notes
        assert why.room is not None
        expected.append((why.room.at_ns, why.room.ahead))
    times = [at for at, _ in expected]
    assert times == sorted(set(times))
    assert [ahead for _, ahead in expected] == [0, 1, 2]


def test_what_never_fits_is_refused_at_once_by_name() -> None:
    script, _ = full()
    script(arrived("r2", tokens=1_000))
    assert refusals(script.orders(arrived("r3", tokens=5_000))) == [("r3", "too_long")]


def test_so_many_wait_and_no_more() -> None:
    script, _ = full(queued_max_per_worker=2)
    found = [refusals(script.orders(arrived(f"w{number}", tokens=1_000))) for number in range(3)]
    assert found == [[], [], [("w2", "no_room")]]


def test_one_that_was_accepted_before_goes_first_and_waits_as_long() -> None:
    script = cluster(8, 8, 8, **WAITS)
    first = placed(script.orders(arrived("r1", tokens=1_000)))
    assert (first.worker_id, loans(first)) == ("d0", [("d1", 2)])
    second = placed(script.orders(arrived("r2", tokens=600)))
    assert second.worker_id == "d2"
    script(arrived("r3", tokens=2_300))
    assert kept(script) is not None
    script(WorkerLeft(worker_id="d1"))
    assert list(script.core.state.line) == ["r1", "r3"]
    claim = kept(script)
    assert claim is not None
    assert claim[0] == "r1"
    assert script.core.timers["unplaced:r1:1"] == script.now_ns + 60 * S
    assert [each for each, _ in started(script.orders(finished(second.order_id, "r2", "d2")))] == ["r1"]


def test_a_claim_is_made_anew_where_its_workers_are_gone_and_ends_when_nobody_is_left_to_lend() -> None:
    script = cluster(8, 8, 8, **WAITS)
    placed(script.orders(arrived("r1", tokens=1_400)))
    script(arrived("r2", tokens=1_400))
    before = kept(script)
    assert before is not None
    gone = next(each for each in before[1] if each != "d0")
    script(WorkerLeft(worker_id=gone))
    after = kept(script)
    assert after is not None
    assert gone not in after[1]


def test_who_waited_for_a_worker_waits_for_room_when_that_one_has_none() -> None:
    script, _ = full(arrival_wait_ns_max=10 * S)
    script(WorkerLeft(worker_id="p0"))
    script(arrived("r2", tokens=1_000))
    assert (list(script.core.state.parked), script.core.state.line) == (["r2"], {})
    script(prefill(layout=SEGMENTS, incarnation="i2"), after_ns=S)
    assert list(script.core.state.line) == ["r2"]
    assert script.core.timers["unplaced:r2:0"] == script.now_ns + 60 * S


def test_room_at_attention_workers_is_waited_for_too() -> None:
    holders: list[WorkerJoined] = [
        worker("a0", "attention", layout=SEGMENTS, kv_blocks=10),
        decode(0, layout=SEGMENTS, kv_blocks=1, cache_elsewhere=True),
    ]
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    script = Script(prefill(layout=SEGMENTS), *holders, joined, heartbeat_ns=10**12, **WAITS)
    first = placed(script.orders(arrived("r1", tokens=700)))
    assert started(script.orders(arrived("r2", tokens=700))) == []
    assert started(script.orders(arrived("r3", tokens=100))) == []  # it would fit beside the first
    assert (list(script.core.state.line), kept(script)) == (["r2", "r3"], ("r2", {"a0": 8}))
    script(prefilled(first.order_id, "r1"))
    after = script.orders(finished(first.order_id, "r1", "d0"))
    assert [each for each, _ in started(after)] == ["r2", "r3"]


def test_why_it_waits_is_explained_and_what_others_leave_free() -> None:
    script, first = full()
    script.core.explain_requests = lambda _: True
    script(arrived("r2", tokens=1_400))
    (waits,) = script.core.notes
    assert waits.lost_reason == "no decode worker has room for the request's KV"
    assert verdict_text(waits).startswith(
        "waits for room: d0 to decode it, 7 blocks at d0, 8 blocks at d1, expected in "
    )
    script(arrived("r3", tokens=1_400))
    (behind,) = script.core.notes
    assert verdict_text(behind).endswith(", behind 1 that waits")
    (line,) = [one for one in remarks(behind, None) if "kept for" in one]
    assert line.startswith("7 blocks of d0, 8 blocks of d1 are kept for r2, which waits for room since ")
    script(finished(first.order_id, "r1", "d0"))
    notes = script.core.notes
    assert [(one.request_id, one.lost_reason) for one in notes] == [("r2", "it waited for room")]


def test_a_core_that_begins_from_a_snapshot_goes_on_with_the_line() -> None:
    script, first = full()
    script(arrived("r2", tokens=1_000))
    again = Core.restore(script.core.snapshot(), checked=True, examined=True)
    script(finished(first.order_id, "r1", "d0"))
    assert again.step(script.log[-1]) == script.decided[-1]
    assert again.digest() == script.core.digest()


def test_without_the_policy_it_is_refused_as_in_logs_of_before() -> None:
    assert Policy().room_wait_ns_max == 0
    script, _ = full(room_wait_ns_max=0)
    assert refusals(script.orders(arrived("r2", tokens=1_000))) == [("r2", "no_room")]
    assert lender(0, 8).lends
