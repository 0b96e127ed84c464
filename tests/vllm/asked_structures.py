"""Requests with structures, some that nothing satisfies, and with tokens that are a part of a character."""

from __future__ import annotations

from typing import Any

from tests.vllm.request import CHAT, COMPLETIONS, PROMPT, Asked, chat, completion

COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "many": {"type": "boolean"}},
    "required": ["color", "many"],
    "additionalProperties": False,
}
LARK = 'start: "yes" | "no"'
GBNF = 'root ::= "yes" | "no"'


def _format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}
    }


#: Each in a completion and in a chat, whole; those of STREAMED also streamed.
STRUCTURES: dict[str, dict[str, Any]] = {
    "json_schema": _format(COLOR),
    "json_schema, strict": _format(COLOR, strict=True),
    "json_object": {"response_format": {"type": "json_object"}},
    "json": {"structured_outputs": {"json": COLOR}},
    "json as text": {"structured_outputs": {"json": '{"type": "boolean"}'}},
    "json_object of structured_outputs": {"structured_outputs": {"json_object": True}},
    "regex": {"structured_outputs": {"regex": r"[ab]{3}-\d"}},
    "choice": {"structured_outputs": {"choice": ["red wine", "white wine"]}},
    "grammar of Lark": {"structured_outputs": {"grammar": LARK}},
    "grammar of llama.cpp": {"structured_outputs": {"grammar": GBNF}},
    "circle of $ref": _format({"$ref": "#"}),
    "nothing, by false": _format(False),
    "nothing, by an empty enum": _format({"enum": []}),
    "nothing, by a contradiction": _format({"type": "string", "minLength": 3, "maxLength": 2}),
    "a list of itself": _format({"type": "array", "items": {"$ref": "#"}, "maxItems": 2}),
    "anything": _format(True),
    "a schema that is text": _format("object"),
    "a type that is none": _format({"type": "objekt"}),
    "no schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    "no json_schema": {"response_format": {"type": "json_schema"}},
    "an expression without a match": {"structured_outputs": {"regex": r"[^\s\S]"}},
    "an expression that is none": {"structured_outputs": {"regex": "("}},
    "an empty expression": {"structured_outputs": {"regex": ""}},
    "no choice": {"structured_outputs": {"choice": []}},
    "one empty choice": {"structured_outputs": {"choice": [""]}},
    "a rule without an end": {"structured_outputs": {"grammar": 'start: start "a"'}},
    "a grammar that is none": {"structured_outputs": {"grammar": "start: nothing"}},
    "two at once": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
}
STREAMED = ("json_schema", "regex", "choice", "grammar of Lark", "circle of $ref")

#: "🌓" and two of its three tokens: what comes is likely to be a part of a character too.
MOON_IDS = [10813, 230, 237, 10813, 230]
ENDS = {"allowed_token_ids": [2], "ignore_eos": True, "max_tokens": 2}
MOON = {"structured_outputs": {"choice": ["🌓"]}, "max_tokens": 8}


def of_structures() -> list[Asked]:
    found = []
    for name, fields in STRUCTURES.items():
        for kind, path, made in (("completion", COMPLETIONS, completion), ("chat", CHAT, chat)):
            body = made(**{"max_tokens": 24, **fields})
            found.append(Asked(f"{kind} of {name}", path, body))
            if name in STREAMED:
                found.append(Asked(f"streamed {kind} of {name}", path, {**body, "stream": True}))
    shown = {"skip_special_tokens": False, **ENDS}
    found += [
        Asked("logprobs of parts of a character", COMPLETIONS, completion(prompt=MOON_IDS, logprobs=5)),
        Asked("streamed logprobs of parts of a character", COMPLETIONS, completion(
            prompt=MOON_IDS, logprobs=5, stream=True
        )),
        Asked("logprobs of a moon", COMPLETIONS, completion(**MOON, logprobs=0)),
        Asked("logprobs of a chat's moon", CHAT, chat(**MOON, logprobs=True)),
        Asked("streamed logprobs of a chat's moon", CHAT, chat(**MOON, logprobs=True, stream=True)),
        Asked("logprobs of words", COMPLETIONS, completion(prompt=[PROMPT, "A"], logprobs=3)),
        Asked("control tokens that are shown", COMPLETIONS, completion(**shown, logprobs=0)),
        Asked("control tokens that are not shown", COMPLETIONS, completion(**ENDS, logprobs=0)),
        Asked("a chat's control tokens that are shown", CHAT, chat(**shown, logprobs=True)),
        Asked("a chat's control tokens that are not shown", CHAT, chat(**ENDS, logprobs=True)),
    ]  # fmt: skip
    return found
