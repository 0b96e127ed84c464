"""One request of the differential suite, and the plainest of each kind."""

from __future__ import annotations

from typing import Any, NamedTuple

MODEL = "smollm2"
HI = [{"role": "user", "content": "Say hello."}]
PROMPT = "Once upon a time"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


class Asked(NamedTuple):
    """`body` None: a GET. A body of bytes is sent as it is. `text`: of the double's answer; "": anything."""

    name: str
    path: str
    body: Any = None
    text: str = ""


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "max_tokens": 6, "temperature": 0, **fields}


def message(**fields: Any) -> dict[str, Any]:
    """Of `/v1/messages`."""
    return {"model": MODEL, "messages": HI, "max_tokens": 6, "temperature": 0, **fields}


def response(**fields: Any) -> dict[str, Any]:
    """Of `/v1/responses`."""
    return {"model": MODEL, "input": "Say hello.", "max_output_tokens": 6, "temperature": 0, **fields}
