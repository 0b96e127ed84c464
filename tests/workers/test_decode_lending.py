"""Lending in the decode machine: what it holds for others, and what others hold for it. No asyncio, no model."""

from __future__ import annotations

from typing import Any

import pytest
from decode_script import LAYOUT, MS, Script, opened, order, ready, reply, result
from msgspec.structs import replace

from halfmoon.schemas.events import DecodeFailed
from halfmoon.schemas.lending import HoldRequest, KvPart
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers import machines
from halfmoon.workers.attention.actions import AnswerHold, DropHold, LoadHold, OfferHold
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import (
    Action,
    AskHold,
    CopyLayers,
    Release,
    RunStep,
    SwapIn,
    SwapOut,
)
from halfmoon.workers.decode.lenders import LENDER_NS
from halfmoon.workers.machines import Report
from halfmoon.workers.model.segments import AWAY

#: Segments of two blocks of four tokens.
SEGMENTS = replace(LAYOUT, segment_tokens=8)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def keys(count: int) -> bytes:
    return b"".join(key(number) for number in range(count))


def script(**config: Any) -> Script:
    return Script(**{"layout": SEGMENTS, "kv_blocks": 6, "node_id": "n0", **config})


def of_kind(actions: list[Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


# --- who borrows --------------------------------------------------------------------------------------------


def borrowing(machine: Script) -> list[Action]:
    """A prompt of 22 tokens: four of its six blocks are to lie at d1 and d2. All but their answers has come."""
    given = order(
        max_tokens=9,
        prompt_tokens=22,
        loans=[KvPart(worker_id="d1", segments=1), KvPart(worker_id="d2", segments=1)],
    )
    actions = machine.give(given, reply(22, block_keys=keys(5), tenant="t"))
    blocks = [ready("1-1", layer, blocks=6) for layer in range(2)]
    return actions + machine.hear(opened("1-1", 30, 31, 32, 33, 34, 35), *blocks, result("1-1"))


def held(machine: Script, worker_id: str, hold: int = 7) -> list[Action]:
    return machine.on(events.PartHeld, order_id="1-1", worker_id=worker_id, hold=hold)


def copied(machine: Script, actions: list[Action]) -> list[Action]:
    return [
        each
        for copy in of_kind(actions, CopyLayers)
        for each in machine.on(events.LayersCopied, copy_id=copy.copy_id)
    ]


def test_own_blocks_are_copied_and_lenders_are_asked_once_all_is_in_the_pool() -> None:
    machine = script()
    actions = borrowing(machine)
    copies = [each for copy in of_kind(actions, CopyLayers) for each in copy.copies]
    assert sorted({slot for _, slot, _ in copies}) == [34, 35]
    asks = of_kind(actions, AskHold)
    assert [(ask.worker_id, ask.request.first_block, ask.request.block_keys) for ask in asks] == [
        ("d1", 0, keys(2)),
        ("d2", 2, keys(4)),
    ]
    assert asks[0].request.source_node_ids == ["n0", "p0"]
    assert asks[0].request.tenant == "t"
    table = machine.sequence().table
    assert table[:4] == [AWAY] * 4
    assert len(table) == 6
    # The pool's slots are kept until the last lender has its part.
    assert of_kind(copied(machine, actions), Release) == []
    assert of_kind(held(machine, "d1"), Release) == []
    assert of_kind(held(machine, "d2"), Release) == [Release("1-1")]
    (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
    assert [sequence.order_id for sequence in step.batch] == ["1-1"]


def test_a_lender_without_room_is_asked_again_and_in_the_end_no_more() -> None:
    machine = script()
    copied(machine, borrowing(machine))
    refused = {"order_id": "1-1", "worker_id": "d1", "reason": "full"}
    (again,) = of_kind(machine.on(events.PartNotHeld, **refused), AskHold)
    assert again.after_ns > 0
    machine.now_ns += LENDER_NS
    actions = machine.on(events.PartNotHeld, **refused)
    (failed,) = [action.event for action in of_kind(actions, Report)]
    assert isinstance(failed, DecodeFailed)
    assert (failed.reason, failed.retryable) == ("lender d1: full", True)
    assert of_kind(actions, Release) == [Release("1-1")]
    # Answers that come too late find nobody.
    assert held(machine, "d2") == []


def test_a_step_that_a_lender_fails_ends_its_borrowers_and_nobody_else() -> None:
    machine = script(kv_blocks=12)
    copied(machine, borrowing(machine))
    held(machine, "d1")
    held(machine, "d2")
    machine.give(order(2), reply())
    copied(machine, machine.hear(opened("2-1", 1, 2), ready("2-1", 0), ready("2-1", 1), result("2-1")))
    (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
    assert len(step.batch) == 2
    actions = machine.on(events.StepFailed, worker_id="d2", reason="gone")
    (failed,) = [action.event for action in of_kind(actions, Report)]
    assert (failed.order_id, failed.reason, failed.retryable) == ("1-1", "lender d2: gone", True)
    (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
    assert [(s.order_id, len(s.output)) for s in step.batch] == [("2-1", 1)]
    machine.on(events.StepEnded, tokens=[SampledToken(token_id=9)], step_ns=MS)


def test_a_sequence_that_is_swapped_out_takes_only_its_own_blocks_along() -> None:
    machine = script(kv_blocks=4)
    machine.give(order(2, max_tokens=9), reply())
    copied(machine, machine.hear(opened("2-1", 1, 2), ready("2-1", 0), ready("2-1", 1), result("2-1")))
    copied(machine, borrowing(machine))
    held(machine, "d1")
    held(machine, "d2")
    swaps: list[SwapOut] = []
    for _ in range(9):
        if swaps:
            break
        actions = machine.on(events.EngineIdled)
        swaps = of_kind(actions, SwapOut)
        for step in of_kind(actions, RunStep):
            tokens = [SampledToken(token_id=9)] * len(step.batch)
            machine.on(events.StepEnded, tokens=tokens, step_ns=MS)
    sequence = machine.sequence()
    assert swaps[0].table == sequence.own_blocks
    assert len(swaps[0].table) == 2
    machine.on(events.SwappedOut, held="bytes")
    machine.on(machines.OrderCancelled, order_id="2-1")
    (swap,) = of_kind(machine.on(events.EngineIdled), SwapIn)
    assert sequence.table == [AWAY] * 4 + swap.table
    assert (len(swap.table), swap.held) == (2, "bytes")
    machine.on(events.SwappedIn)
    (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
    assert step.batch == [sequence]


# --- who lends ----------------------------------------------------------------------------------------------


def hold_request(count: int = 2, first: int = 0, order_id: str = "9-1") -> HoldRequest:
    return HoldRequest(
        owner_id="d9",
        order_id=order_id,
        source_node_ids=["n9"],
        first_block=first,
        block_keys=keys(first + count),
        tenant="t",
    )


def ask(machine: Script, ask_id: int = 1, **fields: Any) -> list[Action]:
    return machine.on(events.HoldAsked, ask_id=ask_id, request=hold_request(**fields))


def test_a_hold_is_loaded_offered_answered_and_dropped() -> None:
    machine = script()
    (load,) = ask(machine, count=4, first=2)
    assert isinstance(load, LoadHold)
    assert (len(load.blocks), machine.state.kv_blocks_used) == (4, 4)
    assert machine.state.heartbeat(0).orders == ["9-1"]
    offered = machine.on(events.HoldLoaded, hold=load.hold)
    assert offered == [OfferHold(load.hold, load.blocks, 4 * len(load.blocks)), AnswerHold(1, load.hold)]
    # The answer was lost: the same is asked again, and not loaded again.
    assert ask(machine, 2, count=4, first=2) == [AnswerHold(2, load.hold)]
    assert machine.on(machines.OrderCancelled, order_id="9-1") == [DropHold(load.hold)]
    assert machine.state.kv_blocks_used == 0
    assert machine.state.heartbeat(0).orders == []


def test_an_order_that_is_over_while_its_part_is_loaded_leaves_nothing() -> None:
    machine = script()
    (load,) = ask(machine)
    assert machine.on(machines.OrderCancelled, order_id="9-1") == []
    assert machine.state.kv_blocks_used == 2  # the copy thread still writes there
    (answer,) = machine.on(events.HoldLoaded, hold=load.hold)
    assert answer == AnswerHold(1, refused="the order is over")
    assert machine.state.kv_blocks_used == 0


def test_a_part_that_cannot_be_had_is_refused_and_its_blocks_are_free() -> None:
    machine = script()
    (load,) = ask(machine)
    problem = "n9 has 0 of 2 blocks"
    assert machine.on(events.HoldLoaded, hold=load.hold, problem=problem) == [AnswerHold(1, refused=problem)]
    assert machine.state.kv_blocks_used == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"count": 8}, "full: 6 blocks are free, 8 were asked for"),
        ({"count": 3}, "block_keys: 3 blocks from first_block on are no whole segments of 2"),
        ({"count": 0, "first": 2}, "block_keys: 0 blocks from first_block on"),
    ],
)
def test_a_hold_that_is_not_taken_says_why(fields: dict[str, int], words: str) -> None:
    (answer,) = ask(script(), **fields)
    assert isinstance(answer, AnswerHold)
    assert answer.refused.startswith(words)


def test_without_segments_nothing_is_held() -> None:
    (answer,) = ask(Script())
    assert answer == AnswerHold(1, refused="segment_tokens: there are no segments in these numerics")


def test_a_decode_worker_holds_no_sequence_that_grows_and_no_single_heads() -> None:
    refused = "tokens: only attention workers hold what grows, and single heads"
    for fields in ({"tokens": 9}, {"kv_heads": 1}):
        request = replace(hold_request(), **fields)
        assert script().on(events.HoldAsked, ask_id=1, request=request) == [AnswerHold(1, refused=refused)]
    request = replace(hold_request(), adopts="9-0")
    (answer,) = script().on(events.HoldAsked, ask_id=1, request=request)
    assert isinstance(answer, AnswerHold)
    assert answer.refused.startswith("adopts: ")


def test_a_worker_that_announces_itself_anew_holds_nothing() -> None:
    machine = script()
    (load,) = ask(machine)
    machine.on(events.HoldLoaded, hold=load.hold)
    assert DropHold(load.hold) in machine.on(machines.AnnounceRequested)
    assert machine.state.kv_blocks_used == 0
