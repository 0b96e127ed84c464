"""Asks a server all requests, and keeps of each answer what can be compared: no ids, no times."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from tests.vllm.request import Asked

#: They differ from one run to the next.
VARIES = frozenset((
    "id", "created", "created_at", "completed_at", "system_fingerprint", "root", "permission", "owned_by", "item_id",
    "call_id",
))  # fmt: skip


def ask(base: str, asked: Asked) -> dict[str, Any]:
    """`{"status", "body"}`, or `"events"` of a stream."""
    payload = asked.body if isinstance(asked.body, bytes | None) else json.dumps(asked.body).encode()
    request = urllib.request.Request(
        base + asked.path, data=payload, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            status, kind, raw = answer.status, answer.headers.get("content-type", ""), answer.read()
    except urllib.error.HTTPError as refused:
        status, kind, raw = refused.code, refused.headers.get("content-type", ""), refused.read()
    if kind.startswith("text/event-stream"):
        events = [
            line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")
        ]
        return {
            "status": status,
            "events": [kept(json.loads(each)) if each[0] == "{" else each for each in events],
        }
    try:
        return {"status": status, "body": kept(json.loads(raw))}
    except ValueError:
        return {"status": status, "body": raw.decode()[:200]}


def kept(value: Any) -> Any:
    """Log probabilities to two digits, without what varies and what is null."""
    if isinstance(value, dict):
        return {name: kept(each) for name, each in value.items() if name not in VARIES and each is not None}
    if isinstance(value, list):
        return [kept(each) for each in value]
    return round(value, 2) if isinstance(value, float) else value
