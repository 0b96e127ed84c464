"""Each field of a process's option structs is a flag, a variable, a TOML key and a row of docs/options.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from msgspec.structs import FieldInfo, fields

from benchmarks import figures
from halfmoon.cli.commands import module_of
from halfmoon.cli.declared import default_of, flag, options_of, type_of
from halfmoon.cli.options import PREFIX, OptionInvalid, parse

#: Words of an option that reads its text itself.
WORDS = {"quota": "a=1"}


def declared(command: str) -> Iterator[tuple[type[msgspec.Struct], FieldInfo]]:
    for kind in module_of(command).OPTIONS:
        for field in fields(kind):
            yield kind, field


def parsed(command: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sub = parser.add_subparsers(dest="command").add_parser(command)
    args: argparse.Namespace = parse(
        parser, {command: sub}, [command, *words], lambda _: module_of(command).add(sub)
    )
    return args


def required(command: str, but: str = "") -> list[str]:
    found = [field.name for _, field in declared(command) if default_of(field) is msgspec.NODEFAULT]
    return [
        *(["vllm"] if command == "adapt" else []),
        *(f"{flag(name)}=x" for name in found if name != but),
    ]


def other_value(field: FieldInfo) -> Any:
    """One that is allowed and not the default."""
    kind, _ = type_of(field)
    default = default_of(field)
    if kind is bool:
        return True
    if get_origin(kind) is tuple:
        return (WORDS.get(field.name, "a"),)
    if kind in (int, float):
        return default + 1
    others = [each for each in get_args(kind) if isinstance(each, str) and each != default]
    if others:
        return others[0]
    return "other" if kind is str else 7


@pytest.mark.parametrize("command", figures.OPTIONS_OF)
def test_a_flag_the_environment_and_toml_say_the_same(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "options.toml"
    toml, environment = {}, {}
    for kind, field in declared(command):
        value = other_value(field)
        text = value[0] if isinstance(value, tuple) else str(value)
        args = parsed(
            command, *required(command, but=field.name), flag(field.name), *([] if value is True else [text])
        )
        assert getattr(options_of(kind, args), field.name) == value != default_of(field), field.name
        environment[f"{PREFIX}{field.name.upper()}"] = text
        written = f"{value}".lower() if isinstance(value, bool | int | float) else f"'{text}'"
        toml[field.name] = f"{field.name.replace('_', '-')} = {written}\n"
    words = ["vllm"] if command == "adapt" else []
    # All at once: a parser takes longer to be made than to read them.
    with monkeypatch.context() as patch:
        for name, text in environment.items():
            patch.setenv(name, text)
        ways = {"environment": parsed(command, *words)}
    for place in ("", f"[{command}]\n"):
        file.write_text(place + "".join(toml.values()))
        ways[f"TOML {place}"] = parsed(command, *words, "--config", str(file))
    for way, args in ways.items():
        for kind, field in declared(command):
            assert getattr(options_of(kind, args), field.name) == other_value(field), (way, field.name)


@pytest.mark.parametrize("command", figures.OPTIONS_OF)
def test_the_defaults_are_the_fields(command: str) -> None:
    args = parsed(command, *required(command))
    for kind, field in declared(command):
        if (default := default_of(field)) is not msgspec.NODEFAULT:
            assert getattr(options_of(kind, args), field.name) == default, field.name


def bad_values(field: FieldInfo) -> list[Any]:
    kind, meta = type_of(field)
    metas = [meta, *(each.__metadata__[0] for each in get_args(kind) if get_origin(each) is Annotated)]
    bad: list[Any] = [] if kind in (bool, str) or get_origin(kind) is tuple else ["no such"]
    for each in metas:
        bad += [each.ge - 1] if each.ge is not None else []
        bad += [each.le + 1] if each.le is not None else []
        bad += [each.gt] if each.gt is not None else []
        bad += [("no such",)] if each.pattern is not None else []
    return bad


@pytest.mark.parametrize("command", figures.OPTIONS_OF)
def test_a_value_that_does_not_fit_is_refused_by_its_flag(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0
    for kind, field in declared(command):
        for bad in bad_values(field):
            text = bad[0] if isinstance(bad, tuple) else str(bad)
            monkeypatch.setenv(f"{PREFIX}{field.name.upper()}", text)
            with pytest.raises(OptionInvalid, match=rf"(^|: ){flag(field.name)}[ :]"):
                options_of(kind, parsed(command, *required(command, but=field.name)))
            monkeypatch.delenv(f"{PREFIX}{field.name.upper()}")
            tried += 1
    assert tried


def test_the_table_has_each_option_once_for_each_meaning() -> None:
    page = (figures.ROOT / "docs/options.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `--") and line.count(" | ") >= 3]
    listed = {row.split("`")[1].split()[0] for row in rows}
    assert len(rows) == len(set(rows))
    hidden = {"--layout-file"}
    assert {
        flag(field.name) for command in figures.OPTIONS_OF for _, field in declared(command)
    } - hidden <= listed
