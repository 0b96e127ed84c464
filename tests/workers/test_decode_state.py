"""The decode worker's machine: events in, whole lists of actions out. No asyncio, no model, no clock."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from decode_script import (
    FINISHED_NS,
    LAYOUT,
    MS,
    NULL_LAYOUT,
    Script,
    opened,
    order,
    ready,
    reply,
    result,
)

from halfmoon.schemas.codec import encode
from halfmoon.schemas.events import DecodeFailed, DecodeRefused, DecodeStarted, RequestFinished
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.kv import EngineKv, TransferFailed
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.similar import SimilarReuse
from halfmoon.schemas.tokens import Delivery, ResendReply, ResendRequest, TakeReply, Timing, TokensSampled
from halfmoon.workers import machines
from halfmoon.workers.decode import deliveries, events
from halfmoon.workers.decode.actions import (
    Action,
    CopyLayers,
    EndSpan,
    Measure,
    Release,
    RunStep,
    ShareOutput,
    SwapIn,
    SwapOut,
    Wake,
)
from halfmoon.workers.decode.orders import EARLY_ORDERS_MAX, LAST_LAYERS_NS
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.finished_orders import FINISHED_BYTES_MAX, FINISHED_MAX
from halfmoon.workers.machines import Announce, AnswerResend, Deliver, Report, TakeTokens


def names(number: int = 1) -> dict[str, str]:
    """The ids that every report carries."""
    return {"order_id": f"{number}-1", "request_id": f"r{number}", "worker_id": "d0"}


def tokens(*ids: int) -> list[SampledToken]:
    return [SampledToken(token_id=token_id) for token_id in ids]


def delivered(index: int, *ids: int, number: int = 1, finish: Any = "", timing: bool = False) -> Delivery:
    """Tokens of one order, as its frontend gets them."""
    return Delivery(
        request_id=f"r{number}",
        order_id=f"{number}-1",
        index=index,
        tokens=tokens(*ids),
        finish_reason=finish,
        timing=Timing(
            queue_ns=1,
            transfer_ns=2,
            prefill_ns=3,
            cached_tokens=4,
            prefill_worker="p0",
            decode_worker="d0",
            decode_wait_ns=0,
        )
        if timing
        else None,
    )


def deliver(*deliveries: Delivery, frontend_id: str = "f1") -> Deliver:
    return Deliver(frontend_id, TokensSampled(worker_id="d0", deliveries=list(deliveries)))


def failed(reason: str, *, number: int = 1, retryable: bool = True) -> Report:
    return Report(DecodeFailed(**names(number), reason=reason, retryable=retryable))


def filled(number: int = 1, blocks: int = 2, **fields: Any) -> tuple[Any, ...]:
    """Every KV message of an order whose prompt has so many blocks."""
    order_id, slots = f"{number}-1", [10 * number + place for place in range(blocks)]
    return opened(order_id, *slots), *(ready(order_id, layer, 0, blocks) for layer in (0, 1))


def copy_layers(copy_id: int, copies: tuple[tuple[int, int, int], ...], *, tail: int = -1) -> CopyLayers:
    """Out of the slots that `filled` names, unless told otherwise: a prompt of 6 tokens has 2 in its second block."""
    slots = sorted({slot for _, slot, _ in copies})
    tail = tail if tail >= 0 else next((slot for slot in slots if slot % 10 == 1), -1)
    epochs = tuple((slot, 1) for slot in slots)
    return CopyLayers(copy_id, copies, epochs, (tail, 2) if tail >= 0 else (-1, 0))


def loaded(script: Script, number: int = 1, prompt: int = 6, **fields: Any) -> list[Action]:
    """An order with tokens, first token and all of its KV: it waits for room in the batch only."""
    taken = reply(prompt, **{name: fields.pop(name) for name in ("root_key", "block_keys") if name in fields})
    script.give(order(number, prompt_tokens=prompt, **fields), taken)
    said = script.hear(*filled(number, LAYOUT.blocks(prompt)), result(f"{number}-1"))
    for action in said:
        if isinstance(action, CopyLayers):
            said += script.on(events.LayersCopied, copy_id=action.copy_id)
    return said


def step(script: Script, *ids: int) -> list[Action]:
    """A step has ended with these tokens, and the compute thread asks for more."""
    actions = script.on(events.StepEnded, tokens=tokens(*ids), step_ns=MS)
    return actions + script.on(events.EngineIdled)


def test_kv_that_was_copied_out_of_slots_that_were_given_away_fails_the_order() -> None:
    script = Script()
    script.give()
    (copy,) = script.hear(opened("1-1", 7, 8), ready("1-1", 0))
    said = script.on(events.LayersCopied, copy_id=copy.copy_id, problem="slot 7 was given to another order")
    reported = [action.event for action in said if isinstance(action, Report)]
    assert [(event.retryable, event.reason) for event in reported] == [
        (True, "its KV: slot 7 was given to another order")
    ]
    assert script.state.orders.open == {}


@pytest.mark.parametrize("step_ns", [-10_000_000 * MS, 10_000_000 * MS])
def test_a_prefill_workers_clock_that_is_set_wrong_shows_in_no_duration(step_ns: int) -> None:
    script = Script()
    script.give()
    late = msgspec.structs.replace(result("1-1"), finished_at_ns=FINISHED_NS + step_ns)
    script.hear(opened("1-1", 7, 8), ready("1-1", 0), late, ready("1-1", 1))
    script.on(events.LayersCopied, copy_id=1)
    script.on(events.LayersCopied, copy_id=2)
    started = script.on(events.EngineIdled)[1]
    assert started == Report(DecodeStarted(**names(), wait_ns=3 * MS)), started


# --- fewer tokens than the prompt has -----------------------------------------------------------------------


def kept(number: int, retained: int) -> Any:
    reuse = SimilarReuse(tokens=10, computed_tokens=5, resemblance=90, retained_tokens=retained)
    return msgspec.structs.replace(result(f"{number}-1"), similar=reuse)


@pytest.mark.parametrize("when", ["first", "between", "last"])
def test_blocks_of_tokens_that_were_left_out_are_not_waited_for(when: str) -> None:
    """Whatever comes first. The prompt has four blocks, of which two come."""
    script = Script(kv_blocks=4)
    script.give(order(prompt_tokens=14, max_tokens=9), reply(14))
    said = [opened("1-1", 20, 21, 22, 23), ready("1-1", 0), ready("1-1", 1)]
    said.insert({"first": 0, "between": 2, "last": 3}[when], kept(1, 7))
    actions = script.hear(*said)
    for action in list(actions):
        if isinstance(action, CopyLayers):
            actions += script.on(events.LayersCopied, copy_id=action.copy_id)
    one = script.sequence()
    assert one.loaded
    assert (one.left_out, one.length, one.position, len(one.table)) == (7, 7, 14, 2)
    assert script.state.kv_blocks_used == 2
    assert any(isinstance(action, Release) for action in actions)
    script.on(events.EngineIdled)
    for token in range(5):
        step(script, token)
        # The bus repeats messages: blocks of generated tokens stay.
        script.hear(kept(1, 7))
    # 7 + 5 tokens and the next; all of the prompt would have taken a fifth block.
    assert (one.length, one.position, len(one.table)) == (12, 19, 4)
    assert script.state.kv_blocks_used == 4


def test_room_that_is_not_needed_goes_to_a_prompt_that_waits_for_it() -> None:
    script = Script(kv_blocks=5)
    script.give(order(prompt_tokens=14), reply(14))
    script.hear(opened("1-1", 20, 21, 22, 23), ready("1-1", 0, 0, 1))
    assert script.state.kv_blocks_used == 4
    script.give(order(2), reply())
    assert not [one for one in script.hear(*filled(2)) if isinstance(one, CopyLayers)]
    copies = [one.copies for one in script.hear(kept(1, 7)) if isinstance(one, CopyLayers)]
    assert [slot for some in copies for _, slot, _ in some] == [20, 21, 20, 21]
    assert script.state.kv_blocks_used == 4
    script.state.validate()


def test_a_sequence_with_fewer_tokens_takes_its_next_block_later() -> None:
    script = Script(kv_blocks=4)
    script.give(order(prompt_tokens=14, max_tokens=9), reply(14))
    for action in script.hear(opened("1-1", 20, 21, 22, 23), kept(1, 7), ready("1-1", 0), ready("1-1", 1)):
        if isinstance(action, CopyLayers):
            script.on(events.LayersCopied, copy_id=action.copy_id)
    one = script.sequence()
    script.on(events.EngineIdled)
    loaded(script, 2, prompt=7, max_tokens=9)
    # The first one's eighth token takes a third block, and the last to join gives its own.
    assert SwapOut([2, 3]) in step(script, 1)
    script.on(events.SwappedOut, held=None)
    script.on(events.EngineIdled)
    assert (one.length, one.position, len(one.table)) == (8, 15, 3)
    assert (script.sequence("2-1").held_blocks, script.state.kv_blocks_used) == (2, 3)


# --- the whole way of a request -----------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [reply(), TakeReply(sampling=reply().sampling)], ids=["all", "no prompt"])
def test_a_request_from_its_order_to_its_last_token(taken: TakeReply) -> None:
    script = Script()
    assert script.on(events.DecodeOrdered, order=order()) == [TakeTokens("f1", "r1", "1-1")]
    assert script.on(machines.TokensTaken, order_id="1-1", reply=taken) == []
    assert script.hear(opened("1-1", 7, 8)) == []
    assert script.hear(ready("1-1", 0)) == [copy_layers(1, ((0, 7, 0), (0, 8, 1)), tail=8)]
    assert script.hear(result("1-1", 100)) == [deliver(delivered(0, 100, timing=True))]
    heard_ns = script.now_ns
    assert script.hear(ready("1-1", 1)) == [copy_layers(2, ((1, 7, 0), (1, 8, 1)), tail=8)]
    assert script.on(events.LayersCopied, copy_id=1) == []
    one = script.sequence()
    assert script.on(events.LayersCopied, copy_id=2) == [Release("1-1"), Wake()]
    ready_ns = script.now_ns
    assert script.on(events.EngineIdled) == [
        Measure("room_wait", 1 * MS),
        Report(DecodeStarted(**names(), wait_ns=ready_ns - heard_ns)),
        RunStep([one], 6),
    ]
    started_ns = script.now_ns
    assert script.on(events.StepEnded, tokens=tokens(101), step_ns=MS) == [
        Measure("first_step", 1 * MS),
        deliver(delivered(1, 101)),
    ]
    assert script.on(events.EngineIdled) == [RunStep([one], 7)]
    timing = one.timing("d0")
    assert timing.decode_wait_ns == ready_ns - heard_ns
    last = msgspec.structs.replace(delivered(2, 102, finish="length"), timing=timing)
    assert script.on(events.StepEnded, tokens=tokens(102), step_ns=MS) == [
        deliver(last),
        Report(
            RequestFinished(
                **names(),
                finish_reason="length",
                completion_tokens=3,
                ttft_ns=1 + 3,
                tbt_ns=one.tbt_ns(),
                decode_ns=script.now_ns - started_ns,
            )
        ),
    ]
    assert script.on(events.EngineIdled) == []
    assert script.state.kv_blocks_used == 0


def test_an_order_that_comes_again_is_begun_once() -> None:
    script = Script()
    script.give()
    assert script.on(events.DecodeOrdered, order=order()) == []
    loaded(script)
    script.on(events.EngineIdled)
    step(script, 101)
    step(script, 102)
    assert script.on(events.DecodeOrdered, order=order()) == []
    assert not script.state.orders.open


def test_without_layers_nothing_is_copied_and_nothing_is_released() -> None:
    script = Script(layout=NULL_LAYOUT, has_store=False)
    script.give()
    assert script.hear(result("1-1")) == [deliver(delivered(0, 100, timing=True)), Wake()]
    one = script.sequence()
    assert script.on(events.EngineIdled)[-1] == RunStep([one], 6)
    assert step(script, 101)[-1] == RunStep([one], 7)
    assert isinstance(step(script, 102)[-1], Report)
    assert script.state.kv_blocks_used == 0


def test_requests_join_and_leave_between_two_steps() -> None:
    script = Script()
    loaded(script, 1)
    loaded(script, 2, max_tokens=5, frontend_id="f2")
    one, two = script.sequence("1-1"), script.sequence("2-1")
    assert script.on(events.EngineIdled)[-1] == RunStep([one, two], 12)
    loaded(script, 3)
    three = script.sequence("3-1")
    actions = script.on(events.StepEnded, tokens=tokens(101, 201), step_ns=MS)
    assert [a for a in actions if isinstance(a, Deliver)] == [
        deliver(delivered(1, 101)),
        deliver(delivered(1, 201, number=2), frontend_id="f2"),
    ]
    assert script.on(events.EngineIdled)[-1] == RunStep([one, two, three], 7 + 7 + 6)
    assert step(script, 102, 202, 301)[-1] == RunStep([two, three], 8 + 7)


def test_the_batch_takes_no_more_than_its_size() -> None:
    script = Script(batch_max=1)
    loaded(script, 1)
    loaded(script, 2)
    assert script.on(events.EngineIdled)[-1] == RunStep([script.sequence("1-1")], 6)
    step(script, 101)
    assert step(script, 102)[-1] == RunStep([script.sequence("2-1")], 6)


# --- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "reason", "retryable"),
    [
        (None, "the frontend does not answer", True),
        (reply(gone=True), "the frontend no longer wants it", False),
    ],
)
def test_an_order_without_tokens_fails(taken: Any, reason: str, retryable: bool) -> None:
    script = Script()
    script.on(events.DecodeOrdered, order=order())
    assert script.on(machines.TokensTaken, order_id="1-1", reply=taken) == [
        Release("1-1"),
        failed(reason, retryable=retryable),
    ]


def test_tokens_of_a_cancelled_order_do_nothing() -> None:
    script = Script()
    script.on(events.DecodeOrdered, order=order())
    assert script.on(machines.OrderCancelled, order_id="1-1") == [Release("1-1")]
    assert script.on(machines.TokensTaken, order_id="1-1", reply=reply()) == []


def test_a_token_that_ends_the_text_ends_it_but_not_before_its_time() -> None:
    script = Script(eos_ids=frozenset({101, 102}))
    sampling = Sampling(min_tokens=2)
    script.give(order(max_tokens=9), reply(sampling=sampling))
    for action in script.hear(*filled(), result("1-1")):
        if isinstance(action, CopyLayers):
            script.on(events.LayersCopied, copy_id=action.copy_id)
    script.on(events.EngineIdled)
    assert isinstance(step(script, 101)[-1], RunStep)  # the second token: two are asked for at least
    (_, report) = step(script, 102)
    assert isinstance(report, Report)
    assert isinstance(report.event, RequestFinished)
    assert report.event.finish_reason == "stop"


def test_a_text_that_its_grammar_cut_ends_as_one_that_is_too_long() -> None:
    script = Script(eos_ids=frozenset({101}))
    script.give(order(max_tokens=9), reply())
    for action in script.hear(*filled(), result("1-1")):
        if isinstance(action, CopyLayers):
            script.on(events.LayersCopied, copy_id=action.copy_id)
    script.on(events.EngineIdled)
    cut = SampledToken(token_id=101, cut=True)
    report = script.on(events.StepEnded, tokens=[cut], step_ns=MS)[-1]
    assert isinstance(report, Report)
    assert isinstance(report.event, RequestFinished)
    assert report.event.finish_reason == "length"


# --- KV -----------------------------------------------------------------------------------------------------


def test_kv_that_comes_before_its_order_is_kept_for_it() -> None:
    script = Script()
    assert script.hear(*filled(), result("1-1")) == []
    assert script.on(events.DecodeOrdered, order=order()) == [
        TakeTokens("f1", "r1", "1-1"),
        copy_layers(1, ((0, 10, 0), (0, 11, 1))),
        copy_layers(2, ((1, 10, 0), (1, 11, 1))),
    ]
    assert script.on(machines.TokensTaken, order_id="1-1", reply=reply()) == [
        deliver(delivered(0, 100, timing=True))
    ]


@pytest.mark.parametrize("early", [True, False], ids=["before the order", "after it"])
def test_kv_and_first_token_are_believed_of_the_orders_own_prefill_node_only(early: bool) -> None:
    """Every store agent and every prefill worker may write to every decode worker, under its own name."""
    script = Script()
    forged = (opened("1-1", 90, 91), ready("1-1", 0), ready("1-1", 1), result("1-1", first=666))
    forged += (TransferFailed(order_id="1-1", request_id="r1", reason="a lie"),)
    one = order(prefill_node_id="n0")
    if not early:
        script.give(one)
    said = script.hear(*forged, author_id="thief") + script.hear(*forged[:3], author_id="p0")
    said += script.hear(result("1-1", first=667), author_id="n0")
    if early:
        said += script.give(one)[1:]  # after the question for its tokens
    assert said == []
    script.hear(opened("1-1", 10, 11), author_id="n0")
    assert script.hear(ready("1-1", 0), author_id="n0") == [copy_layers(1, ((0, 10, 0), (0, 11, 1)))]
    assert script.hear(result("1-1"), author_id="p0") == [deliver(delivered(0, 100, timing=True))]


def test_where_the_prefill_node_is_not_named_any_store_agent_is_believed() -> None:
    """As orders of older logs are."""
    script = Script()
    script.give(order(prefill_node_id=""))
    script.hear(opened("1-1", 10, 11), author_id="n7")
    assert script.hear(ready("1-1", 0), author_id="n7") == [copy_layers(1, ((0, 10, 0), (0, 11, 1)))]


def test_kv_in_an_engine_of_anothers_is_not_waited_for() -> None:
    script = Script()
    script.give(order())
    there = msgspec.structs.replace(result("1-1"), engine_kv=EngineKv())
    reason = "p0 is an engine: its KV comes to adapters alone"
    assert failed(reason, retryable=False) in script.hear(there)


def test_early_kv_of_many_orders_is_kept_and_no_more() -> None:
    script = Script()
    for number in range(EARLY_ORDERS_MAX + 1):
        script.hear(result(f"{number}-1"))
    assert "0-1" not in script.state.orders.early
    assert len(script.state.orders.early) == EARLY_ORDERS_MAX


def test_kv_that_is_told_again_is_not_copied_again() -> None:
    script = Script()
    script.give()
    told = filled()
    assert len(script.hear(*told)) == 2
    assert script.hear(*told) == []
    script.on(events.LayersCopied, copy_id=1)
    assert script.on(events.LayersCopied, copy_id=2) == [Release("1-1")]
    assert script.hear(*told) == []


def test_a_prompt_that_finds_no_room_is_copied_when_another_request_has_ended() -> None:
    script = Script(kv_blocks=3)
    loaded(script, 1)
    script.on(events.EngineIdled)
    script.give(order(2))
    assert script.hear(*filled(2)) == []
    step(script, 101)
    actions = script.on(events.StepEnded, tokens=tokens(102), step_ns=MS)
    copies = copy_layers(3, tuple((layer, 20 + i, i) for layer in (0, 1) for i in (0, 1)))
    assert actions[-1] == copies


def test_a_transfer_that_failed_fails_the_order_even_while_it_copies() -> None:
    script = Script()
    script.give()
    script.hear(*filled()[:2])
    lost = TransferFailed(order_id="1-1", request_id="r1", reason="no route")
    assert script.hear(lost) == [Release("1-1"), failed("transfer: no route")]
    assert script.hear(lost) == []
    assert script.state.kv_blocks_used == 2  # the copy thread still writes there
    assert script.on(events.LayersCopied, copy_id=1) == []
    assert script.state.kv_blocks_used == 0


def test_the_store_agent_restarts_what_waits_for_kv_fails_and_the_rest_goes_on() -> None:
    script = Script()
    loaded(script, 1)
    script.on(events.EngineIdled)
    loaded(script, 2)
    script.give(order(3))
    script.hear(*filled(3)[:2])
    script.on(events.DecodeOrdered, order=order(4))
    reason = "the node's store agent restarted"
    assert script.on(events.MemoryLost) == [
        Release("3-1"),
        failed(reason, number=3),
        Release("4-1"),
        failed(reason, number=4),
    ]
    assert list(script.state.orders.open) == ["1-1", "2-1"]


def test_kv_that_came_before_its_order_is_forgotten_with_the_memory_where_it_lay() -> None:
    script = Script()
    script.hear(*filled()[:2], result("1-1"))
    script.on(events.MemoryLost)
    assert not any(isinstance(action, CopyLayers) for action in script.give())
    assert script.state.heartbeat(0).lacking == ["1-1"]  # so that it is placed again
    assert script.sequence().result == result("1-1")


# --- admission ----------------------------------------------------------------------------------------------


def test_the_double_check_refuses_what_would_make_steps_too_long() -> None:
    script = Script()
    loaded(script, 1)
    script.on(events.EngineIdled)
    script.give(order(2, tbt_slo_ns=11 * MS))  # a step of two takes 12 ms
    assert script.hear(result("2-1")) == [
        Release("2-1"),
        Report(
            DecodeRefused(
                **names(2), reason="a step would take 12 ms, over the SLO", predicted_tbt_ns=12 * MS
            )
        ),
    ]
    script.give(order(3, tbt_slo_ns=12 * MS))
    assert isinstance(script.hear(result("3-1"))[0], Deliver)


def test_a_request_that_was_placed_before_is_not_refused() -> None:
    script = Script()
    script.give(order(1, placement=2, tbt_slo_ns=1))
    assert isinstance(script.hear(result("1-2"))[0], Deliver)


def test_the_prediction_follows_what_steps_take_here() -> None:
    script = Script()
    loaded(script, 1, max_tokens=100)
    script.on(events.EngineIdled)
    for index in range(50):
        script.on(events.StepEnded, tokens=tokens(101 + index), step_ns=22 * MS)  # twice the profile's 11 ms
        script.on(events.EngineIdled)
    script.give(order(2, tbt_slo_ns=20 * MS))
    (_, refused) = script.hear(result("2-1"))
    assert isinstance(refused, Report)
    assert isinstance(refused.event, DecodeRefused)
    assert 23 * MS < refused.event.predicted_tbt_ns <= 24 * MS


# --- a request that moved -----------------------------------------------------------------------------------


def test_tokens_that_the_client_has_are_fed_again_and_not_delivered() -> None:
    script = Script()
    script.give(order(max_tokens=4), reply(output_ids=pack_tokens([500, 501])))
    script.hear(*filled(), result("1-1", 100))
    script.on(events.LayersCopied, copy_id=1)
    script.on(events.LayersCopied, copy_id=2)
    one = script.sequence()
    assert one.output == [500]
    script.on(events.EngineIdled)
    assert one.next_known() == SampledToken(token_id=501)
    assert not [a for a in step(script, 501) if isinstance(a, Deliver)]
    assert one.next_known() is None
    assert step(script, 102)[0] == deliver(delivered(2, 102))
    assert one.output == [500, 501, 102]


# --- the end ------------------------------------------------------------------------------------------------


def test_a_request_that_ends_with_its_first_token_lets_the_last_layers_arrive() -> None:
    script = Script()
    script.give(order(max_tokens=1))
    script.hear(*filled()[:2])
    actions = script.hear(result("1-1"))
    assert actions[0] == deliver(delivered(0, 100, finish="length", timing=True))
    assert isinstance(actions[1], Report)
    assert actions[2:] == [Release("1-1", LAST_LAYERS_NS)]
    script.on(events.LayersCopied, copy_id=1)
    assert script.state.kv_blocks_used == 0


def test_what_is_cancelled_during_a_step_keeps_its_blocks_until_the_step_is_over() -> None:
    script = Script()
    loaded(script, 1)
    loaded(script, 2)
    script.on(events.EngineIdled)
    assert script.on(machines.OrderCancelled, order_id="1-1") == []
    assert script.state.kv_blocks_used == 4
    actions = script.on(events.StepEnded, tokens=tokens(101, 201), step_ns=MS)
    assert actions == [Measure("first_step", 2 * MS), deliver(delivered(1, 201, number=2))]
    assert script.state.kv_blocks_used == 2


def test_what_fails_while_it_waits_is_answered_once() -> None:
    script = Script()
    script.give()
    lost = TransferFailed(order_id="1-1", request_id="r1", reason="x")
    assert len(script.hear(lost)) == 2
    assert script.on(machines.OrderCancelled, order_id="1-1") == []
    assert script.on(events.MemoryLost) == []


def test_a_traced_request_tells_how_its_decode_ended() -> None:
    script = Script()
    script.give(taken=reply(traceparent="00-1-2-01"))
    one = script.sequence()
    assert script.on(machines.OrderCancelled, order_id="1-1") == [
        EndSpan(one, cancelled=True),
        Release("1-1"),
    ]


def test_a_worker_that_is_not_known_drops_its_orders_and_announces_itself() -> None:
    script = Script()
    loaded(script, 1)
    script.give(order(2))
    assert script.on(machines.AnnounceRequested) == [Release("2-1"), Announce()]
    assert script.state.kv_blocks_used == 0
    assert not script.state.orders.open


def test_a_worker_that_stops_releases_all_and_begins_nothing() -> None:
    script = Script()
    script.give(order(1))
    loaded(script, 2)
    assert script.on(machines.WorkerStopped) == [Release("1-1")]
    assert script.on(events.EngineIdled) == []
    assert script.on(events.DecodeOrdered, order=order(3)) == []


# --- a full cache -------------------------------------------------------------------------------------------


def crowded() -> Script:
    """Two sequences of 7 tokens run in 4 blocks; their second tokens fill them."""
    script = Script(kv_blocks=4)
    loaded(script, 1, prompt=7, max_tokens=9)
    loaded(script, 2, prompt=7, max_tokens=9)
    script.on(events.EngineIdled)
    return script


def test_the_sequence_that_joined_last_is_swapped_out_and_rejoins_first() -> None:
    script = crowded()
    one, two = script.sequence("1-1"), script.sequence("2-1")
    assert step(script, 101, 201)[-1] == SwapOut([2, 3])
    assert script.on(events.SwappedOut, held="bytes") == []
    assert script.on(events.EngineIdled) == [RunStep([one], 8)]
    loaded(script, 3, prompt=3)  # all of it waits behind the one that is swapped out
    assert script.state.heartbeat(0).queued == 2
    for token in range(102, 108):
        step(script, token)
    assert step(script, 108)[-1] == SwapIn([0, 1], "bytes")
    assert script.on(events.SwappedIn) == []
    actions = script.on(events.EngineIdled)
    assert isinstance(actions[-1], RunStep)
    assert actions[-1].batch[0] is two
    assert two.preemptions == 1
    assert two.output == [100, 201]


@pytest.mark.parametrize("moment", ["moving out", "out", "moving in"])
def test_a_sequence_that_is_cancelled_while_it_is_swapped_leaves_nothing(moment: str) -> None:
    script = crowded()
    step(script, 101, 201)
    if moment != "moving out":
        script.on(events.SwappedOut, held="bytes")
    if moment == "moving in":
        script.on(events.EngineIdled)
        script.on(machines.OrderCancelled, order_id="1-1")
        script.on(events.StepEnded, tokens=tokens(102), step_ns=MS)
        assert script.on(events.EngineIdled) == [SwapIn([0, 1], "bytes")]
    script.on(machines.OrderCancelled, order_id="2-1")
    if moment == "moving in":
        assert script.state.kv_blocks_used == 2
        script.on(events.SwappedIn)
        assert script.state.kv_blocks_used == 0
        return
    if moment == "moving out":
        assert script.state.kv_blocks_used == 4
        script.on(events.SwappedOut, held="bytes")
    assert script.state.kv_blocks_used == 2
    assert script.on(events.EngineIdled) == [RunStep([script.sequence("1-1")], 8)]


def test_a_prompt_that_waits_with_a_part_of_its_kv_gives_way_before_one_that_runs() -> None:
    script = Script(kv_blocks=4)
    loaded(script, 1, prompt=7, max_tokens=9)
    script.on(events.EngineIdled)
    script.give(order(2))
    assert script.hear(*filled(2)[:2]) == [copy_layers(3, ((0, 20, 2), (0, 21, 3)))]
    script.on(events.LayersCopied, copy_id=3)
    one = script.sequence("1-1")
    assert step(script, 101)[-1] == RunStep([one], 8)
    assert one.table == [0, 1, 2]
    assert script.sequence("2-1").table == []
    assert script.hear(ready("2-1", 1)) == []
    script.on(machines.OrderCancelled, order_id="1-1")
    assert script.on(events.StepEnded, tokens=tokens(102), step_ns=MS) == [
        copy_layers(4, ((0, 20, 0), (0, 21, 1), (1, 20, 0), (1, 21, 1)))
    ]


def test_a_request_whose_kv_is_here_runs_when_it_holds_the_room_of_the_one_that_is_swapped_out() -> None:
    """Else each would wait for the other."""
    script = Script(kv_blocks=4, batch_max=1)
    loaded(script, 1, prompt=7, max_tokens=9)
    script.on(events.EngineIdled)
    loaded(script, 2, prompt=7, max_tokens=2)
    assert step(script, 101)[-1] == SwapOut([0, 1])
    script.on(events.SwappedOut, held="bytes")
    assert script.on(events.EngineIdled)[-1] == RunStep([script.sequence("2-1")], 7)
    assert step(script, 201)[-1] == SwapIn([0, 1], "bytes")


# --- generated blocks ---------------------------------------------------------------------------------------


def test_generated_blocks_are_shared_and_free_only_then() -> None:
    script = Script(layout=msgspec.structs.replace(LAYOUT, numerics="fast"))
    keys = {"root_key": b"r" * 16, "block_keys": b"k" * 16}
    assert Release("1-1", confirm=True) in loaded(script, 1, prompt=6, max_tokens=4, **keys)
    assert script.on(events.LeaseConfirmed, order_id="1-1", held=True) == []
    script.on(events.EngineIdled)
    for token in (101, 102):
        step(script, token)
    actions = script.on(events.StepEnded, tokens=tokens(103), step_ns=MS)
    assert actions[-1] == ShareOutput(
        order_id="1-1",
        root_key=b"r" * 16,
        tokens=[1, 2, 3, 4, 5, 6, 100, 101, 102],
        known_blocks=1,
        table=[0, 1, 2],
        tenant="",
    )
    assert script.state.kv_blocks_used == 3
    assert script.on(events.OutputShared, order_id="1-1") == []
    assert script.state.kv_blocks_used == 0


def test_generated_blocks_behind_tokens_that_are_not_here_are_not_shared() -> None:
    script = Script(layout=msgspec.structs.replace(LAYOUT, numerics="fast"))
    taken = msgspec.structs.replace(reply(root_key=b"r" * 16, block_keys=b"k" * 16), token_ids=b"")
    script.give(order(max_tokens=4), taken)
    for copy in script.hear(*filled(), result("1-1")):
        if isinstance(copy, CopyLayers):
            script.on(events.LayersCopied, copy_id=copy.copy_id)
    script.on(events.LeaseConfirmed, order_id="1-1", held=True)
    script.on(events.EngineIdled)
    said = [action for token in (101, 102, 103) for action in step(script, token)]
    assert said
    assert not [action for action in said if isinstance(action, ShareOutput)]
    assert script.state.kv_blocks_used == 0


@pytest.mark.parametrize("told", [True, False], ids=["the lease had ended", "nobody answered yet"])
def test_generated_blocks_are_not_shared_where_the_prompts_may_have_been_overwritten(told: bool) -> None:
    """A process that stood still for long copied from slots that were others' already."""
    script = Script(layout=msgspec.structs.replace(LAYOUT, numerics="fast"))
    loaded(script, 1, prompt=6, max_tokens=4, root_key=b"r" * 16, block_keys=b"k" * 16)
    if told:
        script.on(events.LeaseConfirmed, order_id="1-1", held=False)
    script.on(events.EngineIdled)
    for token in (101, 102, 103):
        actions = step(script, token)
    assert not [a for a in actions if isinstance(a, ShareOutput)]
    assert script.state.kv_blocks_used == 0
    script.on(events.LeaseConfirmed, order_id="1-1", held=True)  # too late


def test_generated_blocks_are_not_shared_behind_a_similar_prompts_kv() -> None:
    script = Script(layout=msgspec.structs.replace(LAYOUT, numerics="fast"))
    assert Release("1-1", confirm=True) in loaded(
        script, 1, prompt=6, max_tokens=4, root_key=b"r" * 16, block_keys=b"k" * 16
    )
    sequence = script.sequence()
    reuse = SimilarReuse(tokens=6, computed_tokens=2, resemblance=90)
    sequence.result = msgspec.structs.replace(sequence.result, similar=reuse)
    script.on(events.LeaseConfirmed, order_id="1-1", held=True)
    script.on(events.EngineIdled)
    for token in (101, 102, 103):
        actions = step(script, token)
    assert not [a for a in actions if isinstance(a, ShareOutput)]


def test_in_exact_numerics_generated_blocks_are_not_shared() -> None:
    script = Script()
    loaded(script, 1, prompt=6, max_tokens=4, root_key=b"r" * 16, block_keys=b"k" * 16)
    script.on(events.EngineIdled)
    for token in (101, 102, 103):
        actions = step(script, token)
    assert not [a for a in actions if isinstance(a, ShareOutput)]
    assert script.state.kv_blocks_used == 0


# --- what others ask ----------------------------------------------------------------------------------------


def asked(script: Script, index: int, order_id: str = "1-1", frontend_id: str = "f1") -> ResendReply:
    request = ResendRequest(frontend_id=frontend_id, request_id="r1", order_id=order_id, index=index)
    (answer,) = script.on(machines.ResendRequested, request=request)
    assert isinstance(answer, AnswerResend)
    return answer.reply


def test_a_frontend_that_missed_tokens_gets_them_again_while_they_are_known() -> None:
    script = Script()
    loaded(script, max_tokens=2)
    assert asked(script, 1) == ResendReply(known=True)
    assert asked(script, 0) == ResendReply(known=True, delivery=script.sequence().delivery(0, "d0"))
    script.on(events.EngineIdled)
    one = script.sequence()
    step(script, 101)
    assert asked(script, 1) == ResendReply(known=True, delivery=one.delivery(1, "d0"))
    assert asked(script, 0, "9-1") == ResendReply(known=False)
    assert asked(script, 0, frontend_id="f2") == ResendReply(known=False), "it is another frontend's"
    for number in range(2, FINISHED_MAX + 2):
        script.give(order(number, max_tokens=1))
        script.hear(result(f"{number}-1"))
    assert asked(script, 1) == ResendReply(known=False)


def test_what_long_prompts_were_told_of_takes_bounded_memory() -> None:
    """Log probabilities of their tokens can be sent again too, and are a hundred kilobytes each."""
    script = Script()
    kept = script.state.orders.finished
    most, rows = FINISHED_BYTES_MAX // 20, bytes(FINISHED_BYTES_MAX // 20)
    for number in range(1, 40):
        script.give(order(number, max_tokens=1))
        told = SampledToken(token_id=101, prompt_logprobs=rows)
        script.hear(msgspec.structs.replace(result(f"{number}-1"), first=told))
    assert list(kept) == [f"{number}-1" for number in range(21, 40)]
    assert kept.kept_bytes == sum(each.host_bytes for each in kept.values()) > 18 * most
    assert kept.kept_bytes <= FINISHED_BYTES_MAX
    # One that takes more by itself is kept until the next one.
    script.give(order(40, max_tokens=1))
    all_of_it = SampledToken(token_id=101, prompt_logprobs=bytes(FINISHED_BYTES_MAX))
    script.hear(msgspec.structs.replace(result("40-1"), first=all_of_it))
    assert list(kept) == ["40-1"]


def test_what_is_asked_for_again_comes_in_parts_that_fit_in_a_message() -> None:
    script = Script()
    sampling = Sampling(temperature=0.0, ignore_eos=True, logprobs=20)
    script.give(order(max_tokens=4_000), reply(sampling=sampling))
    script.hear(*filled(1, LAYOUT.blocks(6)), result("1-1"))
    sequence = script.sequence()
    top = [(49_000 + n, -12.345678901234567) for n in range(20)]
    large = SampledToken(
        token_id=49_000, logprob=-12.345678901234567, top_logprobs=top, logits_digest="f" * 16
    )
    for _ in range(3_000):
        sequence.add(large, 1)
    index, answers = 0, []
    while True:
        answers.append(asked(script, index))
        delivery = answers[-1].delivery
        assert delivery is not None
        assert delivery.index == index
        assert len(encode(answers[-1])) <= deliveries.MESSAGE_BYTES_MAX + 1024
        index += len(delivery.tokens)
        if not answers[-1].more:
            break
    assert index == len(sequence.tokens)
    assert len(answers) > 10


def test_a_step_of_many_sequences_is_told_in_messages_that_fit() -> None:
    sequences = []
    for number in range(1, 2_001):
        sequence = DecodeSequence(order(number), LAYOUT, 0)
        sequence.tokens.append(SampledToken(token_id=1))
        sequence.result = result(f"{number}-1")
        sequences.append((sequence, 0))
    told = deliveries.deliveries_of(sequences, "d0")
    assert len(told) > 10
    assert all(len(encode(one.message)) <= deliveries.MESSAGE_BYTES_MAX for one in told)
    assert [d.request_id for one in told for d in one.message.deliveries] == [
        f"r{n}" for n in range(1, 2_001)
    ]


def test_a_heartbeat_says_how_the_worker_is_and_what_it_lacks() -> None:
    script = Script()
    loaded(script, 1, max_tokens=9)
    script.on(events.EngineIdled)
    step(script, 101)
    script.give(order(2))
    script.hear(*filled(2))
    script.give(order(3))
    script.hear(*filled(3)[:2], result("3-1"))
    loaded(script, 4)
    beat = script.state.heartbeat(77)
    assert (beat.orders, beat.lacking) == (["1-1", "2-1", "3-1", "4-1"], ["2-1", "3-1"])
    assert (beat.queued, beat.running, beat.kv_blocks_used, beat.obeyed_seq) == (3, 1, 8, 77)
    assert (beat.steps, beat.step_ns, beat.step_sequences, beat.step_context_tokens) == (1, MS, 1, 6)
    assert script.state.heartbeat(78).steps == 0
