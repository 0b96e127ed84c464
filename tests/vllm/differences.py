"""Where our answers are not vLLM's, and why: the rows of docs/vllm-differences.md.

python -m tests.vllm.differences      writes that document
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.vllm.rows_of_answers import OF_ANSWERS
from tests.vllm.rows_of_dialects import OF_DIALECTS
from tests.vllm.rows_of_errors import OF_ERRORS

PAGE = Path(__file__).parents[2] / "docs" / "vllm-differences.md"


INTRODUCTION = """# Where answers differ from vLLM's

The same requests, to vLLM 0.32 and to halfmoon, over the same model in float32: each field, each error, whole and
streamed (`tests/vllm/asked.py`). All that is not listed here is the same, field by field: greedy texts, tokens and log
probabilities (to two digits) too. Fields that are null count as absent. The default tests compare statuses and fields
with vLLM's recorded answers; `make test-vllm` asks a real vLLM and a real cluster, and compares values. This table is
written by `python -m tests.vllm.differences`, and a test holds it.
"""


DIFFERENCES = [*OF_ERRORS, *OF_ANSWERS, *OF_DIALECTS]

#: Fields that are there or not by what was drawn: compared where both draw.
OF_TEXT = (".stop_reason", ".stop_sequence", ".incomplete_details.reason")


#: Fields whose values are part of the place, and are compared with recorded answers too: no model makes them.
NAMED_VALUES = (".error.code", ".error.type", ".error.param")

#: Texts that come in pieces: whether they are the same and in other pieces is told apart.
IN_PIECES = (".events[].choices[].delta.content", ".events[].choices[].text")

#: Of numbers with two digits: more than one of the last digit, less than two.
STEP = 0.015

#: A call's pieces are not those of its tokens: what is in each of them counts once.
OF_EVERY_CHUNK = (
    ".events[].object",
    ".events[].model",
    ".events[].choices[].index",
    ".events[].choices[].delta.tool_calls[].index",
)


def differences(vllm: dict[str, Any], ours: dict[str, Any], *, values: bool) -> list[str]:
    """Places. `values`: not only which fields there are."""
    if vllm["status"] != ours["status"]:
        return [f"status {vllm['status']} -> {ours['status']}"]
    theirs, mine = list(_leaves(vllm)), list(_leaves(ours))
    their_paths, my_paths = {path for path, _ in theirs}, {path for path, _ in mine}
    found = [_of_one("-", path, theirs) for path in sorted(their_paths - my_paths)]
    found += [_of_one("+", path, mine) for path in sorted(my_paths - their_paths)]
    for path in sorted(their_paths & my_paths):
        one, other = (_told(path, _at(path, leaves)) for leaves in (theirs, mine))
        if _same(one, other):
            continue
        if path.endswith(NAMED_VALUES):
            found.append(f"= {path} {one[0]} -> {other[0]}")
        elif values:
            pieces = path in IN_PIECES and "".join(one) == "".join(other)
            found.append(f"{'~' if pieces else '='} {path}")
    return found if values else [place for place in found if not place.endswith(OF_TEXT)]


def _at(path: str, leaves: list[tuple[str, Any]]) -> list[Any]:
    return [value for where, value in leaves if where == path]


def _told(path: str, values: list[Any]) -> list[Any]:
    """`values` of one path, whatever the pieces in which a stream passes calls on."""
    if path.endswith(".delta.tool_calls[].function.arguments"):
        return ["".join(values)]
    if path in OF_EVERY_CHUNK:
        return [value for place, value in enumerate(values) if not place or value != values[place - 1]]
    return values


def _same(one: list[Any], other: list[Any]) -> bool:
    """Numbers with a fraction have two digits, and what lies between two of them may be told as either."""
    return len(one) == len(other) and all(
        abs(a - b) < STEP if isinstance(a, float) and isinstance(b, float) else a == b
        for a, b in zip(one, other, strict=True)
    )


def _of_one(sign: str, path: str, leaves: list[tuple[str, Any]]) -> str:
    """The place of what one side has alone."""
    return f"{sign} {path} {_at(path, leaves)[0]}" if path.endswith(NAMED_VALUES) else f"{sign} {path}"


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
