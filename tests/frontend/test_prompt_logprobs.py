"""How likely a prompt's own tokens were, in the answers that ask for it, at a real edge."""

from __future__ import annotations

from typing import Any

import pytest
from frontend_double import Double, scored, whole_answer

from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.eventually import eventually

PROMPT = "Say it now"
COMPLETIONS = "/v1/completions"


@pytest.mark.pure
def test_a_prompts_own_log_probabilities_are_told(run: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    names = [tokenizer.decode([token]) for token in ids]
    five, six = tokenizer.names([5, 6])
    likely = {
        "5": {"logprob": -1.0, "rank": 1, "decoded_token": five},
        "6": {"logprob": -2.0, "rank": 2, "decoded_token": six},
    }
    told = [None] + [
        {str(token): {"logprob": -9.5, "rank": 4, "decoded_token": name}, **likely}
        for token, name in zip(ids[1:], names[1:], strict=True)
    ]

    async def whole(cluster: Any) -> None:
        body = {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 1}
        _, _, answer = await cluster.post(COMPLETIONS, body)
        assert answer["choices"][0]["prompt_logprobs"] == told
        _, answer = await cluster.ask("generate", body)
        assert answer["prompt_logprobs"] == told
        messages = [{"role": "user", "content": "Hi"}]
        chat = {"messages": messages, "prompt_logprobs": 0, "max_tokens": 1}
        _, _, answer = await cluster.post("/v1/chat/completions", chat)
        first, *rows = answer["prompt_logprobs"]
        assert (first, len(rows) + 1) == (None, answer["usage"]["prompt_tokens"])
        assert {len(row) for row in rows} == {1}
        shown = [next(iter(row.values()))["decoded_token"] for row in rows]
        assert "<|im_end|>" in shown, "control tokens too"
        _, answer = await cluster.ask("chat", chat)
        assert answer["prompt_logprobs"] == [None, *rows]

    async def those_of_each_prompt_stand_in_all_of_its_choices(cluster: Any) -> None:
        asked, keys = [], set()

        async def noted(double: Double, seq: int, arrived: RequestArrived) -> None:
            reply = await double.place(arrived, f"{seq}-0")
            keys.add((arrived.prompt_tokens, reply.root_key))
            asked.append((arrived.prompt_tokens, reply.sampling.prompt_logprobs))
            delivery = double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1], "length")
            await double.deliver(scored(delivery, reply))

        cluster.double.script = noted
        body = {"prompt": [PROMPT, [9]], "n": 2, "prompt_logprobs": 2, "max_tokens": 1}
        _, _, answer = await cluster.post(COMPLETIONS, body)
        assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [told, told, [None], [None]]
        assert sorted(asked) == [(1, -1), (1, 2), (len(ids), -1), (len(ids), 2)], "computed once"
        assert len(keys) == 2, "and found by the prompt's other choices"
        cluster.double.script = whole_answer

    async def no_answer_finds_what_others_computed(cluster: Any) -> None:
        cluster.double.events.clear()
        body = {"prompt": [7] * 40, "max_tokens": 1}
        for fields in ({}, {}, {"prompt_logprobs": 0}, {"prompt_logprobs": 0}):
            await cluster.post(COMPLETIONS, {**body, **fields})
        keys = [each.block_keys for each in cluster.double.events if isinstance(each, RequestArrived)]
        assert len({len(each) for each in keys}) == 1
        assert (keys[0] == keys[1], len(set(keys))) == (True, 3)

    async def another_try_after_the_first_token_is_not_asked(cluster: Any) -> None:
        asked = []

        async def twice(double: Double, seq: int, arrived: RequestArrived) -> None:
            first = await double.place(arrived, f"{seq}-0")
            asked.append(first.sampling.prompt_logprobs)
            delivery = double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1])
            await double.deliver(scored(delivery, first))
            opened = cluster.frontend.registry.requests[arrived.request_id]
            await eventually(lambda: opened.output_ids, "the first token is there")
            again = await double.place(arrived, f"{seq + 10**6}-0")
            asked.append(again.sampling.prompt_logprobs)
            assert unpack_tokens(again.output_ids) == double.answer_ids[:1]
            last = double.delivery(arrived, f"{seq + 10**6}-0", 1, double.answer_ids[1:2], "length")
            await double.deliver(last)

        cluster.double.script = twice
        _, _, answer = await cluster.post(
            COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 2}
        )
        assert asked == [2, -1]
        assert answer["choices"][0]["prompt_logprobs"] == told
        cluster.double.script = whole_answer

    async def scenario(cluster: Any) -> None:
        for part in (
            whole,
            those_of_each_prompt_stand_in_all_of_its_choices,
            no_answer_finds_what_others_computed,
            another_try_after_the_first_token_is_not_asked,
        ):
            await part(cluster)

    run(scenario)


@pytest.mark.pure
def test_an_echo_has_the_log_probabilities_of_what_it_shows(run: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    names = [tokenizer.decode([token]) for token in ids]
    (five,) = tokenizer.names([5])
    control, token = next(iter(tokenizer.control.items()))

    async def whole_and_streamed(cluster: Any) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2}
        _, _, answer = await cluster.post(COMPLETIONS, body)
        (choice,) = answer["choices"]
        drawn = [tokenizer.decode([each]) for each in cluster.double.answer_ids[:2]]
        logprobs = choice["logprobs"]
        assert choice["text"] == PROMPT + "".join(drawn)
        assert logprobs["tokens"] == [*names, *drawn]
        assert logprobs["token_logprobs"] == [None, *[-9.5] * (len(ids) - 1), -0.5, -0.5]
        assert logprobs["top_logprobs"][:2] == [None, {names[1]: -9.5, five: -1.0}]
        joined = [*names, *drawn]
        assert logprobs["text_offset"] == [len("".join(joined[:place])) for place in range(len(joined))]
        assert [len(each) for each in choice["prompt_logprobs"][1:]] == [2] * (len(ids) - 1)
        for n in (1, 2):
            events = await cluster.sse(COMPLETIONS, {**body, "n": n, "stream": True})
            for index in range(n):
                own = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
                assert "".join(each["text"] for each in own) == choice["text"]
                assert own[0]["text"] == PROMPT + drawn[0]
                for name, entries in logprobs.items():
                    assert [entry for each in own for entry in each["logprobs"][name]] == entries

    async def control_tokens_take_place_where_they_are_shown(cluster: Any) -> None:
        for prompt, skips, text, offset in (
            (f"{control}One", True, f"{control}One", len(control)),
            ([token, *tokenizer.encode("One")], False, f"{control}One", len(control)),
            ([token, *tokenizer.encode("One")], True, "One", 0),
        ):
            body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
            _, _, answer = await cluster.post(COMPLETIONS, {**body, "skip_special_tokens": skips})
            (choice,) = answer["choices"]
            assert choice["text"].startswith(text)
            assert choice["logprobs"]["tokens"][:2] == [control, "One"]
            assert choice["logprobs"]["text_offset"] == [0, offset, len(text)]

    async def scenario(cluster: Any) -> None:
        for part in (whole_and_streamed, control_tokens_take_place_where_they_are_shown):
            await part(cluster)

    run(scenario)


@pytest.mark.pure
def test_a_prompt_is_echoed_alone(run: Any, tokenizer: Tokenizer) -> None:
    """As lm-eval-harness asks for the scores of a text."""
    ids = tokenizer.encode(PROMPT)
    names = [tokenizer.decode([token]) for token in ids]
    body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "max_tokens": 0}

    async def nothing_drawn_is_shown(cluster: Any) -> None:
        cluster.double.events.clear()
        _, _, answer = await cluster.post(COMPLETIONS, {**body, "min_tokens": 1, "return_token_ids": True})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (PROMPT, None, "length")
        assert choice["token_ids"] == cluster.double.answer_ids[:1], "as in vLLM: one is drawn and counts"
        assert answer["usage"]["completion_tokens"] == 1
        arrived = [each for each in cluster.double.events if isinstance(each, RequestArrived)]
        assert [each.max_tokens for each in arrived] == [1]
        event, _ = await cluster.sse(COMPLETIONS, {**body, "stream": True})
        assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == (PROMPT, "length")

    async def nor_how_likely_it_was(cluster: Any) -> None:
        asked = {**body, "logprobs": 1}
        _, _, longer = await cluster.post(COMPLETIONS, {**asked, "max_tokens": 1})
        _, _, answer = await cluster.post(COMPLETIONS, asked)
        (choice,) = answer["choices"]
        assert choice["logprobs"]["tokens"] == names
        assert choice["logprobs"]["token_logprobs"] == [None, *[-9.5] * (len(ids) - 1)]
        whole = longer["choices"][0]
        assert {name: each[:-1] for name, each in whole["logprobs"].items()} == choice["logprobs"]
        assert choice["prompt_logprobs"] == whole["prompt_logprobs"]
        event, _ = await cluster.sse(COMPLETIONS, {**asked, "stream": True})
        assert event["choices"][0]["text"] == PROMPT
        assert event["choices"][0]["logprobs"] == choice["logprobs"]

    async def of_each_prompt(cluster: Any) -> None:
        _, _, answer = await cluster.post(COMPLETIONS, {**body, "prompt": [PROMPT, "One"], "logprobs": 0})
        told = [(choice["text"], len(choice["logprobs"]["tokens"])) for choice in answer["choices"]]
        assert told == [(PROMPT, len(ids)), ("One", len(tokenizer.encode("One")))]

    async def only_where_something_is_shown(cluster: Any) -> None:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0, "echo": True}
        for path, asked, param in (
            (COMPLETIONS, {**body, "echo": False}, "max_tokens"),
            (COMPLETIONS, {**body, "min_tokens": 2}, "min_tokens"),
            ("/v1/chat/completions", chat, "max_tokens"),
            ("/v1/chat/completions", {**chat, "max_completion_tokens": 5}, "max_tokens"),
        ):
            status, _, answer = await cluster.post(path, asked)
            assert (status, answer["error"]["param"]) == (400, param)
        status, answer = await cluster.ask("generate", {"prompt": PROMPT, "max_tokens": 0})
        assert answer["error"]["param"] == "max_tokens"

    async def scenario(cluster: Any) -> None:
        for part in (
            nothing_drawn_is_shown,
            nor_how_likely_it_was,
            of_each_prompt,
            only_where_something_is_shown,
        ):
            await part(cluster)

    run(scenario)


@pytest.mark.pure
def test_what_cannot_be_told_is_refused_by_name(run: Any, tokenizer: Tokenizer) -> None:
    async def scenario(cluster: Any) -> None:
        long = {"prompt": [5] * 4000, "max_tokens": 1}
        for fields, param, code in (
            ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid"),
            ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid"),
            ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "contradiction"),
            ({**long, "prompt_logprobs": 20}, "prompt_logprobs", "too_long"),
            ({**long, "echo": True, "logprobs": 20}, "echo", "too_long"),
        ):
            status, _, answer = await cluster.post(COMPLETIONS, {"prompt": PROMPT, **fields})
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
            if code == "too_long":
                assert "up to 3804 tokens" in answer["error"]["message"]

        async def of_another_release(double: Double, seq: int, arrived: RequestArrived) -> None:
            await double.place(arrived, f"{seq}-0")
            await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1], "length"))

        cluster.double.script = of_another_release
        for asked in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 1, "stream": True}):
            status, _, answer = await cluster.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, **asked})
            assert (status, answer["error"]["code"]) == (500, "failed")
            assert "how likely the prompt's tokens are" in answer["error"]["message"]
        assert not cluster.frontend.registry.requests

    run(scenario, context_tokens=8192)
