"""Moves in the decode machine: segments of a running sequence go to a lender while it decodes. No asyncio, no model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from decode_script import MS, Script, opened, order, ready, reply, result
from test_decode_lending import borrowing, copied, held, keys, of_kind, script

from halfmoon.schemas.decisions import MoveKv
from halfmoon.schemas.events import KvMoved, KvMoveRefused
from halfmoon.schemas.lending import HoldRequest
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers import machines
from halfmoon.workers.attention.actions import AnswerHold, DropHold, OfferHold
from halfmoon.workers.attention.events import HoldAsked
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import Action, AskHold, PushTokens, RunStep, SwapOut
from halfmoon.workers.machines import Report
from halfmoon.workers.model.segments import AWAY

#: Six blocks of four tokens, the last one half full: two whole segments of eight, and six tokens of a third.
PROMPT = 22


def move(segments: int = 1, plan: str = "p1", number: int = 1, tokens_per_step: int = 6) -> MoveKv:
    return MoveKv(
        plan_id=plan,
        order_id=f"{number}-1",
        request_id=f"r{number}",
        worker_id="d0",
        lender_id="d1",
        segments=segments,
        tokens_per_step=tokens_per_step,
    )


def begin(machine: Script, number: int = 1, *, max_tokens: int = 30) -> None:
    """A prompt whose KV is here; it joins with the next step."""
    machine.give(
        order(number, max_tokens=max_tokens, prompt_tokens=PROMPT), reply(PROMPT, block_keys=keys(5))
    )
    order_id = f"{number}-1"
    blocks = [ready(order_id, layer, blocks=6) for layer in range(2)]
    copied(machine, machine.hear(opened(order_id, 30, 31, 32, 33, 34, 35), *blocks, result(order_id)))


def running(**config: Any) -> Script:
    machine = script(**{"kv_blocks": 12, **config})
    begin(machine)
    step(machine)
    return machine


def idle(machine: Script) -> list[Action]:
    return machine.on(events.EngineIdled)


def end(machine: Script) -> list[Action]:
    tokens = [SampledToken(token_id=9)] * len(machine.state.orders.in_step)
    return machine.on(events.StepEnded, tokens=tokens, step_ns=MS)


def step(machine: Script) -> list[Action]:
    return idle(machine) + end(machine)


def reports(actions: list[Action]) -> list[Any]:
    return [action.event for action in of_kind(actions, Report)]


def granted(machine: Script, plan: str = "p1", hold: int = 7) -> list[Action]:
    return machine.on(events.PartHeld, order_id="1-1", worker_id="d1", hold=hold, plan_id=plan)


def sent(machine: Script, moved_bytes: int = 10, problem: str = "") -> list[Action]:
    return machine.on(events.TokensPushed, moved_bytes=moved_bytes, problem=problem)


def moving(machine: Script) -> None:
    """The lender has room, and the first tokens are on their way with a step."""
    machine.on(events.MoveOrdered, order=move())
    granted(machine)
    (push,) = of_kind(idle(machine), PushTokens)
    assert (push.worker_id, push.hold, push.first, push.tokens) == ("d1", 7, 0, 6)


# --- who borrows --------------------------------------------------------------------------------------------


def test_segments_go_some_tokens_a_step_and_count_as_away_between_two_steps() -> None:
    machine = running()
    sequence = machine.sequence()
    table = list(sequence.table)
    (ask,) = machine.on(events.MoveOrdered, order=move())
    assert ask == AskHold(
        "d1",
        HoldRequest(
            owner_id="d0",
            order_id="1-1",
            source_node_ids=[],
            first_block=0,
            block_keys=b"",
            plan_id="p1",
            room_blocks=2,
        ),
    )
    assert of_kind(step(machine), PushTokens) == []  # not before there is room
    granted(machine)
    (push,) = of_kind(idle(machine), PushTokens)
    assert push == PushTokens("1-1", "p1", "d1", 7, table[:2], 0, 6)
    end(machine)
    assert of_kind(step(machine), PushTokens) == []  # one at a time
    sent(machine)
    (push,) = of_kind(idle(machine), PushTokens)
    assert push == PushTokens("1-1", "p1", "d1", 7, table[1:2], 6, 2)
    sent(machine)
    assert sequence.table[: len(table)] == table  # a step reads it
    end(machine)
    before = machine.state.kv_blocks_used
    actions = idle(machine)
    assert reports(actions) == [
        KvMoved(plan_id="p1", order_id="1-1", request_id="r1", worker_id="d0", blocks=2, moved_bytes=20)
    ]
    assert sequence.table[:6] == [AWAY, AWAY, *table[2:6]]
    assert [(part.worker_id, sequence.blocks_of(part), part.hold) for part in sequence.parts] == [
        ("d1", range(2), 7)
    ]
    assert machine.state.kv_blocks_used == before - 2
    assert len(of_kind(actions, RunStep)) == 1  # with no step left out


def test_the_room_that_a_move_leaves_is_the_next_ones() -> None:
    machine = running(kv_blocks=12, batch_max=4)
    while len(machine.sequence().table) < 7:
        step(machine)
    begin(machine, 2)
    assert len(machine.state.orders.running) == 1
    moving(machine)
    sent(machine)
    end(machine)
    step(machine)
    sent(machine)
    copied(machine, idle(machine))
    end(machine)
    assert len(of_kind(idle(machine), RunStep)[0].batch) == 2


def test_a_second_move_follows_the_first_and_what_was_lent_from_the_start() -> None:
    machine = script(kv_blocks=12)
    copied(machine, borrowing(machine))
    held(machine, "d1")
    held(machine, "d2")
    step(machine)
    sequence = machine.sequence()
    (refused,) = reports(machine.on(events.MoveOrdered, order=move()))
    assert refused.reason == "segments: 1 of 0 that are whole and here"
    while sequence.length < 24:
        step(machine)
    moving(machine)
    sent(machine)
    end(machine)
    step(machine)
    sent(machine)
    idle(machine)
    assert sequence.table[:6] == [AWAY] * 6
    assert [(part.worker_id, sequence.blocks_of(part)) for part in sequence.parts] == [
        ("d1", range(2)),
        ("d2", range(2, 4)),
        ("d1", range(4, 6)),
    ]


@pytest.mark.parametrize("why", ["waits", "unknown", "too much", "another", "none"])
def test_a_move_that_cannot_be_made_is_refused_at_once(why: str) -> None:
    machine = running()
    wanted, words = move(), ""
    match why:
        case "waits":
            machine.give(order(2, prompt_tokens=PROMPT), reply(PROMPT))
            wanted, words = move(number=2), "does not run"
        case "unknown":
            wanted, words = move(number=9), "does not run"
        case "too much":
            wanted, words = move(segments=3), "segments: 3 of 2"
        case "another":
            machine.on(events.MoveOrdered, order=move(plan="p0"))
            words = "another move of it is under way"
        case "none":
            wanted, words = move(segments=0), "segments: 0 of 2"
    (refused,) = reports(machine.on(events.MoveOrdered, order=wanted))
    assert isinstance(refused, KvMoveRefused)
    assert words in refused.reason
    assert (refused.plan_id, refused.worker_id) == (wanted.plan_id, "d0")


def test_an_order_that_is_heard_twice_is_obeyed_once() -> None:
    machine = running()
    machine.on(events.MoveOrdered, order=move())
    assert machine.on(events.MoveOrdered, order=move()) == []


@pytest.mark.parametrize("why", ["no room", "lost in between"])
def test_a_lender_that_fails_a_move_leaves_the_sequence_as_it_was(why: str) -> None:
    machine = running()
    used = machine.state.kv_blocks_used
    if why == "no room":
        machine.on(events.MoveOrdered, order=move())
        actions = machine.on(events.PartNotHeld, order_id="1-1", worker_id="d1", reason="full", plan_id="p1")
    else:
        moving(machine)
        actions = sent(machine, 0, "gone")
        end(machine)
    (refused,) = reports(actions)
    assert isinstance(refused, KvMoveRefused)
    assert refused.reason in ("lender d1: full", "lender d1: gone")
    assert machine.sequence().away == 0
    assert AWAY not in machine.sequence().table
    assert machine.state.kv_blocks_used == used
    assert len(of_kind(step(machine), RunStep)) == 1
    # A late answer finds nobody, and another plan may come.
    granted(machine)
    assert len(of_kind(machine.on(events.MoveOrdered, order=move(plan="p2")), AskHold)) == 1


@pytest.mark.parametrize("how", ["cancelled", "finished"])
def test_a_sequence_that_ends_in_mid_move_keeps_its_blocks_while_they_are_sent(how: str) -> None:
    machine = running()
    if how == "finished":
        machine = script(kv_blocks=12)
        begin(machine, max_tokens=3)
        step(machine)
    moving(machine)
    if how == "cancelled":
        machine.on(machines.OrderCancelled, order_id="1-1")
    actions = end(machine)
    assert not [one for one in reports(actions) if isinstance(one, KvMoved | KvMoveRefused)]
    assert machine.state.orders.open == {}
    assert machine.state.kv_blocks_used == 2  # another thread reads them
    assert reports(sent(machine)) == []
    assert machine.state.kv_blocks_used == 0


def test_a_sequence_that_is_swapped_out_gives_its_move_up() -> None:
    machine = script(kv_blocks=13)
    begin(machine, 2, max_tokens=90)
    step(machine)
    begin(machine)
    while not machine.state.orders.moving_out:
        if "1-1" not in machine.state.orders.moves.open and len(machine.sequence().output) == 2:
            machine.on(events.MoveOrdered, order=move(tokens_per_step=1))
            granted(machine)
        actions = idle(machine)
        if of_kind(actions, SwapOut):
            break
        end(machine)
    (refused,) = reports(machine.on(events.SwappedOut, held="bytes"))
    assert isinstance(refused, KvMoveRefused)
    assert refused.reason == "it is swapped out"
    # What is being sent is not another's yet.
    push = machine.state.orders.moves.push
    assert push is not None
    assert machine.state.orders.blocks.are_used(push.blocks)
    sent(machine)
    assert not machine.state.orders.blocks.are_used(push.blocks)


def test_a_lender_that_is_lost_after_the_move_fails_the_request() -> None:
    machine = running()
    moving(machine)
    sent(machine)
    end(machine)
    idle(machine)
    sent(machine)
    end(machine)
    assert len(reports(idle(machine))) == 1
    (failed,) = reports(machine.on(events.StepFailed, worker_id="d1", reason="gone"))
    assert (failed.reason, failed.retryable) == ("lender d1: gone", True)
    assert machine.state.kv_blocks_used == 0


# --- who lends ----------------------------------------------------------------------------------------------


def room_request(blocks: int = 2, plan: str = "p1") -> HoldRequest:
    return HoldRequest(
        owner_id="d9",
        order_id="9-1",
        source_node_ids=[],
        first_block=4,
        block_keys=b"",
        plan_id=plan,
        room_blocks=blocks,
    )


def test_empty_room_is_offered_at_once_and_given_back_with_its_move_alone() -> None:
    machine = script()
    offered, answer = machine.on(HoldAsked, ask_id=1, request=room_request())
    assert isinstance(offered, OfferHold)
    assert (len(offered.blocks), offered.tokens, offered.expected) == (2, 0, 8)
    assert answer == AnswerHold(1, offered.hold)
    other, _ = machine.on(HoldAsked, ask_id=2, request=room_request(plan="p2"))
    assert isinstance(other, OfferHold)
    assert machine.on(HoldAsked, ask_id=3, request=room_request()) == [AnswerHold(3, offered.hold)]
    assert machine.on(events.MoveEnded, plan_id="p1") == [DropHold(offered.hold)]
    assert machine.on(events.MoveEnded, plan_id="p1") == []
    assert machine.on(events.MoveEnded, plan_id="") == []
    assert machine.state.kv_blocks_used == 2
    assert machine.on(machines.OrderCancelled, order_id="9-1") == [DropHold(other.hold)]
    assert machine.state.kv_blocks_used == 0


@pytest.mark.parametrize(("blocks", "words"), [(3, "room_blocks: 3 blocks"), (8, "full: 6 blocks are free")])
def test_room_that_is_not_there_is_refused(blocks: int, words: str) -> None:
    (answer,) = script().on(HoldAsked, ask_id=1, request=room_request(blocks))
    assert isinstance(answer, AnswerHold)
    assert answer.refused.startswith(words)


# --- any order of events ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_of_events_no_block_is_lost_or_given_twice(seed: int) -> None:
    """Moves of several sequences amid steps, swaps and ends; `validate` runs after each event."""
    draw = random.Random(seed)
    machine = script(kv_blocks=20)
    orders, number, pushing, plans = machine.state.orders, 0, False, 0
    moved = 0
    for _ in range(400):
        actions: list[Action] = []
        match draw.randrange(7):
            case 0 if len(orders.open) < 4:
                number += 1
                begin(machine, number, max_tokens=draw.choice([2, 12, 25]))
            case 1 if orders.open:
                plans += 1
                order_id = draw.choice(list(orders.open))
                wanted = move(
                    draw.randrange(1, 3), f"p{plans}", int(order_id.split("-")[0]), draw.choice([1, 5, 32])
                )
                actions = machine.on(events.MoveOrdered, order=wanted)
            case 2 if orders.open and draw.random() < 0.1:
                machine.on(machines.OrderCancelled, order_id=draw.choice(list(orders.open)))
            case 3 if pushing:
                pushing = False
                problem = "gone" if draw.random() < 0.1 else ""
                actions = sent(machine, 5, problem)
            case _ if orders.moving_out:
                actions = machine.on(events.SwappedOut, held="x") + idle(machine)
            case _ if orders.moving_in:
                actions = machine.on(events.SwappedIn) + idle(machine)
            case _ if orders.in_step:
                actions = end(machine) + idle(machine)
            case _:
                actions = idle(machine)
        for ask in of_kind(actions, AskHold):
            fields = {"order_id": ask.request.order_id, "worker_id": "d1", "plan_id": ask.request.plan_id}
            if draw.random() < 0.9:
                actions += machine.on(events.PartHeld, hold=plans, **fields)
            else:
                machine.on(events.PartNotHeld, reason="full", **fields)
        for copy_id in list(orders.copies):
            machine.on(events.LayersCopied, copy_id=copy_id)
        pushing = pushing or bool(of_kind(actions, PushTokens))
        moved += sum(isinstance(one, KvMoved) for one in reports(actions))
    assert moved > 0
    machine.on(machines.AnnounceRequested)
    for copy_id in list(orders.copies):
        machine.on(events.LayersCopied, copy_id=copy_id)
    if pushing:
        sent(machine)
    if orders.in_step:
        end(machine)
    elif orders.moving_out:
        machine.on(events.SwappedOut, held="x")
    elif orders.moving_in:
        machine.on(events.SwappedIn)
    assert machine.state.kv_blocks_used == 0
