"""The AsyncAPI document: complete, well-formed, and the same as the one in docs/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.contract import asyncapi
from halfmoon.schemas.contract.asyncapi import document, message_classes, without_channel, written
from halfmoon.schemas.contract.channels import CHANNELS, WITHOUT_CHANNEL
from halfmoon.schemas.decisions import DECISION_TYPES, SetTimer

CHECKED_IN = Path(__file__).parents[2] / "docs" / "asyncapi.json"
DRAFT_07_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


@pytest.fixture(scope="module")
def doc() -> dict[str, Any]:
    return json.loads(written())


def nodes(value: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a document, with its path."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from nodes(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from nodes(inner, f"{path}/{index}")


def resolve(doc: dict[str, Any], reference: str) -> Any:
    found: Any = doc
    assert reference.startswith("#/"), reference
    for key in reference[2:].split("/"):
        found = found[key]
    return found


def dangling(doc: dict[str, Any]) -> list[str]:
    """References that lead nowhere."""
    found = []
    for path, node in nodes(doc):
        if "$ref" in node:
            try:
                resolve(doc, node["$ref"])
            except KeyError:
                found.append(f"{path}: {node['$ref']}")
    return found


def test_the_document_in_docs_is_the_generated_one() -> None:
    assert CHECKED_IN.read_bytes() == written(), "run `make docs` and look at the difference"


def test_every_message_has_a_channel() -> None:
    assert without_channel() == []


def test_a_message_that_is_in_no_channel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shortened = tuple(channel for channel in CHANNELS if channel.name != "take")
    monkeypatch.setattr(asyncapi, "CHANNELS", shortened)
    assert without_channel() == ["TakeReply", "TakeRequest"]


def test_messages_are_found_in_every_module() -> None:
    names = {kind.__name__ for kind in message_classes()}
    assert {"PrefillFinished", "StartDecode", "KvReady", "TakeReply", "CompletionBody", "SetTimer"} <= names
    assert "Message" not in names
    assert set(WITHOUT_CHANNEL) <= set(message_classes())


def test_every_reference_resolves(doc: dict[str, Any]) -> None:
    assert dangling(doc) == []


def test_a_dangling_reference_is_found(doc: dict[str, Any]) -> None:
    assert dangling({**doc, "x": {"$ref": "#/components/schemas/Nothing"}}) == [
        "#/x: #/components/schemas/Nothing"
    ]


def test_required_members_are_there(doc: dict[str, Any]) -> None:
    """Source: AsyncAPI 3.0.0, its fixed fields."""
    assert doc["asyncapi"] == "3.0.0"
    assert doc["info"]["title"]
    assert doc["info"]["version"]
    assert all(server["host"] and server["protocol"] == "nats" for server in doc["servers"].values())
    for name, channel in doc["channels"].items():
        assert re.fullmatch(r"[A-Za-z]+", name)
        assert channel["address"] is None or channel["address"].startswith("halfmoon.")
        assert set(re.findall(r"\{(\w+)\}", channel["address"] or "")) == set(channel.get("parameters", {}))
    for operation in doc["operations"].values():
        assert operation["action"] in ("send", "receive")
        for part in (operation, operation.get("reply", {})):
            for message in part.get("messages", ()):
                assert message["$ref"].startswith(part["channel"]["$ref"] + "/messages/")
    for name, message in doc["components"]["messages"].items():
        assert message["name"] == name
        assert message["payload"]


def test_every_message_says_what_it_is_for(doc: dict[str, Any]) -> None:
    assert [
        name for name, message in doc["components"]["messages"].items() if not message["description"]
    ] == []


def test_every_channel_but_replies_has_an_operation(doc: dict[str, Any]) -> None:
    assert set(doc["operations"]) == {name for name in doc["channels"] if not name.endswith("Reply")}


def test_a_decision_travels_in_its_envelope(doc: dict[str, Any]) -> None:
    sent = {name for channel in ("decisions", "placements") for name in doc["channels"][channel]["messages"]}
    assert sent == {kind.__name__ for kind in DECISION_TYPES} - {SetTimer.__name__}
    for name in sent:
        envelope, inside = doc["components"]["messages"][name]["payload"]["allOf"]
        assert envelope == {"$ref": "#/components/schemas/Ordered"}
        assert inside["properties"]["decision"] == {"$ref": f"#/components/schemas/{name}"}


def test_schemas_keep_to_draft_07(doc: dict[str, Any]) -> None:
    for path, node in nodes(doc["components"]["schemas"]):
        if path.rpartition("/")[2] == "properties":
            continue
        assert not {"prefixItems", "$defs", "unevaluatedProperties"} & set(node), path
        assert isinstance(node.get("discriminator", ""), str), path
        if isinstance(node.get("type"), str) and not path.endswith("/default"):
            assert node["type"] in DRAFT_07_TYPES, path


def test_the_document_is_the_same_each_time() -> None:
    assert document() == document()


def test_the_command_writes_one_file_and_says_how_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asyncapi.main([str(tmp_path / "out.json")]) == 0
    assert (tmp_path / "out.json").read_bytes() == written()
    assert asyncapi.main([]) == 2
    assert capsys.readouterr().err.startswith("usage:")
