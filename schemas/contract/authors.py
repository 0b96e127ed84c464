"""The author of an event, and of a message of KV progress."""

from __future__ import annotations

from halfmoon.schemas import subjects
from halfmoon.schemas.events import EVENT_TYPES, Event
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.types import Message

#: The field of each event that names its author; "" where any process that may send it may be the author.
_AUTHORS = ("reporter_id", "worker_id", "frontend_id", "conductor_id", "node_id")
_EVENTS = subjects.EVENTS_ALL.removesuffix(">")
_KV_PARTS = subjects.kv("", "", "").count(".") + 1
_AUTHOR_FIELD: dict[type[Message], str] = {
    kind: next((name for name in _AUTHORS if name in kind.__struct_fields__), "") for kind in EVENT_TYPES
}


def names_itself(subject: str, message: Message, field: str) -> bool:
    """Whether `field` of the message is the process that its subject ends with: the one that NATS let publish there."""
    return bool(getattr(message, field) == subject.rpartition(".")[2])


def said_by(subject: str, event: Event) -> bool:
    """Whether the event is of its subject's kind, and of the process that its subject names.

    NATS checks the publisher of a subject, and nothing of the payload: this check keeps one process from speaking for
    another.
    """
    source_id, _, kind = subject.removeprefix(_EVENTS).partition(".")
    if kind != type(event).__name__:
        return False
    field = _AUTHOR_FIELD[type(event)]
    return not field or source_id == subjects.SUPERVISOR or getattr(event, field) == source_id


def kv_author(subject: str, message: KvMessage) -> str:
    """The author of KV progress, as NATS checked it; "" where the message is not of its subject's kind."""
    parts = subject.split(".")
    kind, author_id = parts[-2:] if len(parts) == _KV_PARTS else ("", "")
    return author_id if kind == type(message).__name__ else ""
