"""Answers of one token by the prefill worker: delivered and reported by it, nothing pushed, sent again when asked."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from prefill_script import FIRST, TOKENS, Script, order, prompt, reply

from halfmoon.schemas.events import PrefillFailed, PrefillFinished, RequestFinished
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.tokens import Delivery, ResendRequest
from halfmoon.workers.machines import (
    AnswerResend,
    Deliver,
    OrderCancelled,
    Report,
    ResendRequested,
    TokensTaken,
)
from halfmoon.workers.prefill.actions import (
    DrawFirstToken,
    EndOrder,
    EndPush,
    SendLayer,
    SendResult,
    StartPush,
)
from halfmoon.workers.prefill.events import (
    ChunkStored,
    FirstTokenDrawn,
    LayerStored,
    PrefillOrdered,
    PromptComputed,
    SlotsReserved,
)

OWN = replace(order(), decode_worker_id="p1", decode_node_id="n1")


def computing(script: Script, **taken: Any) -> list[Any]:
    script(PrefillOrdered, order=OWN)
    script(TokensTaken, reply=reply(max_tokens=1, **taken))
    return script(SlotsReserved, slots=[4, 5, 6], present=[])


def answered(script: Script, **taken: Any) -> list[Any]:
    computing(script, **taken)
    script(LayerStored, layer=0, first_block=0, blocks=3)
    script(ChunkStored, first_block=0, blocks=3)
    script(PromptComputed, finished_at_ns=99)
    return script(FirstTokenDrawn, first=FIRST)


def asked(script: Script, **fields: Any) -> Any:
    named = {"frontend_id": "f1", "request_id": "r1", "order_id": "1-1", "index": 0, **fields}
    (answer,) = script(ResendRequested, request=ResendRequest(**named))
    assert isinstance(answer, AnswerResend)
    return answer.reply


def test_its_turn_begins_without_slots_at_another_node() -> None:
    assert computing(Script()) == [prompt()]


def test_the_token_is_delivered_and_both_ends_are_reported() -> None:
    script = Script()
    delivered, finished, prefilled, ended = answered(script)
    assert isinstance(delivered, Deliver)
    assert delivered.frontend_id == "f1"
    (delivery,) = delivered.message.deliveries
    assert (delivered.message.worker_id, delivery.index, delivery.tokens) == ("p1", 0, [FIRST])
    assert delivery.finish_reason == "length"
    assert delivery.timing is not None
    assert (delivery.timing.prefill_worker, delivery.timing.decode_worker) == ("p1", "p1")
    assert isinstance(finished, Report)
    assert isinstance(finished.event, RequestFinished)
    assert (finished.event.worker_id, finished.event.completion_tokens) == ("p1", 1)
    assert isinstance(prefilled, Report)
    assert isinstance(prefilled.event, PrefillFinished)
    assert (prefilled.event.prompt_tokens, prefilled.event.pushed_bytes) == (len(TOKENS), 0)
    assert isinstance(ended, EndOrder)
    assert script.state.jobs == {}


def test_nothing_is_pushed_and_no_decode_worker_hears_of_it() -> None:
    script = Script()
    answered(script)
    assert not [one for one in script.past if isinstance(one, StartPush | SendLayer | SendResult | EndPush)]


def test_an_end_token_ends_it_as_one() -> None:
    script = Script(eos_ids=frozenset([FIRST.token_id]))
    delivered = answered(script)[0]
    assert isinstance(delivered, Deliver)
    assert delivered.message.deliveries[0].finish_reason == "stop"


def test_a_token_that_the_client_has_is_not_delivered_again() -> None:
    """Placed once more, because the report of its end was lost. The token is the one that the client has."""
    script = Script()
    actions = answered(script, output_ids=pack_tokens([9]))
    assert [type(action) for action in actions] == [Report, Report, EndOrder]
    assert asked(script).delivery.tokens[0].token_id == 9


def test_it_is_sent_again_to_its_own_frontend() -> None:
    script = Script()
    computing(script)
    assert asked(script).known
    assert asked(script).delivery is None
    assert not asked(script, frontend_id="f2").known
    assert not asked(script, order_id="2-1").known
    script(PromptComputed, finished_at_ns=99)
    script(FirstTokenDrawn, first=FIRST)
    again = asked(script).delivery
    assert isinstance(again, Delivery)
    assert (again.tokens, again.finish_reason) == ([FIRST], "length")
    assert not asked(script, frontend_id="f2").known


def test_one_that_was_cancelled_is_not_answered() -> None:
    script = Script()
    computing(script)
    script(PromptComputed, finished_at_ns=99)
    script(OrderCancelled)
    assert [type(action) for action in script(FirstTokenDrawn, first=FIRST)] == [EndOrder]
    assert not asked(script).known


def test_one_that_fails_says_so_once() -> None:
    script = Script()
    script(PrefillOrdered, order=OWN)
    script(TokensTaken, reply=None)
    assert [type(event) for event in script.reports()] == [PrefillFailed]


def test_an_engine_without_layers_answers_too() -> None:
    script = Script(has_store=False)
    script(PrefillOrdered, order=OWN)
    (computed,) = script(TokensTaken, reply=reply(max_tokens=1))
    assert computed.order_id == "1-1"
    (draw,) = script(PromptComputed, finished_at_ns=99)
    assert isinstance(draw, DrawFirstToken)
    assert [type(action) for action in script(FirstTokenDrawn, first=FIRST)] == [
        Deliver,
        Report,
        Report,
        EndOrder,
    ]
