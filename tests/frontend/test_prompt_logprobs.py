"""How likely a prompt's own tokens were, in the answers that ask for it, at a real edge."""

from __future__ import annotations

import asyncio
from typing import Any

from frontend_double import Double, scored, whole_answer

from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.workers.model.text.tokenizer import Tokenizer

PROMPT = "Say it now"


def test_a_prompts_own_log_probabilities_are_told(run: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    names = [tokenizer.decode([token]) for token in ids]
    five, six = (tokenizer.control_bytes[token].decode() for token in (5, 6))
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
        _, _, answer = await cluster.post("/v1/completions", body)
        assert answer["choices"][0]["prompt_logprobs"] == told
        _, answer = await cluster.ask("generate", body)
        assert answer["prompt_logprobs"] == told
        messages = [{"role": "user", "content": "Hi"}]
        _, _, answer = await cluster.post(
            "/v1/chat/completions", {"messages": messages, "prompt_logprobs": 0, "max_tokens": 1}
        )
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert [len(each) for each in answer["prompt_logprobs"][1:]] == [1] * (
            len(answer["prompt_logprobs"]) - 1
        )
        names = [next(iter(each.values()))["decoded_token"] for each in answer["prompt_logprobs"][1:]]
        assert "<|im_end|>" in names, "control tokens too"

    async def echoed(cluster: Any) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1}
        _, _, answer = await cluster.post("/v1/completions", body)
        (choice,) = answer["choices"]
        drawn = tokenizer.decode(cluster.double.answer_ids[:1])
        logprobs = choice["logprobs"]
        assert choice["text"] == PROMPT + drawn
        assert logprobs["tokens"] == [*names, drawn]
        assert logprobs["token_logprobs"] == [None, *[-9.5] * (len(ids) - 1), -0.5]
        assert logprobs["top_logprobs"][:2] == [None, {names[1]: -9.5, five: -1.0}]
        assert logprobs["text_offset"] == [len("".join(names[:place])) for place in range(len(names) + 1)]
        assert [len(each) for each in choice["prompt_logprobs"][1:]] == [2] * (len(ids) - 1)
        (event, _) = await cluster.sse("/v1/completions", {**body, "stream": True})
        assert event["choices"][0]["logprobs"] == logprobs
        assert event["choices"][0]["text"] == choice["text"]
        _, _, answer = await cluster.post("/v1/completions", {**body, "max_tokens": 0})
        (alone,) = answer["choices"]
        assert (alone["text"], alone["finish_reason"]) == (PROMPT, "length")
        assert alone["logprobs"]["tokens"] == names
        assert answer["usage"]["completion_tokens"] == 1
        (event, _) = await cluster.sse("/v1/completions", {**body, "max_tokens": 0, "stream": True})
        assert event["choices"][0]["text"] == PROMPT
        assert event["choices"][0]["logprobs"] == alone["logprobs"]

    async def no_try_finds_what_others_computed(cluster: Any) -> None:
        cluster.double.events.clear()
        body = {"prompt": [7] * 40, "max_tokens": 1}
        for fields in ({}, {}, {"prompt_logprobs": 0}, {"prompt_logprobs": 0}):
            await cluster.post("/v1/completions", {**body, **fields})
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
            while not cluster.frontend.registry.requests[arrived.request_id].output_ids:
                await asyncio.sleep(0.01)
            again = await double.place(arrived, f"{seq + 10**6}-0")
            asked.append(again.sampling.prompt_logprobs)
            assert unpack_tokens(again.output_ids) == double.answer_ids[:1]
            last = double.delivery(arrived, f"{seq + 10**6}-0", 1, double.answer_ids[1:2], "length")
            await double.deliver(last)

        cluster.double.script = twice
        _, _, answer = await cluster.post(
            "/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 2}
        )
        assert asked == [2, -1]
        assert answer["choices"][0]["prompt_logprobs"] == told
        cluster.double.script = whole_answer

    async def a_worker_that_does_not_know_of_it_is_told(cluster: Any) -> None:
        async def of_another_release(double: Double, seq: int, arrived: RequestArrived) -> None:
            await double.place(arrived, f"{seq}-0")
            await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1], "length"))

        cluster.double.script = of_another_release
        for fields in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 1, "stream": True}):
            status, _, answer = await cluster.post(
                "/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **fields}
            )
            assert (status, answer["error"]["code"]) == (500, "failed")
            assert "how likely the prompt's tokens are" in answer["error"]["message"]
        cluster.double.script = whole_answer

    async def too_long_a_prompt_is_refused_by_name(cluster: Any) -> None:
        for fields, param in (
            ({"prompt_logprobs": 20}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 20}, "echo"),
        ):
            status, _, answer = await cluster.post(
                "/v1/completions", {"prompt": [5] * 4000, "max_tokens": 1, **fields}
            )
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "too_long")
            assert "up to 3804 tokens" in answer["error"]["message"]

    async def scenario(cluster: Any) -> None:
        for part in (
            whole,
            echoed,
            no_try_finds_what_others_computed,
            another_try_after_the_first_token_is_not_asked,
            a_worker_that_does_not_know_of_it_is_told,
            too_long_a_prompt_is_refused_by_name,
        ):
            await part(cluster)

    run(scenario, context_tokens=8192)
