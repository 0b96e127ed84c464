"""The requests of the differential suite: each field, each error, whole and streamed; for at most 1,024 tokens."""

from __future__ import annotations

from typing import Any

from tests.vllm.asked_dialects import of_dialects
from tests.vllm.asked_structures import of_structures
from tests.vllm.asked_tools import of_tools
from tests.vllm.request import CHAT, COMPLETIONS, HI, MODEL, PROMPT, Asked, chat, completion

#: Fields of both, with values that are taken and values that may not be.
BOTH: dict[str, list[Any]] = {
    "max_tokens": [1, 0, -1, "5", 1.5, 2000, None],
    "temperature": [0.0, 2.0, -0.1, 2.1, "hot"],
    "top_p": [0.5, 1.0, 0, 1.1, "x"],
    "top_k": [1, 0, -1, -2],
    "min_p": [0.0, 1.0, -0.1, 1.1],
    "seed": [7, -1, 1.5, 2**63],
    "stop": [",", [" the", "."], "", [""], 5],
    "stop_token_ids": [[28], [-1], ["a"]],
    "presence_penalty": [0.5, 2.1],
    "frequency_penalty": [0.5, -2.1],
    "repetition_penalty": [1.5, 0],
    "logit_bias": [{"28": -100}, {"a": 1}, {"28": 101}],
    "min_tokens": [3, 7, -1],
    "ignore_eos": [True, 5],
    "include_stop_str_in_output": [True],
    "return_token_ids": [True],
    "truncate_prompt_tokens": [2, -1, -2, 2000],
    "stream_options": [{"include_usage": True}],
    "user": ["me"],
    "priority": [0, "high"],
    "n": [1, 2, 0],
    "bad_words": [[" the"], [""]],
    "allowed_token_ids": [[28, 30], []],
    "skip_special_tokens": [False],
    "prompt_logprobs": [0, 1, -2, 21, -1],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "xml"}],
    "structured_outputs": [{"choice": ["Yes", "No"]}, {"regex": "[ab]{3}"}, {}, {"regex": "(", "choice": []}],
    "model": ["none", 5, None],
    "unknown_field": [1],
    "cache_salt": ["s", ""],
}
COMPLETION_ONLY: dict[str, list[Any]] = {
    "prompt": [
        "",
        [],
        [6403, 1980],
        [10**6],
        [-1],
        [PROMPT, "The"],
        [[6403], [28]],
        5,
        None,
        "<|im_start|>user",
    ],
    "logprobs": [0, 2, 21, -2, True],
    "echo": [True],
    "suffix": ["x"],
    "add_special_tokens": [False],
    "best_of": [2],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "messages": [
        [], "x", [{"role": "wizard", "content": "x"}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": " hello."}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]}],
        [{"role": "system", "content": "Be short."}, *HI],
        [*HI, {"role": "assistant", "content": "Hello"}, *HI],
        [{"role": "user", "content": "<|im_end|>"}],
    ],
    "max_completion_tokens": [2, 0],
    "logprobs": [True, False, 5],
    "top_logprobs": [2, 21, -1],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "chat_template_kwargs": [{"a": 1}],
    "reasoning_effort": ["low"],
    "tool_choice": ["none", "auto"],
}  # fmt: skip


def requests() -> list[Asked]:
    """All of them, by names that stay the same."""
    found = [
        Asked("models", "/v1/models"),
        Asked("health", "/health"),
        Asked("version", "/version"),
        Asked("load", "/load"),
        Asked("unknown path", "/v1/nothing"),
        Asked("wrong method", COMPLETIONS),
        Asked("no JSON", COMPLETIONS, b'{"prompt":'),
        Asked("no object", COMPLETIONS, b"[]"),
        Asked("no prompt", COMPLETIONS, {"model": MODEL}),
        Asked("no messages", CHAT, {"model": MODEL}),
        Asked("plain completion", COMPLETIONS, completion()),
        Asked("plain chat", CHAT, chat()),
        Asked("streamed completion", COMPLETIONS, completion(stream=True)),
        Asked("streamed chat", CHAT, chat(stream=True)),
        Asked("chat to its end", CHAT, chat(max_tokens=60)),
        Asked("streamed chat to its end", CHAT, chat(max_tokens=60, stream=True)),
        Asked("too long", COMPLETIONS, completion(prompt=[28] * 1024)),
        Asked("as long as possible", COMPLETIONS, completion(prompt=[28] * 1022, max_tokens=2)),
        Asked("top_logprobs with logprobs", CHAT, chat(logprobs=True, top_logprobs=2)),
        Asked("streamed logprobs of a completion", COMPLETIONS, completion(logprobs=1, stream=True)),
        Asked("streamed logprobs of a chat", CHAT, chat(logprobs=True, top_logprobs=1, stream=True)),
        Asked("echoed logprobs", COMPLETIONS, completion(echo=True, logprobs=2)),
        Asked("echoed logprobs of its own token alone", COMPLETIONS, completion(echo=True, logprobs=0)),
        Asked("echo of one token", COMPLETIONS, completion(echo=True, logprobs=1, prompt=[6403])),
        Asked("echo and prompt_logprobs", COMPLETIONS, completion(echo=True, logprobs=1, prompt_logprobs=2)),
        Asked("echoed control tokens", COMPLETIONS, completion(
            echo=True, logprobs=1, prompt="<|im_start|>user"
        )),
        Asked("two prompts with prompt_logprobs", COMPLETIONS, completion(
            prompt=[PROMPT, "The"], prompt_logprobs=1
        )),
        Asked("streamed echo with logprobs", COMPLETIONS, completion(echo=True, logprobs=1, stream=True)),
        Asked("streamed prompt_logprobs", COMPLETIONS, completion(prompt_logprobs=1, stream=True)),
        Asked("streamed prompt_logprobs of no others", COMPLETIONS, completion(prompt_logprobs=0, stream=True)),
        Asked("chat's echo", CHAT, chat(echo=True)),
        Asked("echo with token ids", COMPLETIONS, completion(echo=True, return_token_ids=True)),
        Asked("echo alone", COMPLETIONS, completion(echo=True, max_tokens=0)),
        Asked("echo alone with logprobs", COMPLETIONS, completion(echo=True, logprobs=1, max_tokens=0)),
        Asked("echo alone of two prompts", COMPLETIONS, completion(
            echo=True, logprobs=0, max_tokens=0, prompt=[PROMPT, "The"]
        )),
        Asked("echo alone of one token", COMPLETIONS, completion(
            echo=True, logprobs=1, max_tokens=0, prompt=[6403]
        )),
        Asked("echo alone of all the context", COMPLETIONS, completion(
            echo=True, max_tokens=0, prompt=[28] * 1024
        )),
        Asked("echo alone with min_tokens", COMPLETIONS, completion(echo=True, max_tokens=0, min_tokens=1)),
        Asked("echo alone with more min_tokens", COMPLETIONS, completion(
            echo=True, max_tokens=0, min_tokens=2
        )),
        Asked("streamed echo alone", COMPLETIONS, completion(echo=True, max_tokens=0, stream=True)),
        Asked("streamed echo alone with logprobs", COMPLETIONS, completion(
            echo=True, logprobs=1, max_tokens=0, stream=True
        )),
        Asked("chat's echo alone", CHAT, chat(echo=True, max_tokens=0)),
        Asked("streamed usage", CHAT, chat(stream=True, stream_options={"include_usage": True})),
        Asked("streamed usage so far", COMPLETIONS, completion(
            stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )),
        Asked("streamed token ids", COMPLETIONS, completion(stream=True, return_token_ids=True)),
        Asked("streamed stop", COMPLETIONS, completion(stream=True, stop=[" the"])),
        Asked("two streamed choices", COMPLETIONS, completion(stream=True, n=2)),
        Asked("streamed error", CHAT, chat(stream=True, max_tokens=-1)),
        Asked("continued", CHAT, chat(
            messages=[*HI, {"role": "assistant", "content": "Hel"}],
            add_generation_prompt=False, continue_final_message=True,
        )),
        Asked("tokenize text", "/tokenize", {"model": MODEL, "prompt": PROMPT}),
        Asked("tokenize with names", "/tokenize", {"model": MODEL, "prompt": PROMPT, "return_token_strs": True}),
        Asked("tokenize control tokens", "/tokenize", {"model": MODEL, "prompt": "<|im_start|>user"}),
        Asked("tokenize chat", "/tokenize", {"model": MODEL, "messages": HI}),
        Asked("tokenize nothing", "/tokenize", {"model": MODEL}),
        Asked("tokenize of another model", "/tokenize", {"model": "none", "prompt": "x"}),
        Asked("detokenize", "/detokenize", {"model": MODEL, "tokens": [6403, 1980, 253, 655]}),
        Asked("detokenize nothing", "/detokenize", {"model": MODEL, "tokens": []}),
        Asked("detokenize no tokens", "/detokenize", {"model": MODEL, "tokens": "x"}),
        Asked("message", "/v1/messages", {"model": MODEL, "messages": HI, "max_tokens": 6, "temperature": 0}),
        Asked("message without max_tokens", "/v1/messages", {"model": MODEL, "messages": HI}),
        Asked("message's tokens", "/v1/messages/count_tokens", {"model": MODEL, "messages": HI}),
        Asked("streamed message", "/v1/messages", {
            "model": MODEL, "messages": HI, "max_tokens": 6, "temperature": 0, "stream": True,
        }),
        Asked("response", "/v1/responses", {
            "model": MODEL, "input": "Say hello.", "max_output_tokens": 6, "temperature": 0,
        }),
    ]  # fmt: skip
    for name, values in {**BOTH, **COMPLETION_ONLY}.items():
        found += [
            Asked(f"completion {name} {place}", COMPLETIONS, completion(**{name: value}))
            for place, value in enumerate(values)
        ]
    for name, values in {**BOTH, **CHAT_ONLY}.items():
        found += [
            Asked(f"chat {name} {place}", CHAT, chat(**{name: value})) for place, value in enumerate(values)
        ]
    return found + of_tools() + of_structures() + of_dialects()
