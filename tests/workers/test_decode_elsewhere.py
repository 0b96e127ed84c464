"""The decode machine without KV of its own: attention workers are asked, the end of a prompt is sent, steps follow."""

from __future__ import annotations

from typing import Any

import pytest
from decode_script import LAYOUT, MS, Script, opened, order, ready, reply, result
from msgspec.structs import replace

from halfmoon.schemas.events import DecodeFailed, RequestFinished
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import ResendRequest
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers import machines
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import Action, AskHold, CopyLayers, PushTail, Release, RunStep
from halfmoon.workers.machines import AnswerResend, Deliver, Report

#: Segments of two blocks of four tokens, two KV heads.
SPLIT = replace(LAYOUT, segment_tokens=8, kv_heads=2)
BY_HEADS = [KvPart(worker_id=f"a{n}", first_kv_head=n, kv_heads=1) for n in range(2)]


def keys(count: int) -> bytes:
    return b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(count))


def script(**config: Any) -> Script:
    return Script(**{"layout": SPLIT, "kv_blocks": 1, "node_id": "n0", **config})


def of_kind(actions: list[Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def given(machine: Script, number: int = 1, tokens: int = 10, **fields: Any) -> list[Action]:
    """A prompt of two whole blocks and two tokens; all of it has come to the node's pool."""
    order_id, blocks = f"{number}-1", -(-tokens // 4)
    one = order(number, prompt_tokens=tokens, **{"cache": BY_HEADS, "max_tokens": 3, **fields})
    actions = machine.give(one, reply(tokens, block_keys=keys(tokens // 4), tenant="t"))
    layers = [ready(order_id, layer, blocks=blocks) for layer in range(2)]
    return actions + machine.hear(opened(order_id, *range(30, 30 + blocks)), *layers, result(order_id))


def copied(machine: Script, actions: list[Action]) -> list[Action]:
    done = of_kind(actions, CopyLayers)
    return [each for copy in done for each in machine.on(events.LayersCopied, copy_id=copy.copy_id)]


def held(machine: Script, *places: str, order_id: str = "1-1", hold: int = 7) -> list[Action]:
    return [
        each
        for worker_id in places
        for each in machine.on(events.PartHeld, order_id=order_id, worker_id=worker_id, hold=hold)
    ]


def running(machine: Script) -> list[Action]:
    """Everything is where it belongs; the actions on the last of it."""
    copied(machine, given(machine))
    held(machine, "a0", "a1")
    return machine.on(events.TailPushed, order_id="1-1")


def test_places_bring_whole_blocks_themselves_and_are_sent_the_rest() -> None:
    machine = script()
    actions = given(machine)
    asks = of_kind(actions, AskHold)
    assert [
        (a.worker_id, a.request.first_block, a.request.block_keys, a.request.tokens, a.request.first_kv_head)
        for a in asks
    ] == [("a0", 0, keys(2), 13, 0), ("a1", 0, keys(2), 13, 1)]
    assert {a.request.kv_heads for a in asks} == {1}
    copies = [each for copy in of_kind(actions, CopyLayers) for each in copy.copies]
    assert copies == [(0, 32, 0), (1, 32, 0)]
    assert of_kind(copied(machine, actions), PushTail) == []
    assert of_kind(held(machine, "a0"), PushTail) == []
    (push,) = of_kind(held(machine, "a1", hold=8), PushTail)
    assert push == PushTail("1-1", 0, 8, 2, (replace(BY_HEADS[0], hold=7), replace(BY_HEADS[1], hold=8)))
    # The pool's slots are kept until all have all of it, and the cache's block as long as it is read.
    assert machine.state.kv_blocks_used == 1
    actions = machine.on(events.TailPushed, order_id="1-1")
    assert of_kind(actions, Release) == [Release("1-1")]
    assert machine.state.kv_blocks_used == 0


def test_steps_take_no_block_and_the_answer_ends_as_ever() -> None:
    machine = script()
    running(machine)
    reports: list[Any] = []
    for _ in range(2):
        (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
        assert [sequence.order_id for sequence in step.batch] == ["1-1"]
        ended = machine.on(events.StepEnded, tokens=[SampledToken(token_id=9)], step_ns=MS)
        reports += [action.event for action in of_kind(ended, Report)]
        assert machine.state.kv_blocks_used == 0
    (finished,) = [one for one in reports if isinstance(one, RequestFinished)]
    assert finished.completion_tokens == 3


def test_a_prompt_of_whole_blocks_sends_nothing() -> None:
    machine = script()
    actions = given(machine, tokens=8)
    assert of_kind(actions, CopyLayers) == []
    actions = held(machine, "a0", "a1")
    assert of_kind(actions, PushTail) == []
    assert of_kind(actions, Release) == [Release("1-1")]
    assert of_kind(machine.on(events.EngineIdled), RunStep)


def test_a_prompt_of_less_than_a_block_is_all_sent() -> None:
    machine = script()
    actions = given(machine, tokens=3)
    assert {ask.request.block_keys for ask in of_kind(actions, AskHold)} == {b""}
    copied(machine, actions)
    (push,) = of_kind(held(machine, "a0", "a1"), PushTail)
    assert (push.first_token, push.tokens) == (0, 3)


def test_ends_of_prompts_wait_for_a_block_one_after_the_other() -> None:
    machine = script()
    first, second = given(machine), given(machine, 2)
    assert [len(of_kind(actions, CopyLayers)) > 0 for actions in (first, second)] == [True, False]
    assert len(of_kind(second, AskHold)) == 2
    copied(machine, first)
    held(machine, "a0", "a1")
    held(machine, "a0", "a1", order_id="2-1")
    copied_then = copied(machine, machine.on(events.TailPushed, order_id="1-1"))
    (push,) = of_kind(copied_then, PushTail)
    assert push.order_id == "2-1"


def test_progress_that_is_told_twice_loads_nothing_again() -> None:
    machine = script()
    running(machine)
    assert of_kind(machine.hear(ready("1-1", 0, blocks=3), opened("1-1", 40, 41, 42)), CopyLayers) == []
    assert machine.state.kv_blocks_used == 0


@pytest.mark.parametrize("when", ["push", "step"])
def test_a_place_that_is_lost_ends_the_order_and_the_conductor_is_told(when: str) -> None:
    machine = script()
    if when == "push":
        copied(machine, given(machine))
        held(machine, "a0", "a1")
        actions = machine.on(events.TailPushed, order_id="1-1", problem="a1: gone")
    else:
        running(machine)
        machine.on(events.EngineIdled)
        actions = machine.on(events.StepFailed, worker_id="a1", reason="gone")
    (failed,) = [action.event for action in of_kind(actions, Report)]
    assert isinstance(failed, DecodeFailed)
    assert (failed.retryable, "a1" in failed.reason) == (True, True)
    assert machine.state.kv_blocks_used == 0


def test_a_step_that_a_place_fails_is_made_again_for_everybody_else() -> None:
    machine = script()
    running(machine)
    given(machine, 2, tokens=8, cache=[KvPart(worker_id="a2", first_kv_head=0, kv_heads=2)])
    held(machine, "a2", order_id="2-1")
    (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
    assert len(step.batch) == 2
    machine.on(events.StepFailed, worker_id="a2", reason="gone")
    (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
    assert [(s.order_id, len(s.output)) for s in step.batch] == [("1-1", 1)]


@pytest.mark.parametrize(("hold", "failed"), [(8, ["2-1"]), (0, ["1-1", "2-1"]), (99, ["1-1", "2-1"])])
def test_one_refused_row_fails_only_its_request(hold: int, failed: list[str]) -> None:
    machine = script()
    running(machine)
    given(machine, 2, tokens=8)
    held(machine, "a0", "a1", order_id="2-1", hold=8)
    machine.on(events.EngineIdled)
    actions = machine.on(events.StepFailed, worker_id="a1", reason="it was dropped", hold=hold)
    reports = [action.event for action in of_kind(actions, Report)]
    assert [(one.order_id, one.retryable) for one in reports] == [(each, True) for each in failed]
    steps = of_kind(machine.on(events.EngineIdled), RunStep)
    assert [[s.order_id for s in step.batch] for step in steps] == ([["1-1"]] if hold == 8 else [])


def test_an_order_that_is_cancelled_while_its_end_is_sent_keeps_the_block_until_then() -> None:
    machine = script()
    copied(machine, given(machine))
    held(machine, "a0", "a1")
    machine.on(machines.OrderCancelled, order_id="1-1")
    assert machine.state.kv_blocks_used == 1
    machine.on(events.TailPushed, order_id="1-1", problem="the order is over")
    assert machine.state.kv_blocks_used == 0


# --- it goes on where another decode worker is gone ---------------------------------------------------------


def resumed(machine: Script, output: list[int], **fields: Any) -> list[Action]:
    one = order(1, 2, prompt_tokens=10, cache=BY_HEADS, resumes="1-1", **{"max_tokens": 5, **fields})
    return machine.give(one, reply(10, block_keys=keys(2), output_ids=pack_tokens(output)))


def test_it_goes_on_with_the_token_that_the_client_had_last_and_loads_nothing() -> None:
    machine = script()
    asks = of_kind(resumed(machine, [100, 101]), AskHold)
    assert [(a.worker_id, a.request.order_id, a.request.adopts, a.request.block_keys) for a in asks] == [
        ("a0", "1-2", "1-1", b""),
        ("a1", "1-2", "1-1", b""),
    ]
    assert {a.request.tokens for a in asks} == {15}
    assert machine.state.heartbeat(0).lacking == []
    held(machine, "a0", "a1", order_id="1-2")
    (step,) = of_kind(machine.on(events.EngineIdled), RunStep)
    (sequence,) = step.batch
    assert (sequence.output, sequence.length) == ([100, 101], 11)
    (told,) = of_kind(machine.on(events.StepEnded, tokens=[SampledToken(token_id=9)], step_ns=MS), Deliver)
    (delivery,) = told.message.deliveries
    assert (delivery.index, [token.token_id for token in delivery.tokens]) == (2, [9])


@pytest.mark.parametrize("why", ["nothing delivered", "not held"])
def test_where_it_cannot_go_on_the_conductor_is_told_at_once(why: str) -> None:
    machine = script()
    actions = resumed(machine, [] if why == "nothing delivered" else [100])
    if why == "not held":
        actions = machine.on(events.PartNotHeld, order_id="1-2", worker_id="a0", reason="adopts: nothing")
    (failed,) = [action.event for action in of_kind(actions, Report)]
    assert isinstance(failed, DecodeFailed)
    assert failed.retryable
    assert of_kind(actions, AskHold) == []


def test_an_answer_whose_end_was_lost_is_ended_again() -> None:
    machine = script()
    actions = resumed(machine, [100, 101], max_tokens=2)
    (finished,) = [action.event for action in of_kind(actions, Report)]
    assert isinstance(finished, RequestFinished)
    assert finished.completion_tokens == 2
    ask = ResendRequest(frontend_id="f1", request_id="r1", order_id="1-2", index=2)
    (answer,) = machine.on(machines.ResendRequested, request=ask)
    assert isinstance(answer, AnswerResend)
    assert answer.reply.delivery is not None
    assert answer.reply.delivery.finish_reason == "length"


# --- by sequence --------------------------------------------------------------------------------------------

BY_SEQUENCE = [
    KvPart(worker_id="a0", first_kv_head=0, kv_heads=2, segments=1),
    KvPart(worker_id="a1", first_kv_head=0, kv_heads=2, first_segment=1, segments=1),
    KvPart(worker_id="a2", first_kv_head=0, kv_heads=2, first_segment=2),
]


def test_parts_of_a_sequence_are_asked_for_and_only_its_end_is_pushed() -> None:
    machine = script()
    actions = given(machine, tokens=22, cache=BY_SEQUENCE)
    asked = [
        (a.worker_id, a.request.first_block, len(a.request.block_keys) // KEY_BYTES, a.request.tokens)
        for a in of_kind(actions, AskHold)
    ]
    assert asked == [("a0", 0, 2, 0), ("a1", 2, 4, 0), ("a2", 4, 5, 9)]
    copied(machine, actions)
    assert of_kind(held(machine, "a2", "a0"), PushTail) == []
    (push,) = of_kind(held(machine, "a1", hold=8), PushTail)
    assert push == PushTail("1-1", 0, 4, 2, (replace(BY_SEQUENCE[2], hold=7),))
    assert of_kind(machine.on(events.TailPushed, order_id="1-1"), Release) == [Release("1-1")]
    assert of_kind(machine.on(events.EngineIdled), RunStep)


def test_an_end_without_a_whole_block_has_the_rest_pushed() -> None:
    machine = script()
    actions = given(machine, tokens=17, cache=BY_SEQUENCE)
    assert [len(a.request.block_keys) // KEY_BYTES for a in of_kind(actions, AskHold)] == [2, 4, 4]
    copied(machine, actions)
    (push,) = of_kind(held(machine, "a0", "a1", "a2"), PushTail)
    assert push == PushTail("1-1", 0, 0, 1, (replace(BY_SEQUENCE[2], hold=7),))


def test_another_goes_on_with_parts_of_a_sequence() -> None:
    machine = script()
    one = order(1, 2, prompt_tokens=22, max_tokens=3, cache=BY_SEQUENCE, resumes="1-1")
    again = reply(22, block_keys=keys(5), output_ids=pack_tokens([100]))
    asks = of_kind(machine.give(one, again), AskHold)
    found = [(a.request.adopts, a.request.first_block, a.request.tokens, a.request.block_keys) for a in asks]
    assert found == [("1-1", 0, 0, b""), ("1-1", 2, 0, b""), ("1-1", 4, 9, b"")]
