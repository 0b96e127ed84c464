"""Bodies of the API, read as both edges read them: each is taken or refused with a status, and a field where one is to
blame.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from halfmoon.schemas.api.bodies import CancelBody, TokenizeBody
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import decode_body, parse_chat, parse_completion
from tests.api_fields import FIELDS
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import json_bytes, mutated_json

TEST_INPUTS = 3000
INPUTS_MEANT = 1_500_000
_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]


def valid_body(draw: random.Random) -> dict[str, Any]:
    """A request that would be taken, with fields of every kind."""
    kind = draw.randrange(4)
    body: dict[str, Any] = {}
    if kind == 0:
        return {"id": "abc"} if draw.random() < 0.5 else {"prompt": "x"}
    if kind == 1:
        body["messages"] = _MESSAGES
    else:
        body["prompt"] = draw.choice(["Once upon a time", [1, 2, 3], ["x"], [[1, 2]], "naïve 半月"])
    for name in draw.sample(sorted(FIELDS), draw.randint(0, 6)):
        refused, taken = FIELDS[name]
        body[name] = draw.choice(taken if draw.random() < 0.9 or not refused else refused)
    return body


def make(draw: random.Random) -> bytes:
    body: Any = valid_body(draw)
    if draw.random() < 0.9:
        body = mutated_json(draw, body)
    return json_bytes(draw, body)


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    def play(content: bytes) -> str:
        outcomes = []
        readers = (
            parse_completion,
            parse_chat,
            lambda body: decode_body(body, TokenizeBody),
            lambda body: decode_body(body, CancelBody),
        )
        for read in readers:
            try:
                read(content)
                outcomes.append("taken")
            except ApiError as error:
                error.body()
                if error.status not in (400, 422):
                    raise Found(f"refused with {error.status}: {error}") from None
                outcomes.append(str(error.status))
        return " ".join(sorted(set(outcomes)))

    yield play
