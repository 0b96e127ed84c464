"""`/openapi.json`: what the HTTP edge takes, from the classes of its bodies."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import orjson

from halfmoon.bus.telemetry.version import VERSION
from halfmoon.schemas.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from halfmoon.schemas.api.messages import CountTokensBody, MessagesBody
from halfmoon.schemas.api.responses import ResponsesBody

#: Bodies by path, and whether the answer may be a stream.
BODIES: dict[str, tuple[type[msgspec.Struct], bool]] = {
    "/v1/chat/completions": (ChatBody, True),
    "/v1/completions": (CompletionBody, True),
    "/v1/messages": (MessagesBody, True),
    "/v1/messages/count_tokens": (CountTokensBody, False),
    "/v1/responses": (ResponsesBody, True),
    "/tokenize": (TokenizeBody, False),
    "/detokenize": (DetokenizeBody, False),
}
#: What is asked for without a body.
LOOKS = (
    "/v1/models", "/health", "/ping", "/ready", "/metrics", "/version", "/status", "/load", "/server_info",
    "/openapi.json",
)  # fmt: skip
_JSON = "application/json"


@functools.lru_cache(maxsize=1)
def document() -> bytes:
    """OpenAPI 3.1, as JSON."""
    kinds = [kind for kind, _ in BODIES.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    error = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    }
    refused = {
        "description": "Refused",
        "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    paths: dict[str, Any] = {}
    for (path, (_, streams)), schema in zip(BODIES.items(), schemas, strict=True):
        content: dict[str, Any] = {_JSON: {}, **({"text/event-stream": {}} if streams else {})}
        answers = {"200": {"description": "OK", "content": content}, "4XX": refused, "5XX": refused}
        asked = {"required": True, "content": {_JSON: {"schema": schema}}}
        paths[path] = {"post": {"requestBody": asked, "responses": answers}}
    for path in LOOKS:
        paths[path] = {"get": {"responses": {"200": {"description": "OK"}, "4XX": refused}}}
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "halfmoon", "version": VERSION},
            "paths": paths,
            "components": {"schemas": {**components, "Error": error}},
        }
    )
