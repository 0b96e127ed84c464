"""Turns of a chat, for dialects in which the answer may go on with a turn of the assistant."""

from __future__ import annotations

from halfmoon.schemas.api.bodies import ChatMessage


def is_begun(messages: list[ChatMessage]) -> bool:
    """The last turn is a text of the assistant that an answer can go on with."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls:
        return False
    return isinstance(last.content, str) and bool(last.content.strip())
