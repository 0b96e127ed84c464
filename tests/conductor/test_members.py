"""Who is there: joining, living, draining, leaving, being lost; and the bus being away."""

from __future__ import annotations

from typing import Any

from conductor_scripts import (
    MS,
    S,
    Script,
    arrived,
    decode,
    finished,
    keys,
    pair,
    prefill,
    prefilled,
    store,
    stored,
)

from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    Decision,
    FailRequest,
    RejectRequest,
    ReleaseOrder,
    SetTimer,
    StartDecode,
    StartPrefill,
)
from halfmoon.schemas.events import (
    BlocksEvicted,
    BlocksStored,
    DecodeFailed,
    Event,
    FrontendHeartbeat,
    FrontendJoined,
    FrontendLeft,
    PrefillFailed,
    RequestCancelled,
    StoreHeartbeat,
    StoreInventory,
    StoreLeft,
    TimerFired,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerLeft,
)


def beat(worker_id: str, incarnation: str = "i1", **fields: Any) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id=worker_id, incarnation=incarnation, **fields)


def fire(script: Script, key: str) -> list[Decision]:
    """The timer `key`, at the time for which it is set."""
    at_ns = script.core.timers[key]
    script.now_ns = max(script.now_ns, at_ns)
    return script(TimerFired(key=key, at_ns=at_ns))


def kinds(decisions: list[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def placed(script: Script, request_id: str = "r1") -> tuple[str, str]:
    start, then = script.orders(arrived(request_id))
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    return start.worker_id, then.worker_id


def crowd(**policy: Any) -> Script:
    """Two of each worker, with stores."""
    script = Script(**policy)
    for number in (0, 1):
        script(prefill(number))
        script(decode(number))
    script(FrontendJoined(frontend_id="f1", incarnation="i1"))
    return script


def test_each_process_that_joins_gets_one_timer() -> None:
    script = Script(stores=False)
    due = script.now_ns + 4 * S
    assert script(prefill()) == [SetTimer(key="lost:prefill:p0:i1", at_ns=due)]
    assert script(decode()) == [SetTimer(key="lost:decode:d0:i1", at_ns=due)]
    assert script(store("p0")) == [SetTimer(key="lost:store:n-p0:i1", at_ns=due)]
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    assert script(joined) == [SetTimer(key="lost:frontend:f1:i1", at_ns=due)]
    for again in (prefill(), decode(), store("p0"), joined):
        assert script(again, after_ns=1 * S) == []


def test_a_process_that_lives_is_given_another_timer() -> None:
    script = pair()
    for _ in range(3):
        script(beat("p0"), after_ns=1 * S)
    assert script(TimerFired(key="lost:prefill:p0:i1", at_ns=1_004 * S), after_ns=1 * S) == [
        SetTimer(key="lost:prefill:p0:i1", at_ns=1_007 * S)
    ]


def test_a_timer_that_fires_early_gets_another_name() -> None:
    script = pair()
    assert script(TimerFired(key="lost:prefill:p0:i1", at_ns=1_004 * S)) == [
        SetTimer(key="lost:prefill:p0:i1", at_ns=1_004 * S + 1)
    ]


def test_timers_that_were_not_set_or_fired_before_do_nothing() -> None:
    script = pair()
    for _ in range(5):
        script(beat("d0"), after_ns=1 * S)
    assert script(TimerFired(key="lost:prefill:p0:i1", at_ns=1)) == []
    assert script(TimerFired(key="lost:prefill:zz:i1", at_ns=1)) == []
    assert script(TimerFired(key="what is this", at_ns=1)) == []
    assert "p0" in script.core.state.workers
    script(TimerFired(key="lost:prefill:p0:i1", at_ns=1_004 * S))
    assert "p0" not in script.core.state.workers
    assert script(TimerFired(key="lost:prefill:p0:i1", at_ns=1_004 * S)) == []


def test_who_is_not_heard_of_is_lost_and_who_comes_back_is_asked_once() -> None:
    script = pair()
    for _ in range(4):
        script(beat("d0"), after_ns=1 * S)
    for key in ("lost:prefill:p0:i1", "lost:store:n-p0:i1", "lost:frontend:f1:i1"):
        assert fire(script, key) == []
    state = script.core.state
    assert (list(state.workers), list(state.stores), list(state.frontends)) == (["d0"], ["n-d0"], [])
    returning: list[tuple[Event, AnnounceYourself]] = [
        (beat("p0"), AnnounceYourself(role="prefill", target_id="p0")),
        (StoreHeartbeat(node_id="n-p0", incarnation="i1"), AnnounceYourself(role="store", target_id="n-p0")),
        (
            FrontendHeartbeat(frontend_id="f1", incarnation="i1"),
            AnnounceYourself(role="frontend", target_id="f1"),
        ),
    ]
    for event, ask in returning:
        assert script(event) == [ask]
        assert script(event, after_ns=1 * S) == []
        assert script(event, after_ns=1 * S) == [ask]
    assert kinds(script(prefill())) == ["SetTimer"]
    assert script(beat("p0")) == []
    assert script(beat("p0", "i2")) == [AnnounceYourself(role="prefill", target_id="p0")]


def test_a_frontend_that_has_heard_nothing_of_a_request_is_told_that_it_ended() -> None:
    """Its refusal was lost on its way. One that is open goes on, and so does one whose arrival is still under
    way.
    """
    script = crowd(queued_max_per_worker=1)
    for number in range(4):
        script(arrived(f"r{number}"))
    state = script.core.state
    assert len(state.requests) == 2, "the others were refused"
    ended = [f"r{number}" for number in range(4) if f"r{number}" not in state.requests]
    silent = ["r0", "r1", "r2", "r3", "its arrival comes later"]
    told = script(FrontendHeartbeat(frontend_id="f1", incarnation="i1", open_requests=4, silent=silent))
    assert kinds(told) == ["FailRequest"] * 2
    assert [fail.request_id for fail in told if isinstance(fail, FailRequest)] == ended
    assert "lost" in told[0].message  # type: ignore[union-attr]
    assert script(FrontendHeartbeat(frontend_id="f1", incarnation="i1", silent=["r0"])) == []
    assert kinds(script(FrontendHeartbeat(frontend_id="f9", incarnation="i1", silent=["r2"]))) == [
        "AnnounceYourself"
    ]


def test_nobody_is_lost_while_the_bus_was_away() -> None:
    script = crowd()
    assert placed(script) == ("p0", "d0")
    script(beat("p0"), after_ns=600 * S)  # all of them were silent for ten minutes
    for key in list(script.core.timers):
        decisions = fire(script, key)
        assert kinds(decisions) == ["SetTimer"], key
    assert len(script.core.state.workers) == 4
    for _ in range(4):
        script(beat("p0"), after_ns=1 * S)
    for key in list(script.core.timers):
        fire(script, key)
    assert list(script.core.state.workers) == ["p0"]


def test_all_are_lost_at_last_when_nothing_but_timers_is_heard() -> None:
    script = pair()
    for _ in range(60):
        if not script.core.timers:
            break
        key = min(script.core.timers, key=lambda key: (script.core.timers[key], key))
        fire(script, key)
    state = script.core.state
    assert (state.workers, state.stores, state.frontends, dict(state.timers)) == ({}, {}, {}, {})


def test_a_lost_prefill_worker_has_its_unfinished_requests_placed_again() -> None:
    script = crowd()
    assert [placed(script, f"r{n}") for n in range(4)] == [
        ("p0", "d0"),
        ("p1", "d1"),
        ("p0", "d0"),
        ("p1", "d1"),
    ]
    script(prefilled("11-1", "r0", "p0"))
    # r0 is in decode already; r2 is not. Its blocks may lie in both nodes, and d0 waits for it.
    again = script.orders(WorkerLeft(worker_id="p0"))
    assert [(type(d).__name__, getattr(d, "order_id", "")) for d in again] == [
        ("CancelOrder", "13-1"),
        ("ReleaseOrder", "13-1"),
        ("ReleaseOrder", "13-1"),
        ("StartPrefill", "16-1"),
        ("StartDecode", "16-1"),
    ]
    assert again[:3] == [
        CancelOrder(order_id="13-1", request_id="r2", worker_id="d0"),
        ReleaseOrder(order_id="13-1", node_id="n-p0"),
        ReleaseOrder(order_id="13-1", node_id="n-d0"),
    ]
    assert isinstance(again[3], StartPrefill)
    assert (again[3].worker_id, again[3].request_id) == ("p1", "r2")
    assert isinstance(again[4], StartDecode)
    assert (again[4].worker_id, again[4].placement) == ("d0", 2)


def test_a_lost_decode_worker_has_all_its_requests_placed_again() -> None:
    script = crowd()
    placed(script, "r0")
    placed(script, "r1")
    script(prefilled("11-1", "r0", "p0"))
    script(StoreLeft(node_id="n-d0"))
    # Prefill of r0 is over, so nobody is told to stop it; the store agent of the dead node is gone too.
    again = script.orders(WorkerLeft(worker_id="d0", incarnation="i1"))
    assert kinds(again) == ["ReleaseOrder", "StartPrefill", "StartDecode"]
    assert again[0] == ReleaseOrder(order_id="11-1", node_id="n-p0")
    assert script.core.state.requests["r0"].placements == 2
    assert script.core.state.requests["r1"].placements == 1


def test_an_accepted_request_is_not_refused_when_it_is_placed_again() -> None:
    script = crowd(ttft_slo_ns=150 * MS, queued_max_per_worker=1)
    placed(script, "r0")
    placed(script, "r1")
    again = script.orders(WorkerLeft(worker_id="p0"))
    assert kinds(again) == ["CancelOrder", "ReleaseOrder", "ReleaseOrder", "StartPrefill", "StartDecode"]
    assert isinstance(again[3], StartPrefill)
    assert again[3].predicted.ttft_ns == 220 * MS


def test_a_new_incarnation_replaces_the_old_and_takes_its_requests_over() -> None:
    script = pair()
    assert placed(script) == ("p0", "d0")
    again = script(prefill(incarnation="i2"))
    assert kinds(again) == [
        "SetTimer",
        "CancelOrder",
        "ReleaseOrder",
        "ReleaseOrder",
        "StartPrefill",
        "StartDecode",
    ]
    assert again[0] == SetTimer(key="lost:prefill:p0:i2", at_ns=script.now_ns + 4 * S)
    assert again[1] == CancelOrder(order_id="7-1", request_id="r1", worker_id="d0")
    assert script(prefilled("7-1")) == []
    assert script.core.state.workers["p0"].orders == {"8-1": 110 * MS}
    assert "lost:prefill:p0:i1" not in script.core.timers


def test_the_same_incarnation_that_joins_again_keeps_its_orders() -> None:
    script = pair()
    placed(script)
    assert script(prefill(kv_blocks=7)) == []
    assert script.core.state.workers["p0"].orders == {"7-1": 110 * MS}
    assert script.core.state.workers["p0"].kv_blocks == 7


def test_a_worker_that_was_asked_has_dropped_its_orders_when_it_joins_again() -> None:
    script = crowd()
    assert placed(script) == ("p0", "d0")
    assert script(beat("d0", "i0")) == [AnnounceYourself(role="decode", target_id="d0")]
    again = script(decode())
    assert kinds(again) == [
        "CancelOrder",
        "CancelOrder",
        "ReleaseOrder",
        "ReleaseOrder",
        "StartPrefill",
        "StartDecode",
    ]
    assert again[1] == CancelOrder(order_id="11-1", request_id="r1", worker_id="d0")
    assert script(decode()) == []


def test_a_word_of_an_old_incarnation_changes_nothing() -> None:
    script = pair()
    script(prefill(incarnation="i2"))
    assert script(WorkerLeft(worker_id="p0", incarnation="i1")) == []
    assert script(WorkerDraining(worker_id="p0", incarnation="i1")) == []
    script(store("p0", "i2"))
    script(stored("p0", keys(5)))  # of i1
    script(StoreLeft(node_id="n-p0", incarnation="i1"))
    script(FrontendLeft(frontend_id="f1", incarnation="i0"))
    state = script.core.state
    assert not state.workers["p0"].draining
    assert (list(state.stores), list(state.frontends), state.index.blocks) == (["n-p0", "n-d0"], ["f1"], 0)


def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has() -> None:
    script = crowd()
    assert placed(script, "r0") == ("p0", "d0")
    assert script(WorkerDraining(worker_id="p0", incarnation="i1")) == []
    assert [placed(script, f"x{n}")[0] for n in range(3)] == ["p1"] * 3
    assert script(prefilled("11-1", "r0", "p0")) == []
    assert script.core.state.orders["11-1"].phase == "decode"


def test_a_worker_that_no_longer_drains_takes_orders_and_what_is_parked() -> None:
    script = pair(heartbeat_ns=100 * S)
    script(WorkerDraining(worker_id="p0", incarnation="i1"))
    assert kinds(script(arrived("r0"))) == ["RejectRequest"]
    assert script(WorkerDraining(worker_id="p0", incarnation="i1", draining=False)) == []
    assert placed(script) == ("p0", "d0")
    script(WorkerDraining(worker_id="d0", incarnation="i1"))
    failed = DecodeFailed(order_id="10-1", request_id="r1", worker_id="d0", reason="broke")
    assert kinds(script.orders(failed)) == ["CancelOrder", "ReleaseOrder", "ReleaseOrder"]
    assert script(WorkerDraining(worker_id="d0", incarnation="i0", draining=False)) == []
    again = script(WorkerDraining(worker_id="d0", incarnation="i1", draining=False), after_ns=1 * S)
    assert kinds(again) == ["StartPrefill", "StartDecode"]
    assert script.core.state.parked == {}


def test_a_worker_whose_store_left_takes_nothing_new_until_it_is_back_and_finishes_what_it_has() -> None:
    script = crowd()
    assert placed(script, "r0") == ("p0", "d0")
    assert script(StoreLeft(node_id="n-p0")) == []
    assert script(StoreLeft(node_id="n-d0")) == []
    assert [placed(script, f"x{n}") for n in range(3)] == [("p1", "d1")] * 3
    assert script(prefilled("11-1", "r0", "p0")) == []
    assert script(finished("11-1", "r0", "d0")) == []
    assert script.core.state.counters.finished == 1
    script(store("p0", "i2"))
    assert placed(script, "y0") == ("p0", "d1")
    script(store("d0", "i2"))
    assert placed(script, "y1") == ("p0", "d0")


def test_without_any_store_left_there_is_no_worker_for_a_new_request() -> None:
    script = pair()
    script(StoreLeft(node_id="n-d0"))
    refused = script(arrived())[0]
    assert isinstance(refused, RejectRequest)
    assert (refused.reason, refused.message) == ("no_worker", "no decode worker is there")


def test_a_request_that_waits_is_placed_when_the_store_agent_is_back() -> None:
    script = pair(heartbeat_ns=100 * S)
    placed(script)
    script(StoreLeft(node_id="n-p0"))
    failed = PrefillFailed(order_id="7-1", request_id="r1", worker_id="p0", reason="its store agent is gone")
    assert kinds(script(failed)) == ["CancelOrder", "ReleaseOrder", "SetTimer"]
    assert script(beat("p0"), after_ns=1 * S) == []
    assert kinds(script(store("p0", "i2"))) == ["SetTimer", "StartPrefill", "StartDecode"]
    assert script.core.state.parked == {}


def test_an_inventory_in_parts_rebuilds_the_index() -> None:
    script = pair()
    chain = keys(6)
    script(stored("p0", keys(3, seed=9)))

    def part(number: int, block_keys: bytes, incarnation: str = "i2") -> StoreInventory:
        return StoreInventory(
            node_id="n-p0", incarnation=incarnation, part=number, parts=2, block_keys=block_keys
        )

    script(store("p0", "i2"))
    assert script.core.state.index.blocks == 0
    script(part(1, chain[48:]))
    script(part(0, chain[:48]))
    script(part(0, keys(3, seed=5), incarnation="i1"))
    assert script.core.state.index.match(chain, 6) == {"n-p0": 6}
    script(BlocksEvicted(node_id="n-p0", incarnation="i2", block_keys=chain[64:]))
    script(part(1, chain[48:]))  # delivered twice: what was evicted since does not come back
    script(BlocksStored(node_id="n-unknown", incarnation="i1", block_keys=chain))
    assert script.core.state.index.match(chain, 6) == {"n-p0": 4}


def test_without_a_worker_an_accepted_request_waits_for_one() -> None:
    script = pair(heartbeat_ns=100 * S)
    placed(script)
    lost = script(WorkerLeft(worker_id="p0"))
    assert lost == [
        CancelOrder(order_id="7-1", request_id="r1", worker_id="d0"),
        ReleaseOrder(order_id="7-1", node_id="n-p0"),
        ReleaseOrder(order_id="7-1", node_id="n-d0"),
        SetTimer(key="unplaced:r1:1", at_ns=script.now_ns + 30 * S),
    ]
    assert kinds(script.orders(prefill(7), after_ns=10 * S)) == ["StartPrefill", "StartDecode"]
    assert script.core.state.orders["10-1"].predicted.ttft_ns == 10 * S + 110 * MS  # counted from its arrival
    assert script(TimerFired(key="unplaced:r1:1", at_ns=1_030 * S), after_ns=20 * S) == []


def test_a_request_that_waits_too_long_fails() -> None:
    script = pair()
    placed(script)
    script(WorkerLeft(worker_id="d0"))
    assert fire(script, "unplaced:r1:1") == [
        FailRequest(request_id="r1", frontend_id="f1", message="no worker came in time")
    ]
    assert script(arrived()) == []
    assert script.orders(decode(1)) == []


def test_a_request_that_waits_may_be_cancelled() -> None:
    script = pair()
    placed(script)
    script(WorkerLeft(worker_id="d0"))
    assert script(RequestCancelled(request_id="r1")) == []
    assert (script.core.state.parked, script.core.state.requests) == ({}, {})
    assert script.orders(decode(1)) == []


def test_a_request_is_not_placed_for_ever() -> None:
    script = crowd(placements_max=2)
    placed(script)
    script(WorkerLeft(worker_id="p0"))
    ended = script.orders(WorkerLeft(worker_id="p1"))
    assert kinds(ended) == ["CancelOrder", "ReleaseOrder", "ReleaseOrder", "FailRequest"]
    assert ended[-1] == FailRequest(
        request_id="r1",
        frontend_id="f1",
        message="placed 2 times, and each time lost; last: worker p1 was lost",
    )


def test_a_frontend_that_leaves_has_its_requests_cancelled() -> None:
    script = crowd()
    placed(script, "r0")
    placed(script, "r1")
    script(arrived("other", frontend_id="f2"))
    script(prefilled("11-1", "r0", "p0"))
    assert script(FrontendLeft(frontend_id="f1")) == [
        CancelOrder(order_id="11-1", request_id="r0", worker_id="d0"),
        ReleaseOrder(order_id="11-1", node_id="n-p0"),
        ReleaseOrder(order_id="11-1", node_id="n-d0"),
        CancelOrder(order_id="12-1", request_id="r1", worker_id="p1"),
        CancelOrder(order_id="12-1", request_id="r1", worker_id="d1"),
        ReleaseOrder(order_id="12-1", node_id="n-p1"),
        ReleaseOrder(order_id="12-1", node_id="n-d1"),
    ]
    assert list(script.core.state.requests) == ["other"]
    # Lost by mistake: it joins again and sends its requests once more.
    script(FrontendJoined(frontend_id="f1", incarnation="i1"))
    assert placed(script, "r0")


def test_a_new_incarnation_of_a_frontend_does_not_read_the_old_ones_requests() -> None:
    script = pair()
    placed(script)
    assert kinds(script(FrontendJoined(frontend_id="f1", incarnation="i2"))) == [
        "CancelOrder",
        "CancelOrder",
        "ReleaseOrder",
        "ReleaseOrder",
        "SetTimer",
    ]


def test_heartbeats_refit_the_cost_of_decode_and_are_kept_for_people() -> None:
    script = pair()
    for _ in range(100):
        script(
            beat("d0", steps=10, step_ns=60 * MS, step_sequences=10, step_context_tokens=10_000), after_ns=S
        )
    worker = script.core.state.workers["d0"]
    cost = worker.cost
    assert worker.learning.profile != cost
    step = cost.decode_base_ns + 10 * cost.decode_per_sequence_ns + 10 * cost.decode_per_context_token_ps
    assert abs(step - 60 * MS) < 1 * MS
    script(beat("d0", queued=1, running=2, kv_blocks_used=3))
    assert (worker.report.queued, worker.report.running, worker.report.kv_blocks_used) == (1, 2, 3)


def test_a_log_that_begins_late_works_too() -> None:
    script = Script()
    state = script.core.state
    assert script(prefilled("3-1")) == []
    assert script(beat("p0")) == [AnnounceYourself(role="prefill", target_id="p0")]
    assert script(StoreHeartbeat(node_id="n-p0", incarnation="i1")) == [
        AnnounceYourself(role="store", target_id="n-p0")
    ]
    script(prefill())
    script(decode())
    assert placed(script) == ("p0", "d0")
    assert state.frontends == {}
