"""An AsyncAPI 3.0 document of every subject and message, made from the classes themselves.

`python -m halfmoon.schemas.contract.asyncapi docs/asyncapi.json` writes it. Its table of subjects is in
`halfmoon.schemas.contract.channels`. Schemas are JSON Schema draft 07, which AsyncAPI readers understand.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import orjson

import halfmoon.schemas
from halfmoon.schemas import decisions, subjects
from halfmoon.schemas.contract.channels import CHANNELS, WITHOUT_CHANNEL, Channel
from halfmoon.schemas.types import ID_PATTERN, Message

Node = dict[str, Any]


def message_classes() -> list[type]:
    """Every message that a module of `halfmoon.schemas` defines: Message classes, and the bodies of the client API."""
    found: list[type] = []
    for module_found in pkgutil.walk_packages(halfmoon.schemas.__path__, "halfmoon.schemas."):
        if module_found.name == "halfmoon.schemas.contract.asyncapi":
            continue
        module = importlib.import_module(module_found.name)
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_"):
                is_body = issubclass(kind, msgspec.Struct) and name.endswith("Body")
                if is_body or (issubclass(kind, Message) and kind is not Message):
                    found.append(kind)
    return found


def without_channel() -> list[str]:
    """Names of messages that are in no channel, and should be."""
    covered = {kind for channel in CHANNELS for kind in channel.messages + channel.replies}
    return sorted(
        kind.__name__ for kind in message_classes() if kind not in covered and kind not in WITHOUT_CHANNEL
    )


def document() -> Node:
    """The whole document, equal for equal classes."""
    kinds = list(dict.fromkeys(kind for channel in CHANNELS for kind in channel.messages + channel.replies))
    _, schemas = msgspec.json.schema_components(
        [*kinds, decisions.Ordered], ref_template="#/components/schemas/{name}"
    )
    channels: Node = {}
    operations: Node = {}
    for channel in CHANNELS:
        channels |= _channels(channel)
        operations[channel.name] = _operation(channel)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "halfmoon",
            "version": subjects.API.rpartition(".")[2],
            "description": f"Subjects and messages of halfmoon on NATS. Clients need `{subjects.API}.>` only; the rest "
            "is what halfmoon's processes say to each other.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"nats": {"host": "localhost:4222", "protocol": "nats"}},
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {kind.__name__: _message(kind) for kind in kinds},
            "schemas": {name: _draft_07(schemas[name]) for name in sorted(schemas)},
        },
    }


def _channels(channel: Channel) -> Node:
    """The channel, and the one of its replies, whose address only the request knows."""
    parameters = {
        name: {"enum": sorted(kind.__name__ for kind in channel.messages)}
        if name == "type"
        else {"description": f"Matches `{ID_PATTERN}`."}
        for name in re.findall(r"\{(\w+)\}", channel.address)
    }
    found: Node = {
        channel.name: {
            "address": channel.address,
            "description": channel.summary,
            "messages": _references(channel.messages),
            **({"parameters": parameters} if parameters else {}),
        }
    }
    if channel.replies or channel.answered:
        found[f"{channel.name}Reply"] = {
            "address": None,
            "description": channel.answered or f"Answers to `{channel.address}`, on the request's inbox.",
            "messages": _references(channel.replies),
        }
    return found


def _operation(channel: Channel) -> Node:
    operation: Node = {
        "action": channel.action,
        "channel": {"$ref": f"#/channels/{channel.name}"},
        "summary": channel.summary,
        "messages": [
            {"$ref": f"#/channels/{channel.name}/messages/{kind.__name__}"} for kind in channel.messages
        ],
    }
    if channel.replies or channel.answered:
        operation["reply"] = {
            "channel": {"$ref": f"#/channels/{channel.name}Reply"},
            "messages": [
                {"$ref": f"#/channels/{channel.name}Reply/messages/{kind.__name__}"}
                for kind in channel.replies
            ],
        }
    return operation


def _references(kinds: tuple[type, ...]) -> Node:
    return {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in kinds}


def _message(kind: type) -> Node:
    text = inspect.cleandoc(kind.__doc__ or "")
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    payload: Node = reference
    if kind in decisions.DECISION_TYPES:
        envelope = {"$ref": f"#/components/schemas/{decisions.Ordered.__name__}"}
        payload = {"allOf": [envelope, {"type": "object", "properties": {"decision": reference}}]}
    return {"name": kind.__name__, "title": kind.__name__, "description": text, "payload": payload}


def _draft_07(schema: Any) -> Any:
    """Draft 2020-12, as msgspec writes it, in the words of draft 07 and of AsyncAPI; docstrings without indentation."""
    if isinstance(schema, list):
        return [_draft_07(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _draft_07(inner) for key, inner in schema.items()}
    if isinstance(schema.get("description"), str):
        plain["description"] = inspect.cleandoc(schema["description"])
    if "prefixItems" in schema:
        plain["items"] = plain.pop("prefixItems")
        plain["additionalItems"] = False
    if isinstance(schema.get("discriminator"), dict):
        plain["discriminator"] = schema["discriminator"]["propertyName"]
    return plain


def written() -> bytes:
    """The document as the file holds it."""
    return orjson.dumps(document(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def main(arguments: list[str]) -> int:
    """Write the document to the one path given."""
    if len(arguments) != 1:
        print("usage: python -m halfmoon.schemas.contract.asyncapi FILE", file=sys.stderr)
        return 2
    if forgotten := without_channel():
        print(f"in no channel of schemas/contract/channels.py: {', '.join(forgotten)}", file=sys.stderr)
        return 1
    Path(arguments[0]).write_bytes(written())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
