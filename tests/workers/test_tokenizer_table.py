"""Text and chats of many families of models are what transformers made of the same directories."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmoon.workers.model.text.tokenizer import ChatTemplateError, Tokenizer
from tests.workers.record_tokenizers import RECORDING
from tests.workers.tokenizer_families import FAMILIES, Family
from tests.workers.tokenizer_table import TEXT, chats, vocabulary_digest, write

_SETTINGS_ALONE = "transformers 5, as ours, reads add_bos_token only where there is no tokenizer.json"
_WRITTEN_TWICE = "the template writes a message twice, and transformers leaves its mark in the first"
#: By family and chat: where ours differs from what was recorded, and why.
FAILING = {
    ("pieces whose first alone has a space before it", "continued"): _WRITTEN_TWICE,
    ("pieces whose first alone has a space before it", "continued a letter"): _WRITTEN_TWICE,
    ("a begin token by the settings alone", "text"): _SETTINGS_ALONE,
    ("no begin token by the settings", "text"): _SETTINGS_ALONE,
}


@functools.cache
def recorded() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(RECORDING.read_text())["families"]
    return told


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: write(name, folder / str(number)) for number, name in enumerate(FAMILIES)}


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[[str], Tokenizer]:
    """The tokenizer of a family, read once."""
    return functools.cache(lambda name: Tokenizer.load(str(folders[name])))


def asked(family: Family) -> list[str]:
    return list(chats(family, recorded=False))


def marked(name: str, chat: str) -> Any:
    reason = FAILING.get((name, chat))
    marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
    return pytest.param(name, chat, marks=marks, id=f"{name}: {chat}")


def made(tokenizer: Tokenizer, family: Family, chat: str) -> list[int]:
    messages, options = chats(family, recorded=False)[chat]
    switches = {name: value for name, value in options.items() if name == "enable_thinking"}
    return tokenizer.encode_chat(
        messages,
        add_generation_prompt=options["add_generation_prompt"],
        continue_final=options.get("continue_final_message", False),
        tools=options.get("tools"),
        switches=switches,
    )


def test_the_table_is_the_one_that_was_recorded(folders: dict[str, Path]) -> None:
    """Else the recorder is to be run again; tokenizers are trained alike everywhere."""
    assert {name: found["vocabulary"] for name, found in recorded().items()} == {
        name: vocabulary_digest(folder) for name, folder in folders.items()
    }
    assert {name: sorted(found) for name, found in recorded().items()} == {
        name: sorted(["vocabulary", "text", *asked(family)]) for name, family in FAMILIES.items()
    }


@pytest.mark.parametrize(("name", "chat"), [marked(name, "text") for name in FAMILIES])
def test_a_text_has_the_token_ids_that_transformers_gives(
    name: str, chat: str, load: Callable[[str], Tokenizer]
) -> None:
    tokenizer = load(name)
    assert tokenizer.encode(TEXT, add_special=True, parse_special=True) == recorded()[name][chat]


@pytest.mark.parametrize(
    ("name", "chat"), [marked(name, chat) for name, family in FAMILIES.items() for chat in asked(family)]
)
def test_a_chat_is_what_transformers_makes_of_it(
    name: str, chat: str, load: Callable[[str], Tokenizer]
) -> None:
    wanted = recorded()[name][chat]
    tokenizer = load(name)
    if "error" in wanted:
        with pytest.raises(ChatTemplateError) as caught:
            made(tokenizer, FAMILIES[name], chat)
        ours = "continue_final_message" if "continue_final_message" in wanted["error"] else wanted["error"]
        assert ours in str(caught.value)
        return
    ids = made(tokenizer, FAMILIES[name], chat)
    by_name = [tokenizer.names(ids), tokenizer.names(wanted["ids"])]
    assert (by_name[0], ids) == (by_name[1], wanted["ids"])
