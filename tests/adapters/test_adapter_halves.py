"""The adapter's machines of one half of an order: what is asked of the engine, and what goes from one to the other."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import EngineRefusal, StartDecode, StartPrefill
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeStarted,
    PrefillFailed,
    PrefillFinished,
    RequestFinished,
)
from halfmoon.schemas.kv import KV_ORDER, KV_SOURCE, EngineKv, KvPromised, PrefillResult, TransferFailed
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.workers.adapters.actions import AskEngine, HangUp, TellDecode
from halfmoon.workers.adapters.decode_half import EARLY_MAX, DecodeAdapterState
from halfmoon.workers.adapters.engine_blocks import salt_of
from halfmoon.workers.adapters.engines.completion import kv_params_of
from halfmoon.workers.adapters.engines.words import SglangWords, VllmWords
from halfmoon.workers.adapters.events import AnswerBroke, EngineAsked, PromptOrdered
from halfmoon.workers.adapters.prefill_half import PrefillAdapterState
from halfmoon.workers.adapters.state import AdapterState
from halfmoon.workers.decode.events import DecodeOrdered, KvHeard
from halfmoon.workers.machines import OrderCancelled, WorkerFacts
from tests.adapters.test_adapter_state import (
    EOS,
    LAYOUT,
    MS,
    PROMPT,
    ROOT,
    delivered,
    heard,
    reports,
    taken,
)

#: What the prefill engine says of the place.
PLACE = {"do_remote_prefill": True, "remote_engine_id": "e7", "remote_block_ids": [[3, 4, 5]]}
SAID = msgspec.json.encode(PLACE).decode()
#: The same of a connector that takes names.
NAMED = {"do_remote_prefill": True, KV_SOURCE: "n1"}


def json_of(params: dict[str, Any]) -> str:
    return msgspec.json.encode(params).decode()


def facts(worker_id: str) -> WorkerFacts:
    return WorkerFacts(
        worker_id=worker_id, incarnation="i", layout=LAYOUT, kv_blocks=100, eos_ids=frozenset((EOS,))
    )


def prefill() -> PrefillAdapterState:
    return PrefillAdapterState(facts("vllm-0"), CostProfile(), words=VllmWords("e"))


def decode() -> DecodeAdapterState:
    return DecodeAdapterState(facts("vllm-2"), CostProfile(), words=VllmWords("e"))


def prompt_ordered(name: str = "o1", at_ns: int = 0) -> PromptOrdered:
    order = StartPrefill(
        order_id=name,
        request_id=f"r-{name}",
        frontend_id="f",
        worker_id="vllm-0",
        decode_worker_id="vllm-2",
        decode_node_id="vllm-2",
        prompt_tokens=len(PROMPT),
    )
    return PromptOrdered(at_ns=at_ns, order=order)


def decode_ordered(name: str = "o1", at_ns: int = 0) -> DecodeOrdered:
    order = StartDecode(
        order_id=name,
        request_id=f"r-{name}",
        frontend_id="f",
        worker_id="vllm-2",
        prefill_worker_id="vllm-0",
        prompt_tokens=len(PROMPT),
        max_tokens=4,
        tbt_slo_ns=1,
    )
    return DecodeOrdered(at_ns=at_ns, order=order)


def prefilled(
    name: str = "o1", at_ns: int = 0, *, by: str = "vllm-0", said: str = SAID, tokens: int = len(PROMPT)
) -> KvHeard:
    result = PrefillResult(
        order_id=name,
        request_id=f"r-{name}",
        first=SampledToken(token_id=99),
        queue_ns=5 * MS,
        transfer_ns=0,
        compute_ns=20 * MS,
        cached_tokens=16,
        finished_at_ns=0,
        engine_kv=EngineKv(params=said, tokens=tokens),
    )
    return KvHeard(at_ns=at_ns, author_id=by, message=result)


def asked(actions: list[Any]) -> list[dict[str, Any]]:
    return [action.body for action in actions if isinstance(action, AskEngine)]


def hears(state: AdapterState, *events: Any) -> list[Any]:
    """What follows from the last one."""
    return [state.on(event) for event in events][-1]


def computed(*ids: int, name: str = "o1", said: str = "", reason: str = "length", at_ns: int = 0) -> Any:
    return msgspec.structs.replace(heard(*ids, name=name, at_ns=at_ns, reason=reason), kv_params=said)


# --- the prefill half ---------------------------------------------------------------------------------------


def test_a_prompt_is_computed_for_another_engine() -> None:
    state = prefill()
    wants = Sampling(temperature=0.5, seed=3, min_tokens=2, logprobs=1, stop_token_ids=[7])
    (body,) = asked(hears(state, prompt_ordered(), taken(sampling=wants)))
    assert (body["prompt"], body["max_tokens"], body["stream"]) == (PROMPT, 1, False)
    assert (body["cache_salt"], body["temperature"], body["seed"]) == (salt_of(ROOT), 0.5, 3)
    # Nothing but its length ends it: an engine keeps no KV of what has stopped.
    assert (body["ignore_eos"], body["min_tokens"], body["stop_token_ids"]) == (True, 0, [])
    assert "logprobs" not in body
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    state.on(EngineAsked(at_ns=5 * MS, order_id="o1", cached_blocks=1))
    tell, report = hears(state, computed(EOS, said=SAID, at_ns=25 * MS))
    assert isinstance(tell, TellDecode)
    assert (tell.decode_worker_id, tell.message.engine_kv) == (
        "vllm-2",
        EngineKv(params=SAID, tokens=len(PROMPT)),
    )
    done = report.event
    assert isinstance(done, PrefillFinished)
    assert (done.queue_ns, done.compute_ns, done.cached_local_tokens) == (5 * MS, 20 * MS, 16)
    assert (tell.message.queue_ns, tell.message.compute_ns) == (5 * MS, 20 * MS)
    assert state.orders_open() == 0


def test_what_the_client_has_is_computed_with_the_prompt() -> None:
    state = prefill()
    (body,) = asked(hears(state, prompt_ordered(), taken(known=(7, EOS, 8))))
    assert (body["prompt"], body["max_tokens"]) == ([*PROMPT, 7, EOS, 8], 1)
    tell, _ = hears(state, computed(9))
    assert tell.message.engine_kv == EngineKv(tokens=len(PROMPT) + 3)


@pytest.mark.parametrize(
    ("broke", "retryable"),
    [
        (AnswerBroke(at_ns=0, order_id="o1", reason="x", retryable=True), True),
        (AnswerBroke(at_ns=0, order_id="o1", reason="x", retryable=False), False),
        (computed(reason="length"), True),
        (computed(7, reason="abort"), True),
    ],
)
def test_a_prompt_that_is_not_computed_fails(broke: Any, retryable: bool) -> None:
    (failed,) = reports(hears(prefill(), prompt_ordered(), taken(), broke))
    assert (type(failed), failed.retryable) == (PrefillFailed, retryable)


def told(actions: list[Any]) -> list[tuple[str, str, str]]:
    """Who was told of which order's KV, and under which name it is."""
    return [
        (
            type(one.message).__name__,
            one.message.order_id,
            kv_params_of(one.message.engine_kv.params)[KV_ORDER],
        )
        for one in actions
        if isinstance(one, TellDecode)
    ]


def test_a_prompt_is_promised_when_it_is_the_next_one_that_a_connector_of_names_sends() -> None:
    state = prefill()
    (body,) = asked(hears(state, prompt_ordered("o1"), taken("o1")))
    assert KV_ORDER not in body["kv_transfer_params"]
    named = NAMED | {KV_ORDER: "the engine's own"}
    assert told(hears(state, computed(7, said=json_of(named)))) == [
        ("PrefillResult", "o1", "the engine's own")
    ]
    # It takes names, so it is given one for each prompt from here on; the next one of several is promised.
    names = {}
    for name in ("o2", "o3", "o4"):
        actions = hears(state, prompt_ordered(name), taken(name, known=(50,)))
        names[name] = asked(actions)[0]["kv_transfer_params"][KV_ORDER]
        assert told(actions) == ([("KvPromised", "o2", names["o2"])] if name == "o2" else [])
    assert len({*names.values()}) == 3
    assert names["o2"] == "o2-i"  # with the adapter's incarnation
    actions = hears(state, OrderCancelled(at_ns=0, order_id="o3"))
    assert told(actions) == []
    (_, _, promise) = actions = hears(
        state, computed(7, name="o2", said=json_of(NAMED | {KV_ORDER: names["o2"]}))
    )
    assert told(actions) == [("PrefillResult", "o2", names["o2"]), ("KvPromised", "o4", names["o4"])]
    assert promise.decode_worker_id == "vllm-2"
    assert promise.message.engine_kv == EngineKv(
        params=json_of(NAMED | {KV_ORDER: names["o4"]}), tokens=len(PROMPT) + 1
    )
    # What the engine cannot be asked has no name, and promises nothing.
    assert told(hears(state, prompt_ordered("o6"), taken("o6", sampling=Sampling(bad_words=["x"])))) == []
    # An engine that was started with another connector takes none.
    hears(state, computed(7, name="o4", said=SAID))
    assert told(hears(state, prompt_ordered("o5"), taken("o5"))) == []


# --- the decode half ----------------------------------------------------------------------------------------


def test_all_tokens_are_the_decode_engines() -> None:
    state = decode()
    assert asked(hears(state, decode_ordered(), taken())) == []
    assert state.heartbeat(0).lacking == ["o1"]
    (body,) = asked(hears(state, prefilled(at_ns=30 * MS)))
    assert (body["prompt"], body["max_tokens"], body["stream"]) == (PROMPT, 4, True)
    assert body["kv_transfer_params"] == PLACE
    assert state.heartbeat(0).lacking == []
    first = hears(state, heard(7, at_ns=40 * MS))
    assert delivered(first) == [(0, [7], "")]
    (started,) = reports(first)
    assert (type(started), started.wait_ns) == (DecodeStarted, 10 * MS)
    last = hears(state, heard(8, 9, 10, at_ns=70 * MS, reason="length"))
    assert delivered(last) == [(1, [8, 9, 10], "length")]
    (finished,) = reports(last)
    assert isinstance(finished, RequestFinished)
    # Queue and prefill there, and the first token here.
    assert (finished.ttft_ns, finished.decode_ns) == (35 * MS, 30 * MS)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_result_may_come_at_any_time(first: int) -> None:
    state, events = decode(), [prefilled(), decode_ordered(), taken()]
    # Its tokens come after its order.
    events.insert(first, events.pop(0))
    assert asked(hears(state, *events[:2])) == []
    (body,) = asked(hears(state, events[2]))
    assert body["kv_transfer_params"] == PLACE
    assert asked(hears(state, prefilled(), decode_ordered(), taken())) == []


def test_a_result_of_another_worker_is_passed_over() -> None:
    failed = KvHeard(
        at_ns=0,
        author_id="vllm-0",
        message=TransferFailed(order_id="o1", request_id="r-o1", reason="x"),
    )
    assert hears(decode(), decode_ordered(), taken(), prefilled(by="vllm-1")) == []
    assert hears(decode(), decode_ordered(), taken(), failed) == []
    lied = prefilled(by="vllm-1", said="{}")
    assert asked(hears(decode(), lied, decode_ordered(), taken())) == []
    # Nor does it take the place of the right one.
    (body,) = asked(hears(decode(), prefilled(), lied, decode_ordered(), taken()))
    assert body["kv_transfer_params"] == PLACE


@pytest.mark.parametrize(
    "place",
    [
        {"said": ""},
        {"said": "{"},
        {"said": "7"},
        {"said": "[" * 100_000},
        {"tokens": len(PROMPT) - 1},
        {"tokens": len(PROMPT) + 1},
    ],
)
def test_without_a_place_that_fits_the_engine_is_told_of_none(place: dict[str, Any]) -> None:
    state = decode()
    (body,) = asked(hears(state, decode_ordered(), taken(), prefilled(**place)))
    assert "kv_transfer_params" not in body
    # It has no reason to be asked again.
    (failed,) = reports(hears(state, broken(None)))
    assert isinstance(failed, DecodeFailed)


def broken(status: int | None, *, retryable: bool = True) -> AnswerBroke:
    refusal = None if status is None else EngineRefusal(status=status)
    return AnswerBroke(at_ns=0, order_id="o1", reason="x", retryable=retryable, refusal=refusal)


@pytest.mark.parametrize("how", [broken(None), broken(400, retryable=False), heard(reason="error")])
def test_an_engine_that_cannot_have_the_kv_computes_it(how: Any) -> None:
    state = decode()
    (body,) = asked(hears(state, decode_ordered(), taken(), prefilled()))
    assert state.prompts_recomputed == 0
    again = hears(state, how)
    assert reports(again) == []
    assert asked(again) == [{name: each for name, each in body.items() if name != "kv_transfer_params"}]
    assert [bool(action.computes_again) for action in again] == [True]
    # Once: what it refuses then, it refuses for another reason.
    (failed,) = reports(hears(state, how))
    assert isinstance(failed, DecodeFailed)
    assert state.recomputed == set()
    assert state.prompts_recomputed == 1


@pytest.mark.parametrize("status", [404, 429, 503])
def test_an_engine_that_takes_nothing_now_is_not_asked_again(status: int) -> None:
    state = decode()
    (failed,) = reports(hears(state, decode_ordered(), taken(), prefilled(), broken(status)))
    assert (type(failed), failed.retryable, failed.refusal) == (
        DecodeFailed,
        True,
        EngineRefusal(status=status),
    )


def promised(name: str = "o1", at_ns: int = 0, *, by: str = "vllm-0", tokens: int = len(PROMPT)) -> KvHeard:
    kv = EngineKv(params=json_of(NAMED | {KV_ORDER: "n1"}), tokens=tokens)
    return KvHeard(
        at_ns=at_ns, author_id=by, message=KvPromised(order_id=name, request_id=f"r-{name}", engine_kv=kv)
    )


@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_engine_is_asked_for_what_is_promised_and_says_nothing_before_the_prompt_is_computed(
    first: int,
) -> None:
    state, events = decode(), [promised(at_ns=1 * MS), decode_ordered(), taken()]
    events.insert(first, events.pop(0))
    (body,) = asked(hears(state, *events))
    assert body["kv_transfer_params"] == NAMED | {KV_ORDER: "n1"}
    state.on(EngineAsked(at_ns=2 * MS, order_id="o1", cached_blocks=0))
    assert hears(state, promised(), heard(7, at_ns=28 * MS), heard(8, at_ns=29 * MS)) == []
    assert state.heartbeat(0).lacking == ["o1"]
    actions = hears(state, prefilled(at_ns=30 * MS))
    assert asked(actions) == []
    assert delivered(actions) == [(0, [7], ""), (1, [8], "")]
    (started,) = reports(actions)
    assert (type(started), started.wait_ns) == (DecodeStarted, 0)
    (finished,) = reports(hears(state, heard(9, 10, at_ns=70 * MS, reason="length")))
    assert isinstance(finished, RequestFinished)
    assert (state.prompts_overlapped, state.prompts_recomputed, state.promises) == (1, 0, {})


def test_an_answer_that_was_over_before_its_prompt_was_is_told_of_after_it() -> None:
    state = decode()
    assert (
        reports(hears(state, decode_ordered(), taken(), promised(), heard(7, 8, 9, 10, reason="length")))
        == []
    )
    actions = hears(state, prefilled())
    assert delivered(actions) == [(0, [7, 8, 9, 10], "length")]
    assert [type(event) for event in reports(actions)] == [RequestFinished]
    assert state.orders_open() == 0


@pytest.mark.parametrize("how", [broken(None), broken(400, retryable=False), broken(503)])
def test_a_promise_that_is_not_kept_is_as_if_it_had_not_been_made(how: Any) -> None:
    state = decode()
    assert hears(state, decode_ordered(), taken(), promised(), heard(7), how) == []
    assert hears(state, promised()) == []
    (body,) = asked(hears(state, prefilled()))
    assert body["kv_transfer_params"] == PLACE
    assert delivered(hears(state, heard(8))) == [(0, [8], "")]
    # The engine refuses that too: it computes the prompt, or the order fails, as without a promise.
    state = decode()
    hears(state, decode_ordered(), taken(), promised(), how, prefilled())
    again = hears(state, how)
    assert len(asked(again)) == (0 if how == broken(503) else 1)


def test_what_is_promised_by_another_or_of_other_tokens_is_not_asked_for() -> None:
    for wrong in (promised(by="vllm-1"), promised(tokens=len(PROMPT) - 1)):
        state = decode()
        assert asked(hears(state, decode_ordered(), taken(), wrong)) == []
        assert len(asked(hears(state, prefilled()))) == 1
    # One that has come after the result; an answer that its client has whole.
    assert asked(hears(decode(), decode_ordered(), taken(), prefilled(), promised())) == []
    whole = hears(decode(), decode_ordered(), taken(known=(7, EOS)), promised(tokens=len(PROMPT) + 2))
    assert asked(whole) == []
    # Nobody is asked twice where a gateway sends the request.
    state = decode()
    hears(state, decode_ordered(), taken(forwarded=True))
    assert asked(hears(state, promised())) == []
    (once,) = [one for one in hears(state, prefilled()) if isinstance(one, AskEngine)]
    assert once.gateway_of == "f"


def test_an_answer_that_was_begun_elsewhere_goes_on_from_what_is_promised() -> None:
    state = decode()
    hears(state, decode_ordered(), taken(known=(7, 8)))
    (body,) = asked(hears(state, promised(tokens=len(PROMPT) + 2)))
    assert (body["prompt"], body["max_tokens"]) == ([*PROMPT, 7, 8], 2)
    assert hears(state, heard(9)) == []
    assert delivered(hears(state, prefilled(tokens=len(PROMPT) + 2))) == [(2, [9], "")]


def test_an_answer_that_breaks_off_is_not_begun_again_here() -> None:
    _, promise = met(sglang_prefill())
    for state, told in ((decode(), prefilled()), (sglang_decode(), promise)):
        early = [prefilled(said="")] if told is promise else []
        (failed,) = reports(hears(state, decode_ordered(), taken(), told, *early, heard(7), broken(None)))
        assert isinstance(failed, DecodeFailed)
        # It had the KV.
        assert not failed.prefill_in_doubt


def test_an_answer_that_its_client_has_whole_waits_for_the_other_half_alone() -> None:
    state = decode()
    assert hears(state, decode_ordered(), taken(known=(7, EOS))) == []
    done = hears(state, prefilled(tokens=len(PROMPT) + 2))
    assert asked(done) == []
    assert [type(event) for event in reports(done)] == [RequestFinished]


def test_an_order_that_is_cancelled_wants_nothing_more() -> None:
    for before in ([], [taken()], [taken(), prefilled()], [taken(), prefilled(), heard(7)]):
        state = decode()
        assert hears(state, decode_ordered(), *before, OrderCancelled(at_ns=0, order_id="o1")) == [
            HangUp("o1")
        ]
        assert state.orders_open() == 0


def test_results_of_orders_that_never_come_are_not_kept_for_ever() -> None:
    state = decode()
    for number in range(EARLY_MAX + 10):
        state.on(prefilled(f"o{number}"))
    assert len(state.early) == EARLY_MAX


def test_steps_are_timed_while_a_prompt_is_computed_elsewhere() -> None:
    state = decode()
    hears(state, decode_ordered("o1"), taken("o1", max_tokens=9), prefilled("o1"))
    hears(state, decode_ordered("o2"), taken("o2"), promised("o2"))
    state.on(EngineAsked(at_ns=1 * MS, order_id="o2", cached_blocks=0))
    for number, at_ms in enumerate((10, 22, 34)):
        state.on(heard(7 + number, at_ns=at_ms * MS))
    beat = state.heartbeat(0)
    assert (beat.steps, beat.step_ns, beat.queued, beat.running) == (1, 12 * MS, 1, 1)


# --- engines that are asked both at once --------------------------------------------------------------------


def sglang_prefill() -> PrefillAdapterState:
    words = SglangWords("e", halved=True, host="10.0.0.7", bootstrap_port=8998)
    return PrefillAdapterState(facts("vllm-0"), CostProfile(), words=words)


def sglang_decode() -> DecodeAdapterState:
    return DecodeAdapterState(facts("vllm-2"), CostProfile(), words=SglangWords("e", halved=True))


def place_of(body: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in body.items() if name.startswith("bootstrap_")}


def met(by: PrefillAdapterState, name: str = "o1", *, known: tuple[int, ...] = ()) -> tuple[Any, KvHeard]:
    """What a prefill engine is asked, and what the decode half hears of it."""
    ask, tell = hears(by, prompt_ordered(name), taken(name, known=known))
    return ask.body, KvHeard(at_ns=0, author_id="vllm-0", message=tell.message)


def test_both_engines_are_asked_the_same_at_once_and_meet_in_a_room_of_their_own() -> None:
    prompts, answers = sglang_prefill(), sglang_decode()
    wants = Sampling(temperature=0.5, seed=3, min_tokens=2, logprobs=0, stop_token_ids=[7])
    rooms = set()
    for name in ("o1", "o2", "o3"):
        asks, tells = hears(prompts, prompt_ordered(name), taken(name, sampling=wants, known=(50,)))
        promise = KvHeard(at_ns=0, author_id="vllm-0", message=tells.message)
        (body,) = asked(
            hears(answers, decode_ordered(name), taken(name, sampling=wants, known=(50,)), promise)
        )
        # The first token is the prefill engine's, so it draws as the other one would.
        assert asks.body == body | {"stream": False}
        assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (3, 1, True)
        place = place_of(body)
        rooms.add(place.pop("bootstrap_room"))
        assert place == {"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998}
    assert len(rooms) == 3
    assert all(0 < room < 1 << 63 for room in rooms)
    # The same order of another log meets elsewhere.
    other = sglang_prefill()
    other.incarnation = "j"
    assert place_of(met(other)[0])["bootstrap_room"] not in rooms


def test_what_an_engine_answers_early_is_told_when_the_prompt_is_computed() -> None:
    prompts, state = sglang_prefill(), sglang_decode()
    _, promise = met(prompts)
    hears(state, promise, decode_ordered(), taken(forwarded=True))
    assert hears(state, heard(7)) == []
    tell, report = hears(prompts, computed(7))
    assert isinstance(report.event, PrefillFinished)
    told = KvHeard(at_ns=0, author_id="vllm-0", message=tell.message)
    assert delivered(hears(state, told)) == [(0, [7], "")]
    # It is promised the next one as well.
    met(prompts, "o2")


@pytest.mark.parametrize(
    "how", [broken(None), broken(400, retryable=False), broken(503), heard(reason="abort")]
)
@pytest.mark.parametrize("computed_first", [False, True])
def test_no_such_engine_computes_a_prompt_for_itself(how: Any, computed_first: bool) -> None:
    state = sglang_decode()
    _, promise = met(sglang_prefill())
    early = [prefilled(said="")] if computed_first else []
    actions = hears(state, decode_ordered(), taken(), promise, *early, how)
    if not computed_first and not isinstance(how, AnswerBroke):
        assert actions == []
        actions = hears(state, prefilled(said=""))
    (failed,) = reports(actions)
    assert isinstance(failed, DecodeFailed)
    assert failed.retryable == (how.retryable if isinstance(how, AnswerBroke) else True)
    # The KV may not have come: whose fault that is, the engine does not say.
    assert failed.prefill_in_doubt
    assert asked(actions) == []


def test_engines_of_two_kinds_do_not_get_each_others_kv() -> None:
    _, promise = met(sglang_prefill())
    (failed,) = reports(hears(decode(), decode_ordered(), taken(), promise))
    assert (type(failed), failed.retryable) == (DecodeFailed, True)
    assert "of another kind or other tokens" in failed.reason
    for told in (prefilled(), promised(), prefilled(said=""), promised(tokens=1)):
        (failed,) = reports(hears(sglang_decode(), decode_ordered(), taken(), told))
        assert isinstance(failed, DecodeFailed)


def test_of_an_answer_that_its_client_has_whole_no_engine_computes_the_prompt() -> None:
    for prompts, answers in ((prefill(), decode()), (sglang_prefill(), sglang_decode())):
        tell, report = hears(prompts, prompt_ordered(), taken(known=(7, EOS)))
        # It teaches nothing of the time that a prompt takes.
        assert (type(report.event), report.event.prompt_tokens) == (PrefillFinished, 0)
        assert prompts.orders_open() == 0
        told = KvHeard(at_ns=0, author_id="vllm-0", message=tell.message)
        done = hears(answers, decode_ordered(), taken(known=(7, EOS)), told)
        assert asked(done) == []
        assert [type(event) for event in reports(done)] == [RequestFinished]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    ("make", "order"),
    [
        (prefill, prompt_ordered),
        (decode, decode_ordered),
        (sglang_prefill, prompt_ordered),
        (sglang_decode, decode_ordered),
    ],
)
def test_whatever_is_heard_each_half_has_one_end(make: Any, order: Any, seed: int) -> None:
    draw, state = random.Random(seed), make()
    names = [f"o{number}" for number in range(4)]
    ends: dict[str, int] = dict.fromkeys(names, 0)
    # Orders that an engine was asked for: it says nothing of others.
    engine: set[str] = set()
    rooms = {name: met(sglang_prefill(), name)[1] for name in names}
    for step in range(300):
        name, at_ns = draw.choice(names), step * MS
        known = tuple(range(50, 50 + draw.randrange(3)))
        tokens = [draw.randrange(2, 9) for _ in range(draw.randrange(3))]
        broke = AnswerBroke(at_ns=at_ns, order_id=name, reason="x", retryable=bool(draw.randrange(2)))
        place = draw.choice([SAID, json_of(NAMED | {KV_ORDER: name})])
        said = computed(*tokens, said=place, reason=draw.choice(["", "stop", "length", "abort"]), at_ns=at_ns)
        events: list[Any] = [
            order(name, at_ns),
            taken(name, at_ns, known=known),
            prefilled(name, at_ns, tokens=len(PROMPT) + draw.randrange(3)),
            prefilled(name, at_ns, by="vllm-1"),
            promised(name, at_ns),
            rooms[name],
            OrderCancelled(at_ns=at_ns, order_id=name),
        ]
        if name in engine:
            events += [broke, msgspec.structs.replace(said, order_id=name)] * 2
        open_before = set(state.requests)
        actions = state.on(draw.choice(events))
        state.validate()
        assert set(state.promises if isinstance(state, DecodeAdapterState) else state.named) <= set(
            state.requests
        )
        engine |= {action.order_id for action in actions if isinstance(action, AskEngine)}
        for told in reports(actions):
            if isinstance(told, PrefillFinished | PrefillFailed | DecodeFailed | RequestFinished):
                ends[told.order_id] += 1
                assert told.order_id in open_before
                assert told.order_id not in state.requests
        engine &= set(state.requests)
    assert any(ends.values())
