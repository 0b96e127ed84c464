"""Where our answers are not vLLM's, and why: the rows of docs/vllm-differences.md.

python -m tests.vllm.differences      writes that document
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "vllm-differences.md"


INTRODUCTION = """# Where answers differ from vLLM's

The same requests, to vLLM 0.32 and to halfmoon, over the same model in float32: each field, each error, whole and
streamed (`tests/vllm/asked.py`). All that is not listed here is the same, field by field: greedy texts, tokens and log
probabilities (to two digits) too. Fields that are null count as absent. The default tests compare statuses and fields
with vLLM's recorded answers; `make test-vllm` asks a real vLLM and a real cluster, and compares values. This table is
written by `python -m tests.vllm.differences`, and a test holds it.
"""


class Difference(NamedTuple):
    """`requests` and `places` are regular expressions of whole names.

    A place is `status`, `- path` of what only vLLM has, `+ path` of what only we have, `= path` of another value.
    """

    what: str
    vllm: str
    ours: str
    why: str
    requests: str
    places: str


DIFFERENCES = [
    Difference(
        "measures",
        "none",
        "`timing_ms`, `prefill_worker`, `decode_worker`",
        "who serves in two pools wants to see where the time went; clients ignore what they do not know",
        ".*",
        r"\+ \.(body|events\[\])(\.choices\[\])?\.(timing_ms\..*|prefill_worker|decode_worker)",
    ),
    Difference(
        "cached tokens",
        "`prompt_tokens_details` only with an option",
        "always there",
        "reuse is what this cluster is for",
        ".*",
        r"\+ .*(prompt_tokens_details\.cached_tokens|cache_read_input_tokens)",
    ),
    Difference(
        "an error's `code`, `type` and words",
        "the status, as a number; `BadRequestError`",
        "a word, as OpenAI has it",
        "OpenAI's clients show `code` as text, and programs can tell refusals apart",
        ".*",
        r"= \.body\.error\.(code|type|message|param)",
    ),
    Difference(
        "`error.param`",
        "null for many refusals; `body.10` for broken JSON",
        "the field's name, where there is one",
        "a refusal says what it is about",
        ".*",
        r"[+-] \.body\.error\.param",
    ),
    Difference(
        "no such path or method",
        '`{"detail"}`',
        '`{"error"}`, as for all refusals',
        "one form for clients to read",
        "unknown path|wrong method",
        r"[+-] \.body\.(detail|error\..*)",
    ),
    Difference(
        "`/health`",
        "empty",
        '`{"status": "ok"}`',
        "its status counts; the body is for people",
        "health",
        r"[+-] \.body(\.status)?",
    ),
    Difference(
        "`/v1/models`",
        "no `vocab_size`",
        "`vocab_size`",
        "who sends token ids must know the range",
        "models",
        r"\+ .*vocab_size",
    ),
    Difference(
        "numbers as text",
        '`"max_tokens": "5"` is 5',
        "400",
        "a wrong type is a client's mistake, and the field is named",
        "(chat|completion) max_tokens 3",
        "status",
    ),
    Difference(
        "`logprobs: 5` in a chat",
        "400",
        "true, with five alternatives",
        "one field for both kinds of request, over NATS too",
        "chat logprobs 2",
        "status",
    ),
    Difference(
        "`top_logprobs` without `logprobs`",
        "400",
        "alternatives are given",
        "what was asked for is clear",
        "chat top_logprobs 0",
        "status",
    ),
    Difference(
        "`stream_options` without `stream`",
        "400",
        "no effect",
        "clients set them once for all requests",
        "(chat|completion) stream_options 0",
        "status",
    ),
    Difference(
        '`cache_salt: ""`',
        "400",
        "as absent",
        "no salt is the empty salt",
        "(chat|completion) cache_salt 1",
        "status",
    ),
    Difference(
        "`logit_bias` beyond ±100",
        "cut to ±100",
        "400",
        "OpenAI's range; nothing is changed in silence",
        "(chat|completion) logit_bias 2",
        "status",
    ),
    Difference(
        "unknown role",
        "given to the template",
        "400",
        "a template makes anything of a role that it does not know",
        "chat messages 2",
        "status",
    ),
    Difference(
        "`prompt_logprobs: 0` of a stream",
        "no effect",
        "400",
        "a stream has no place for them, as for those of 1 and more",
        "streamed prompt_logprobs of no others",
        "status",
    ),
    Difference(
        "`echo` of a chat",
        "`prompt_logprobs`, unasked",
        "only where they are asked for",
        "all of the prompt is computed for them, without any cache",
        "chat's echo",
        r"- \.body\.prompt_logprobs.*",
    ),
    Difference(
        "`best_of`",
        "ignored",
        "400 `unsupported`",
        "what would change an answer is not ignored",
        "completion best_of 0",
        "status",
    ),
    Difference(
        "structured outputs",
        "500, without a message (why was not found; an environment without triton)",
        "served",
        "a fault of that server: there is nothing to compare with",
        "(chat|completion) (response_format 1|structured_outputs [01])",
        "status",
    ),
    Difference(
        "`/v1/responses`",
        "token counts by turn, of tools, of cache writes",
        "OpenAI's own fields",
        "no turns are kept here",
        "response",
        r"[+-] .*|= .*(tool_choice|cached_tokens)",
    ),
    Difference(
        "an item of an answer that was cut",
        "`completed`",
        "`incomplete`",
        "OpenAI's form",
        "response",
        r"= \.body\.output\[\]\.status",
    ),
    Difference(
        "errors of `/v1/messages`",
        '`{"error"}` for what validation refuses',
        '`{"type": "error", "error"}`',
        "Anthropic's form",
        "message without max_tokens",
        r"\+ \.body\.type",
    ),
    Difference(
        "control tokens in a chat's content",
        "read as control tokens",
        "text",
        "a user's text must not end the user's turn",
        "chat messages 9",
        r"= .*",
    ),
    Difference(
        "`add_generation_prompt: false`",
        "`role` is the last message's",
        "`assistant`",
        "what is generated is the assistant's",
        "chat add_generation_prompt 0",
        r"= .*role",
    ),
    Difference(
        "a chunk without text at a stream's end",
        '`"content": ""`',
        "`{}`",
        "load generators count an empty text as a token",
        "streamed .*",
        r"[-=] \.events\[\]\.choices\[\]\.delta\.content",
    ),
    Difference(
        "text that may begin a stop string",
        "an empty chunk, then the text",
        "the text at once, where it cannot",
        "the texts together are the same",
        "streamed stop",
        r"= \.events\[\]\.choices\[\]\.text",
    ),
    Difference(
        "draws",
        "its own generator",
        "ours, the same for a seed on every worker",
        "no two engines draw alike",
        "(chat|completion) temperature 1",
        r"= .*(text|content)",
    ),
    # The recorded requests have no such tokens.
    Difference(
        "`logprobs` of tokens that are a part of a character",
        "`�`, which several alternatives of a completion share: one entry is left",
        "in a completion `bytes:\\xf0\\x9f`; of two tokens with one text one is `token_id:N`",
        "no alternative is lost, and the drawn token's entry is its own",
        "no request",
        r"= .*logprobs.*",
    ),
    Difference(
        "`text_offset`",
        "adds the lengths of the tokens as they are shown",
        "characters of the answer's text",
        "a character of three tokens is one character",
        "no request",
        r"= .*text_offset\[\]",
    ),
    Difference(
        "`bytes` of tokens in a chat's `logprobs`",
        "of the text that is shown: `�`, or a control token's name",
        "what the token adds to the answer's text",
        "joined, they are the text, as OpenAI means them",
        "no request",
        r"= .*bytes\[\]",
    ),
    Difference(
        "a tool call that was cut, streamed",
        "`finish_reason` is `tool_calls`",
        "`length`, as of the whole answer",
        "the part of a call is none to carry out",
        "no request",
        r"= .*finish_reason",
    ),
    Difference("`/version`", "its own", "ours", "another program", "version", r"= \.body\.version"),
]

#: Fields that are there or not by what was drawn: compared where both draw.
OF_TEXT = (".stop_reason",)


def differences(vllm: dict[str, Any], ours: dict[str, Any], *, values: bool) -> list[str]:
    """Places. `values`: not only which fields there are."""
    if vllm["status"] != ours["status"]:
        return ["status"]
    theirs, mine = list(_leaves(vllm)), list(_leaves(ours))
    their_paths, my_paths = {path for path, _ in theirs}, {path for path, _ in mine}
    found = [f"- {path}" for path in sorted(their_paths - my_paths)]
    found += [f"+ {path}" for path in sorted(my_paths - their_paths)]
    if values:
        for path in sorted(their_paths & my_paths):
            one, other = ([value for where, value in leaves if where == path] for leaves in (theirs, mine))
            if one != other:
                found.append(f"= {path}")
        return found
    return [place for place in found if not place.endswith(OF_TEXT)]


def reasons(name: str, places: list[str]) -> tuple[set[int], list[str]]:
    """The rows that say why, and the places for which none does."""
    used: set[int] = set()
    unexplained = []
    for place in places:
        rows = [
            number
            for number, row in enumerate(DIFFERENCES)
            if re.fullmatch(row.requests, name) and re.fullmatch(row.places, place)
        ]
        used |= set(rows)
        if not rows:
            unexplained.append(f"{name}: {place}")
    return used, unexplained


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            plain = name if re.fullmatch(r"[a-z_]+", name) and not path.endswith("top_logprobs[]") else "*"
            yield from _leaves(each, f"{path}.{plain}")
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, f"{path}[]")
        if not value:
            yield f"{path}[]", None
    elif path != ".status":
        yield path, value


def page() -> str:
    """The document."""
    lines = [
        INTRODUCTION,
        "| what | vLLM | halfmoon | why |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {row.what} | {row.vllm} | {row.ours} | {row.why} |" for row in DIFFERENCES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
