"""The adapter's machine: orders in, what is asked and reported out; and whatever may be heard in whatever order."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import EngineRefusal, StartMixed
from halfmoon.schemas.events import (
    DecodeFailed,
    PrefillFailed,
    PrefillFinished,
    RequestFinished,
)
from halfmoon.schemas.keys import chain_keys, pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.adapters.actions import AskEngine, HangUp
from halfmoon.workers.adapters.engine_blocks import salt_of
from halfmoon.workers.adapters.engines.words import VllmWords
from halfmoon.workers.adapters.events import AnswerBroke, EngineAsked, TokensHeard
from halfmoon.workers.adapters.state import AdapterState
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    Deliver,
    OrderCancelled,
    Report,
    TokensTaken,
    WorkerFacts,
    WorkerStopped,
)
from halfmoon.workers.mixed.events import MixedOrdered

MS = 1_000_000
ROOT, EOS = b"r" * 16, 2
LAYOUT = Layout(
    model="m",
    model_fingerprint="f",
    layers=1,
    kv_heads=1,
    head_dim=8,
    block_tokens=16,
    dtype="float32",
    numerics="fast",
)
PROMPT = list(range(100, 140))


def machine() -> AdapterState:
    return AdapterState(
        WorkerFacts(
            worker_id="vllm-0",
            incarnation="i",
            layout=LAYOUT,
            kv_blocks=100,
            eos_ids=frozenset((EOS,)),
        ),
        CostProfile(decode_base_ns=10 * MS),
        words=VllmWords("e"),
    )


def ordered(name: str = "o1", at_ns: int = 0) -> MixedOrdered:
    order = StartMixed(
        order_id=name,
        request_id=f"r-{name}",
        frontend_id="f",
        worker_id="vllm-0",
        prompt_tokens=len(PROMPT),
        max_tokens=4,
    )
    return MixedOrdered(at_ns=at_ns, order=order)


def taken(name: str = "o1", at_ns: int = 0, *, known: tuple[int, ...] = (), **fields: Any) -> TokensTaken:
    defaults: dict[str, Any] = {
        "token_ids": pack_tokens(PROMPT),
        "block_keys": chain_keys(ROOT, PROMPT, 16),
        "output_ids": pack_tokens(list(known)),
        "sampling": Sampling(temperature=0.0),
        "max_tokens": 4,
        "root_key": ROOT,
    }
    return TokensTaken(at_ns=at_ns, order_id=name, reply=TakeReply(**{**defaults, **fields}))


def heard(*ids: int, name: str = "o1", at_ns: int = 0, reason: str = "") -> TokensHeard:
    tokens = [SampledToken(token_id=each) for each in ids]
    return TokensHeard(at_ns=at_ns, order_id=name, tokens=tokens, finish_reason=reason)


def reports(actions: list[Any]) -> list[Any]:
    return [action.event for action in actions if isinstance(action, Report)]


def delivered(actions: list[Any]) -> list[tuple[int, list[int], str]]:
    """(index, token ids, how it ended)."""
    return [
        (one.index, [token.token_id for token in one.tokens], one.finish_reason)
        for action in actions
        if isinstance(action, Deliver)
        for one in action.message.deliveries
    ]


def test_an_order_from_its_tokens_to_its_last_word() -> None:
    state = machine()
    state.on(ordered())
    (ask,) = state.on(taken())
    assert isinstance(ask, AskEngine)
    about = {
        name: ask.body[name]
        for name in ("model", "prompt", "max_tokens", "cache_salt", "temperature", "stream")
    }
    assert about == {
        "model": "e",
        "prompt": PROMPT,
        "max_tokens": 4,
        "cache_salt": salt_of(ROOT),
        "temperature": 0.0,
        "stream": True,
    }
    state.on(EngineAsked(at_ns=5 * MS, order_id="o1", cached_blocks=2))
    first = state.on(heard(7, at_ns=25 * MS))
    assert delivered(first) == [(0, [7], "")]
    (told,) = reports(first)
    assert (told.queue_ns, told.compute_ns, told.cached_local_tokens) == (5 * MS, 20 * MS, 32)
    assert told.decodes
    assert delivered(state.on(heard(8, 9, at_ns=35 * MS))) == [(1, [8, 9], "")]
    last = state.on(heard(10, at_ns=45 * MS, reason="length"))
    assert delivered(last) == [(3, [10], "length")]
    (finished,) = reports(last)
    assert (finished.finish_reason, finished.completion_tokens, finished.decode_ns) == ("length", 4, 20 * MS)
    assert not [action for action in last if isinstance(action, HangUp)]
    assert state.orders_open() == 0


def test_keys_of_other_weights_than_the_orders_reach_no_engine() -> None:
    state = machine()
    state.on(ordered())
    (failed,) = reports(state.on(taken(weight_version="v2")))
    assert isinstance(failed, PrefillFailed)
    assert "weight version" in failed.reason


def test_what_the_client_has_is_part_of_the_prompt_and_not_told_again() -> None:
    state = machine()
    state.on(ordered())
    (ask,) = state.on(taken(known=(7, 8), sampling=Sampling(temperature=0.0, min_tokens=3)))
    assert (ask.body["prompt"], ask.body["max_tokens"], ask.body["min_tokens"]) == ([*PROMPT, 7, 8], 2, 1)
    assert delivered(state.on(heard(9))) == [(2, [9], "")]
    last = state.on(heard(EOS, reason="stop"))
    assert delivered(last) == [(3, [EOS], "stop")]
    assert [event.completion_tokens for event in reports(last)] == [4]


def test_an_answer_that_its_client_has_whole_is_not_asked_for_again() -> None:
    for known, reason in (((7, EOS), "stop"), ((7, 8, 9, 10), "length")):
        state = machine()
        state.on(ordered())
        done = state.on(taken(known=known))
        assert not [action for action in done if isinstance(action, AskEngine)]
        assert [type(event) for event in reports(done)] == [PrefillFinished, RequestFinished]
        assert reports(done)[1].finish_reason == reason


def test_an_engine_that_draws_on_behind_the_end_is_hung_up_on() -> None:
    state = machine()
    state.on(ordered())
    state.on(taken())
    done = state.on(heard(7, EOS, 8, 9))
    assert delivered(done) == [(0, [7, EOS], "stop")]
    assert HangUp("o1") in done


def test_a_prompt_has_waited_until_the_one_before_it_was_computed() -> None:
    state = machine()
    for name in ("o1", "o2"):
        state.on(ordered(name))
        state.on(taken(name))
        state.on(EngineAsked(at_ns=0, order_id=name, cached_blocks=0))
    state.on(heard(7, at_ns=30 * MS))
    told = reports(state.on(heard(7, name="o2", at_ns=50 * MS)))[0]
    assert (told.queue_ns, told.compute_ns) == (30 * MS, 20 * MS)


def test_steps_are_timed_where_no_prompt_is_computed() -> None:
    state = machine()
    state.on(ordered())
    state.on(taken(max_tokens=9))
    for number, at_ms in enumerate((10, 22, 34)):
        state.on(heard(7 + number, at_ns=at_ms * MS))
    beat = state.heartbeat(0)
    assert (beat.steps, beat.step_ns, beat.step_sequences) == (1, 12 * MS, 1)
    state.on(ordered("o2"))  # its prompt is computed beside the next step
    state.on(heard(20, at_ns=99 * MS))
    state.on(taken("o2"))
    state.on(heard(7, name="o2", at_ns=105 * MS))
    state.on(heard(21, at_ns=150 * MS))
    assert state.heartbeat(0).steps == 0
    state.on(heard(22, at_ns=170 * MS))
    beat = state.heartbeat(0)
    assert (beat.steps, beat.step_ns, beat.step_sequences) == (1, 20 * MS, 2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_keys": b"k" * 16}, "--block-tokens: 16 here, and something else at the frontend"),
        ({"root_key": b""}, "the frontend names no root of the request's block keys"),
        ({"token_ids": pack_tokens([1])}, "the frontend's tokens are not those of the order"),
        (
            {"sampling": Sampling(grammar="g")},
            "a grammar (response_format, tools): not over an engine behind an adapter",
        ),
        ({"sampling": Sampling(bad_words=[[1]])}, "bad_words: not over an engine behind an adapter"),
        ({"sampling": Sampling(prompt_logprobs=1)}, "prompt_logprobs: not over an engine behind an adapter"),
    ],
)
def test_what_cannot_be_done_fails_for_good(fields: dict[str, Any], reason: str) -> None:
    state = machine()
    state.on(ordered())
    (failed,) = reports(state.on(taken(**fields)))
    assert (type(failed), failed.reason, failed.retryable) == (PrefillFailed, reason, False)
    param = reason.partition(":")[0]
    wrong = EngineRefusal(status=400, param="" if "(" in param else param)
    assert failed.refusal == (wrong if "sampling" in fields else None)


def test_a_broken_answer_fails_the_half_that_it_is_in() -> None:
    for before, kind in (((), PrefillFailed), ((heard(7),), DecodeFailed)):
        state = machine()
        state.on(ordered())
        state.on(taken())
        for event in before:
            state.on(event)
        refusal = EngineRefusal(status=503)
        broke = state.on(AnswerBroke(at_ns=0, order_id="o1", reason="x", retryable=True, refusal=refusal))
        assert [(type(event), event.retryable, event.refusal) for event in reports(broke)] == [
            (kind, True, refusal)
        ]
        odd = machine()
        for event in (ordered(), taken(), *before):
            odd.on(event)
        (failed,) = reports(odd.on(heard(reason="abort")))
        assert type(failed) is kind


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_heard_each_order_has_one_end(seed: int) -> None:
    draw = random.Random(seed)
    state = machine()
    names = [f"o{number}" for number in range(6)]
    ends: dict[str, int] = dict.fromkeys(names, 0)
    begun: set[str] = set()
    cancelled: set[str] = set()
    for step in range(200):
        name, at_ns = draw.choice(names), step * MS
        known = tuple(range(50, 50 + draw.randrange(3)))
        event: Any = draw.choice(
            [
                ordered(name, at_ns),
                taken(name, at_ns, known=known),
                taken(name, at_ns, gone=True),
                EngineAsked(at_ns=at_ns, order_id=name, cached_blocks=draw.randrange(9)),
                heard(*[draw.randrange(2, 9) for _ in range(draw.randrange(3))], name=name, at_ns=at_ns),
                heard(name=name, at_ns=at_ns, reason=draw.choice(["stop", "length", "abort"])),
                AnswerBroke(at_ns=at_ns, order_id=name, reason="x", retryable=bool(draw.randrange(2))),
                OrderCancelled(at_ns=at_ns, order_id=name),
            ]
        )
        if step == 150:
            event = draw.choice([AnnounceRequested(at_ns=at_ns), WorkerStopped(at_ns=at_ns)])
        if isinstance(event, TokensHeard) and not any(
            each.sequence.taken for each in state.requests.values() if each.order.order_id == name
        ):
            continue  # an engine that was not asked says nothing
        open_before = set(state.requests)
        actions = state.on(event)
        state.validate()
        begun |= set(state.requests)
        if isinstance(event, OrderCancelled | AnnounceRequested | WorkerStopped):
            cancelled |= open_before - set(state.requests)
        for told in reports(actions):
            if isinstance(told, PrefillFailed | DecodeFailed | RequestFinished):
                ends[told.order_id] += 1
                assert told.order_id in open_before
        assert (Announce() in actions) == isinstance(event, AnnounceRequested)
        assert sorted(state.heartbeat(0).orders or []) == sorted(state.requests)
    assert any(ends.values())


def test_a_gateway_gets_what_is_set_in_its_clients_request() -> None:
    state = machine()
    state.on(ordered())
    (ask,) = state.on(taken(forwarded=True))
    body = {"model": "e", "cache_salt": salt_of(ROOT), "return_token_ids": True}
    assert ask == AskEngine("o1", "r-o1", body, chain_keys(ROOT, PROMPT, 16), gateway_of="f")
    state.validate()


def test_the_whole_answers_time_is_not_the_prompts() -> None:
    """Its first token comes with its last. The profile says what the prompt takes."""
    state = machine()
    state.profile = CostProfile(prefill_per_token_ps=MS * 1_000, decode_base_ns=10 * MS)
    state.on(ordered())
    state.on(taken(forwarded=True))
    state.on(EngineAsked(at_ns=0, order_id="o1", cached_blocks=1))
    whole = msgspec.structs.replace(heard(5, 6, 7, at_ns=9_000 * MS, reason="stop"), whole=True)
    found = reports(state.on(whole))
    computed = next(one for one in found if isinstance(one, PrefillFinished))
    assert (computed.compute_ns, computed.queue_ns) == ((len(PROMPT) - 16) * MS, 0)
    assert next(one for one in found if isinstance(one, RequestFinished)).completion_tokens == 3
    # Nor do prompts behind it wait for it.
    assert state.first_ns == 0
