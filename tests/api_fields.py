"""Every field of the API with values that must be refused, and values that must be taken."""

from __future__ import annotations

from typing import Any

MODEL = "smollm2-135m-instruct"

NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    # field: (refused, taken)
    "max_tokens": ([0, -1, 2**31, 1.5, "5", True, [], {}], [1, 2**31 - 1, None]),
    "temperature": ([-0.1, 2.1, "1", True, [1]], [0, 0.7, 2, None]),
    "top_p": ([0, -1, 1.1, "1", False], [0.1, 1, None]),
    "top_k": ([-2, 2**31, 1.5, "1"], [-1, 0, 40, None]),
    "min_p": ([-0.1, 1.1, "0"], [0, 0.5, 1, None]),
    "seed": ([2**63, -(2**63) - 1, 1.5, "1"], [0, -1, 2**63 - 1, None]),
    "logprobs": ([-1, 21, "5", 1.5, []], [0, 5, 20, True, False, None]),
    "top_logprobs": ([-1, 21, True, "1"], [0, 20, None]),
    "presence_penalty": ([-2.1, 2.1, "0"], [-2, 2, None]),
    "frequency_penalty": ([-2.1, 2.1, "0"], [-2, 2, None]),
    "repetition_penalty": ([0, 10.1, "1"], [0.1, 10, None]),
    "min_tokens": ([-1, 2**31, 0.5], [0, 5, None]),
    "priority": (["high", 0.5, 2**63], [-1000, 0, 10**6, None]),
    "truncate_prompt_tokens": ([-2, 1.5, "5"], [-1, 1, 5, None]),
    "n": ([0, 129, "1"], [1, None]),
    "best_of": ([2], [1, None]),
}
OTHERS: dict[str, tuple[list[Any], list[Any]]] = {
    "model": ([5, "m" * 257, []], [MODEL, None]),
    "stop": (["", [""], ["a"] * 17, "a" * 257, [5], 5, {}], ["a", ["a", "b"], [], None]),
    "stop_token_ids": ([[-1], ["a"], 5, [2**32], [1] * 65], [[1], None]),
    "logit_bias": (
        [{"a": 1}, {"1": 101}, {"1": "x"}, [1], {str(i): 1 for i in range(1025)}],
        [{"5": -100}, None],
    ),
    "ignore_eos": ([1, "true"], [True, False, None]),
    "stream": ([1, "yes"], [False, None]),
    "stream_options": ([5, {"include_usage": 5}], [{"include_usage": True}, {}, None]),
    "user": ([5, "u" * 513], ["me", None]),
    "tenant": ([5, "t" * 129], ["t", None]),
    "cache_salt": ([5, "s" * 257], ["s", None]),
    "kv": (
        [
            *(5, {"similar": 2}, {"retain": 0.5}, {"similar": False, "retain": 0.5}),
            *({"documents": one} for one in (5, "a", [5], [""], [[]], [[-1]], [["a"]], ["a"] * 33)),
        ],
        [{}, {"similar": False}, {"documents": []}, None],
    ),
    "slo": (
        [5, {"ttft_ms": 0}, {"tbt_ms": -1}, {"ttft_ms": "1"}, {"tbt_ms": 1e10}],
        [{"ttft_ms": 1.5}, {}, None],
    ),
    "request_id": (["", "a b", "a" * 81, "a.b", "a\n", 5], ["a-b_C9", None]),
    "logits_digest": ([1], [True, None]),
    "echo": ([0, "yes"], [False, None]),
    "suffix": (["x", 5], ["", None]),
    "functions": ([[{"name": "f"}]], [[], None]),
    "function_call": (["auto"], ["none", None]),
    "structured_outputs": (
        [
            5,
            {},
            {"regex": 5},
            {"regex": "a", "choice": ["a"]},
            {"json_object": False},
            {"structural_tag": "x"},
        ],
        [{"regex": "a"}, {"json_object": True, "whitespace_pattern": " "}, None],
    ),
    "guided_json": ([5, []], [{}, '{"type": "null"}', None]),
    "guided_regex": ([5], ["a", None]),
    "guided_choice": (["a", [5]], [["a"], None]),
    "guided_grammar": ([5], ["start: 'a'", None]),
    "prompt_logprobs": ([-1, 21, "1", True, 1.5], [0, 5, 20, None]),
    "bad_words": (["a", [""], [5], ["a"] * 257], [["a"], [], None]),
    "allowed_token_ids": ([[], [-1], 5, [1] * 4097], [[1], None]),
    "skip_special_tokens": ([1], [True, False, None]),
    "use_beam_search": ([True], [False, None]),
    "length_penalty": ([1.5], [1.0, None]),
    "include_stop_str_in_output": ([1], [True, False, None]),
    "return_token_ids": ([1], [True, False, None]),
    "add_special_tokens": ([1], [True, False, None]),
    "response_format": (
        [
            5,
            {},
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "a"}},
        ],
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
            None,
        ],
    ),
}
FIELDS = {**NUMBERS, **OTHERS}
PROMPTS: list[tuple[Any, int]] = [
    (5, 400),
    (None, 400),
    ({}, 400),
    ([1, "a"], 400),
    ([True], 400),
    ([-1], 400),
    ([2**32], 400),
    ([1.5], 400),
    ([["a"]], 400),
    (["a", 5], 400),
    ([[1], 2], 400),
    (["a"] * 257, 400),
]
CHATS: list[Any] = [
    5,
    [],
    [5],
    [{}],
    [{"role": "wizard", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    [{"role": "user", "content": [{"type": 5}]}],
    [{"role": "user", "content": "x"}] * 4097,
]
NO_JSON: list[bytes] = [
    b"",
    b"{",
    b"nonsense",
    b'{"prompt": "x"',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": NaN}',
    b'{"prompt": "a\x00"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a"} {}',
    b"\xef\xbb\xbf{}",
    b'{"x":' + b"[" * 50_000,
]
