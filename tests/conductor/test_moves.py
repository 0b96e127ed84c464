"""Moves of KV while decoding, in the core: when one is planned, how large, and what is booked until it is answered."""

from __future__ import annotations

import random
from typing import Any

import pytest
from conductor_scripts import MS, PROFILE, S, Script, arrived, finished, prefilled
from msgspec.structs import replace
from test_lending import cluster, lender, lent, loans, placed

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import decided_rows, explained
from halfmoon.conductor.replay.histories import RequestHistories
from halfmoon.conductor.replay.logfile import EventLine
from halfmoon.conductor.view.status import request_counts
from halfmoon.schemas.codec import decode as decode_message
from halfmoon.schemas.codec import encode
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import CancelOrder, Decision, EndMove, MoveKv, StartDecode
from halfmoon.schemas.events import (
    ClusterConfigured,
    DecodeFailed,
    DecodeStarted,
    Event,
    KvMoved,
    KvMoveRefused,
    PolicyChanged,
    RequestCancelled,
    Stamped,
    TimerFired,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import Policy

#: Everything that comes is queued, by turns.
MOVING: dict[str, Any] = {"move_period_ns": 1 * S, "admission": "none", "name": "round_robin"}


def started(order: StartDecode) -> DecodeStarted:
    return DecodeStarted(order_id=order.order_id, request_id=order.request_id, worker_id=order.worker_id)


def begin(script: Script, request_id: str, tokens: int, max_tokens: int = 100) -> StartDecode:
    """Placed, prefilled and in the batch."""
    order = placed(script.orders(arrived(request_id, tokens=tokens, max_tokens=max_tokens)))
    script(prefilled(order.order_id, request_id))
    script(started(order))
    return order


def tick(script: Script) -> list[MoveKv]:
    """The next plan."""
    at_ns = script.core.timers["moves:plan"]
    decisions = script(TimerFired(key="moves:plan", at_ns=at_ns), max(0, at_ns - script.now_ns))
    return [one for one in decisions if isinstance(one, MoveKv)]


def skewed(**fields: Any) -> tuple[Script, StartDecode, StartDecode]:
    """d0 has a long request, and one that waits for room; d1, of the same size, has just become empty."""
    script = cluster(20, 20, **{**MOVING, **fields})
    long = begin(script, "long", 1_500)
    other = begin(script, "other", 1_500)
    waits = placed(script.orders(arrived("waits", tokens=500)))
    assert [each.worker_id for each in (long, other, waits)] == ["d0", "d1", "d0"]
    script(prefilled(waits.order_id, "waits"))
    script(finished(other.order_id, "other", "d1"))
    return script, long, waits


def moved(move: MoveKv, **changes: Any) -> KvMoved:
    fields = {
        "plan_id": move.plan_id,
        "order_id": move.order_id,
        "request_id": move.request_id,
        "worker_id": move.worker_id,
        "blocks": move.segments * 2,
        "moved_bytes": 7,
    }
    return KvMoved(**{**fields, **changes})


def refused(move: MoveKv, **changes: Any) -> KvMoveRefused:
    fields = {
        "plan_id": move.plan_id,
        "order_id": move.order_id,
        "request_id": move.request_id,
        "worker_id": move.worker_id,
        "reason": "full",
    }
    return KvMoveRefused(**{**fields, **changes})


# --- an owner that never answers ----------------------------------------------------------------------------


def test_a_move_that_is_never_answered_is_given_up_and_frees_the_ledger() -> None:
    script, long, _ = skewed(move_answer_ns=10 * S)
    (move,) = tick(script)
    for _ in range(9):
        assert tick(script) == []
    assert lent(script) == {"d1": 2}
    at_ns = script.core.timers["moves:plan"]
    decisions = script(TimerFired(key="moves:plan", at_ns=at_ns), max(0, at_ns - script.now_ns))
    (ended,) = [one for one in decisions if isinstance(one, EndMove)]
    assert (ended.plan_id, ended.worker_id) == (move.plan_id, "d1")
    assert script.core.state.counters.moves_refused == 1
    # It may be tried again at once: it is another plan.
    (again,) = [one for one in decisions if isinstance(one, MoveKv)]
    assert again.plan_id != move.plan_id
    # The late answer is of a plan that nobody waits for.
    script(moved(move))
    assert script.core.state.counters.moves == 0
    script(moved(again))
    assert script.core.state.orders[long.order_id].decode.moved_loans == 1


def test_it_is_given_up_though_nobody_lends_any_more() -> None:
    script, *_ = skewed(move_answer_ns=3 * S)
    assert tick(script)
    script(WorkerDraining(worker_id="d1", incarnation="i1"))
    for _ in range(3):
        tick(script)
    assert lent(script) == {}
    assert "moves:plan" not in script.core.timers


def test_in_older_logs_it_stays_booked() -> None:
    script, *_ = skewed()
    assert tick(script)
    for _ in range(400):
        assert tick(script) == []
    assert lent(script) == {"d1": 2}


# --- the plan -----------------------------------------------------------------------------------------------


def test_the_longest_request_gives_as_much_as_lets_the_next_one_join() -> None:
    script, long, _ = skewed()
    (move,) = tick(script)
    # 16 of 20 blocks are the long one's, 6 are wanted: one segment of two blocks is as much as is missing.
    assert (move.order_id, move.worker_id, move.lender_id, move.segments) == (long.order_id, "d0", "d1", 1)
    assert (move.request_id, move.tokens_per_step) == ("long", 32)
    state = script.core.state
    assert lent(script) == {"d1": 2}
    assert [state.workers[each].reserved_blocks for each in ("d0", "d1")] == [22, 2]
    assert tick(script) == []  # one at a time
    script(moved(move))
    assert [state.workers[each].reserved_blocks for each in ("d0", "d1")] == [20, 2]
    order = state.orders[long.order_id]
    half = order.decode
    assert (loans(half), half.moved_loans, half.move) == ([("d1", 1)], 1, None)  # type: ignore[arg-type]
    counters = state.counters
    assert (counters.moves, counters.moved_tokens, counters.moved_bytes) == (1, 200, 7)
    script(finished(long.order_id, "long"))
    assert lent(script) == {}


def test_a_full_cache_makes_room_before_anybody_waits() -> None:
    script = cluster(20, 20, **MOVING)
    begin(script, "r1", 1_500)
    other = begin(script, "r2", 1_500)
    begin(script, "r3", 200)
    assert {order.decode_id for order in script.core.state.orders.values()} == {"d0", "d1"}
    script(finished(other.order_id, "r2", "d1"))
    script.core.explain_requests = explain_all
    (move,) = tick(script)
    assert (move.request_id, move.lender_id) == ("r1", "d1")
    (grounds,) = script.core.move_notes
    assert (grounds.proactive, grounds.waiting, grounds.joining, grounds.owner_use) == (True, 0, 1, 95)
    assert grounds.rate_after > grounds.rate_before > 0


def test_nothing_moves_without_the_policy_without_lending_and_without_want() -> None:
    script, *_ = skewed(move_period_ns=0)
    assert "moves:plan" not in script.core.timers
    script = cluster(20, 20, lends=False, **MOVING)
    begin(script, "r1", 1_500)
    assert "moves:plan" not in script.core.timers
    script = cluster(20, 20, **MOVING)
    order = begin(script, "r1", 1_000)
    assert tick(script) == []
    script(finished(order.order_id, "r1"))
    tick(script)
    assert "moves:plan" not in script.core.timers  # an idle cluster is silent


def test_a_changed_policy_begins_to_plan() -> None:
    script, *_ = skewed(move_period_ns=0)
    script(PolicyChanged(policy=Policy(**MOVING)))
    assert [move.request_id for move in tick(script)] == ["long"]
    script(PolicyChanged(policy=Policy(admission="none")))
    assert tick(script) == []
    assert "moves:plan" not in script.core.timers


@pytest.mark.parametrize(
    "why",
    ["the lender is full", "draining", "another layout", "no gain", "the batch is full", "costs nothing"],
)
def test_what_keeps_a_move_from_being_ordered(why: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "the lender is full": {"move_to_percent": 1},
        # Attention elsewhere costs so much that one more in the batch does not make up for it.
        "no gain": {},
    }
    script, *_ = skewed(**changes.get(why, {}))
    state = script.core.state
    owner, other = state.workers["d0"], state.workers["d1"]
    match why:
        case "the lender is full":
            begin(script, "more", 100)
        case "draining":
            script(WorkerDraining(worker_id="d1", incarnation="i1"))
        case "another layout":
            other.layout = replace(other.layout, model="other")
        case "no gain":
            order = begin(script, "more", 100)
            assert order.worker_id == "d1"
            other.cost = replace(PROFILE, decode_per_context_token_ps=10**12)
            owner.cost = replace(PROFILE, decode_per_context_token_ps=10**12)
        case "the batch is full":
            owner.batch_max = 1
        case "costs nothing":
            owner.cost = CostProfile()
    assert tick(script) == []


def test_the_share_that_is_elsewhere_is_hidden_behind_the_share_that_is_here() -> None:
    """At most half of what the owner attends to, at equal costs; less where the lender is slower."""
    sizes = []
    for slower in (1, 3):
        script = cluster(40, 40, **MOVING)
        begin(script, "long", 3_000)
        other = begin(script, "other", 3_000)
        waits = placed(script.orders(arrived("waits", tokens=2_100)))
        script(prefilled(waits.order_id, "waits"))
        script(finished(other.order_id, "other", "d1"))
        lends = script.core.state.workers["d1"]
        slow = PROFILE.decode_per_context_token_ps * slower
        lends.cost = replace(PROFILE, decode_per_context_token_ps=slow)
        moves = tick(script)
        sizes.append([move.segments for move in moves])
    # 13 blocks are missing, 7 segments: 1,400 of 3,100 tokens may go where steps cost the same.
    assert sizes == [[7], []]


def test_who_lends_does_not_borrow_and_who_borrows_does_not_lend() -> None:
    script, long, waits = skewed()
    (move,) = tick(script)
    script(moved(move))
    script(started(waits))
    # d1, which lends now, gets as tight as d0 was; d0 gets empty.
    order = begin(script, "r4", 1_500)
    assert order.worker_id == "d1"
    script(finished(waits.order_id, "waits"))
    assert script.core.state.workers["d1"].reserved_blocks >= 18
    assert tick(script) == []
    assert loans(script.core.state.orders[long.order_id].decode) == [("d1", 1)]  # type: ignore[arg-type]


# --- answers ------------------------------------------------------------------------------------------------


def test_a_refused_move_leaves_nothing_booked_and_the_lender_is_told() -> None:
    script, long, _ = skewed()
    (move,) = tick(script)
    assert script.orders(refused(move)) == [
        EndMove(plan_id=move.plan_id, order_id=long.order_id, worker_id="d1")
    ]
    state = script.core.state
    assert (lent(script), state.workers["d1"].reserved_blocks) == ({}, 0)
    assert (state.orders[long.order_id].decode.loans, state.counters.moves_refused) == ([], 1)
    (again,) = tick(script)
    assert again.plan_id != move.plan_id


@pytest.mark.parametrize(
    "event", ["another plan", "another worker", "no order", "answered", "answered otherwise"]
)
def test_late_repeated_and_foreign_answers_change_nothing(event: str) -> None:
    script, _, _ = skewed()
    (move,) = tick(script)
    changes = {
        "another plan": {"plan_id": "1-1"},
        "another worker": {"worker_id": "d1"},
        "no order": {"order_id": "7-7"},
    }.get(event, {})
    if event.startswith("answered"):
        script(moved(move))
    before = script.core.state.workers["d1"].reserved_blocks, lent(script), script.core.state.counters.moves
    answers: list[Event] = [refused(move, **changes)]
    if event != "answered otherwise":
        answers.append(moved(move, **changes))
    for answer in answers:
        assert script.orders(answer) == []
    after = script.core.state.workers["d1"].reserved_blocks, lent(script), script.core.state.counters.moves
    assert after == before


@pytest.mark.parametrize("how", ["finished", "cancelled", "failed", "owner", "lender", "lender again"])
def test_what_a_move_booked_ends_with_its_order_and_with_either_worker(how: str) -> None:
    script, long, _ = skewed(placements_max=1)
    (move,) = tick(script)
    events: dict[str, Event] = {
        "finished": finished(long.order_id, "long"),
        "cancelled": RequestCancelled(request_id="long"),
        "failed": DecodeFailed(order_id=long.order_id, request_id="long", worker_id="d0", reason="x"),
        "owner": WorkerLeft(worker_id="d0"),
        "lender": WorkerLeft(worker_id="d1"),
        "lender again": lender(1, 20, incarnation="i2"),
    }
    told = script.orders(events[how])
    state = script.core.state
    assert lent(script) == {}
    # Who had it all goes on: a lender that is lost before it has anything costs nothing.
    goes_on = how.startswith("lender")
    assert (long.order_id in state.orders) == goes_on
    assert any(isinstance(one, CancelOrder) and one.worker_id == "d1" for one in told) != goes_on
    if goes_on:
        assert told == []
        assert state.orders[long.order_id].decode.move is None
        assert script.orders(moved(move)) == []


def test_a_lender_that_is_lost_after_the_move_costs_its_borrowers_their_place() -> None:
    script, long, _ = skewed()
    (move,) = tick(script)
    script(moved(move))
    told = script.orders(WorkerLeft(worker_id="d1"))
    assert [one.order_id for one in told if isinstance(one, CancelOrder)] == [long.order_id]
    assert placed(told).request_id == "long"


def test_what_a_lender_still_holds_of_a_move_that_is_over_it_is_told_to_drop() -> None:
    script, long, _ = skewed()
    (move,) = tick(script)
    beat = WorkerHeartbeat(worker_id="d1", incarnation="i1", orders=[long.order_id], obeyed_seq=10**6)
    assert script.orders(beat) == []
    script(refused(move))
    period = script.core.state.policy.heartbeat_ns
    assert script.orders(beat, period) == []
    assert script.orders(beat, period) == [CancelOrder(order_id=long.order_id, worker_id="d1")]


# --- the log ------------------------------------------------------------------------------------------------


def test_a_restored_core_goes_on_with_a_move_and_old_messages_are_read() -> None:
    script, _, _ = skewed()
    (move,) = tick(script)
    copy = Core.restore(script.core.snapshot(), checked=True, examined=True)
    stamped = Stamped(seq=script.core.seq + 1, at_ns=script.now_ns, event=moved(move))
    assert copy.step(stamped) == script.core.step(stamped)
    assert copy.digest() == script.core.digest()
    old = b'{"type":"ClusterConfigured","code_version":"t","log_version":2,"policy":{}}'
    assert decode_message(old, ClusterConfigured).policy.move_period_ns == 0
    assert encode(ClusterConfigured(code_version="t", log_version=2, policy=Policy())) == old


def test_whatever_happens_the_ledger_is_right() -> None:
    played = [play(seed) for seed in range(6)]
    ordered, done, declined = map(sum, zip(*played, strict=True))
    assert ordered > 10
    assert done > 4
    assert declined > 0


def play(seed: int) -> tuple[int, int, int]:
    """Requests, answers, repeats, losses and plans in any order; `check` runs after each event. Moves: ordered, done,
    refused.
    """
    draw = random.Random(seed)
    script = cluster(12, 16, 20, **{**MOVING, "move_from_percent": 40, "move_to_percent": 100})
    state, said = script.core.state, list[Event]()
    orders, moves = dict[str, StartDecode](), list[MoveKv]()

    def note(decisions: list[Decision]) -> None:
        orders.update({one.order_id: one for one in decisions if isinstance(one, StartDecode)})
        moves.extend(one for one in decisions if isinstance(one, MoveKv))

    for number in range(600):
        events: list[Event] = []
        if "moves:plan" in script.core.timers and draw.random() < 0.5:
            script.now_ns = max(script.now_ns, script.core.timers["moves:plan"])
            events.append(TimerFired(key="moves:plan", at_ns=script.core.timers["moves:plan"]))
        open_orders = list(state.orders)
        if open_orders:
            order = orders[draw.choice(open_orders)]
            ids = {"order_id": order.order_id, "request_id": order.request_id}
            running = state.orders[order.order_id].phase == "decode"
            if not running:
                prefill_id = state.orders[order.order_id].prefill_id
                events.append(prefilled(**ids, worker_id=prefill_id))
            else:
                events.append(started(order))
            if running and draw.random() < 0.3:
                events.append(finished(**ids, worker_id=order.worker_id))
            if draw.random() < 0.03:
                events.append(DecodeFailed(**ids, worker_id=order.worker_id, reason="x"))
        if moves:
            move = draw.choice(moves[-4:])
            events.append(moved(move) if draw.random() < 0.7 else refused(move))
        if draw.random() < 0.3:
            events.append(arrived(f"r{number}", tokens=draw.choice([100, 900, 1_500]), max_tokens=50))
        if draw.random() < 0.02:
            worker = draw.randrange(3)
            events.append(WorkerLeft(worker_id=f"d{worker}"))
            events.append(lender(worker, (12, 16, 20)[worker], incarnation=f"i{number}"))
        if said:
            events.append(draw.choice(said[-20:]))
        draw.shuffle(events)
        for event in events:
            note(script(event, draw.randrange(50 * MS)))
            if not isinstance(event, WorkerJoined | WorkerLeft):
                said.append(event)
    for request_id in list(state.requests):
        script(RequestCancelled(request_id=request_id))
    assert lent(script) == {}
    assert all(worker.reserved_blocks == 0 for worker in state.workers.values())
    return len(moves), state.counters.moves, state.counters.moves_refused


# --- for people ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["moved", "refused", "open"])
def test_a_requests_story_says_why_its_part_went_where_it_went(how: str) -> None:
    script, *_ = skewed()
    core, histories = Core(), RequestHistories()
    core.explain_requests = explain_all
    (move,) = tick(script)
    answers: dict[str, list[Event]] = {"moved": [moved(move)], "refused": [refused(move)], "open": []}
    for answer in answers[how]:
        script(answer, 2 * S)
    for stamped in script.log:
        decisions = core.step(stamped)
        histories.see(EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=stamped.event), decisions, core)
    text = explained(histories.of["long"])
    assert "1 segment (200 tokens) to move from d0 to d1" in text
    assert (
        "d0: a batch of 1, 110 % of its cache reserved, 1 waiting for room; with the move 1 more can join"
        in text
    )
    assert "d1: 0 % reserved" in text
    assert "tokens a second of both: 79.4, with the move 142.9" in text
    wanted = {
        "moved": "moved in 2.000 s: 7 bytes",
        "refused": "given up after 2.000 s: full",
        "open": "not answered",
    }
    assert wanted[how] in text
    (rows,) = decided_rows(histories.of["long"])
    assert any("to move from d0 to d1" in line for line in rows["more"])
    counts = request_counts(core.state)
    assert (counts.moves, counts.moves_refused) == (how == "moved", how == "refused")
