"""Options and words in every order, and errors that name them."""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon.cli.commands import COMMANDS
from halfmoon.cli.options import OptionInvalid, bus_config, parse

#: What each command takes without a name, and its options with their values, of which any may stand anywhere.
WORDS: dict[str, tuple[list[str], list[list[str]]]] = {
    "generate": (["a text"], [["--max-tokens", "4"], ["--json"], ["--stop", "x"], ["--cluster", "c"]]),
    "chat": (["hello"], [["--system", "s"], ["--nats", "nats://a:1"]]),
    "events": (["save", "file"], [["--nats", "nats://a:1"], ["--cluster", "c"]]),
    "replay": (["file"], [["--until", "5"], ["--json"]]),
    "policy": (["set", "name=random", "seed=7"], [["--cluster", "c"], ["--json"]]),
    "adapt": (["vllm"], [["--url", "http://a:1"], ["--id", "vllm-0"], ["--events", "tcp://a:2"]]),
    "drain": (["node-1"], [["--cluster", "c"]]),
    "audit": (["prefill-0"], [["--sample", "5"], ["--kv-events-replay", "tcp://a:1"], ["--json"]]),
    "role": (["prefill-1", "decode"], [["--nats", "nats://a:1"]]),
    "secrets": (["directory"], [["--tenants", "acme"]]),
    "experiments": (["hits", "reuse"], [["--out", "directory"]]),
}


def parsed(argv: list[str]) -> Any:
    top = argparse.ArgumentParser(prog="halfmoon")
    subparsers = top.add_subparsers(dest="command", required=True)
    parsers = {each.name: subparsers.add_parser(each.name) for each in COMMANDS}
    modules = {each.name: each.module for each in COMMANDS}
    return parse(top, parsers, argv, lambda name: importlib.import_module(modules[name]).add(parsers[name]))


@pytest.mark.parametrize("command", [each.name for each in COMMANDS])
def test_options_may_stand_anywhere(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(next(each.module for each in COMMANDS if each.name == command)).add(parser)
    positional = [a for a in parser._actions if not a.option_strings]
    if command == "container" or not positional:
        return  # `container` hands on what stands behind the role
    assert command in WORDS, f"{command} takes {positional[0].dest}: say how in WORDS"
    words, options = WORDS[command]
    expected = vars(parsed([command, *words, *(word for option in options for word in option)]))
    pieces = [[word] for word in words]
    for place in range(len(pieces) + 1):
        for turned in (options, options[::-1]):
            argv = [command]
            for piece in [*pieces[:place], *turned, *pieces[place:]]:
                argv += piece
            assert vars(parsed(argv)) == expected, argv


#: In the texts for people: what follows a prompt, or stands as a block of its own.
SHOWN = re.compile(r"^(?:\$|   ) (halfmoon [a-z](?:.*\\\n)*.*)", re.MULTILINE)
ROOT = Path(__file__).parents[1]
#: Drawn of one command.
ORDERS = 30


def shown_commands() -> list[str]:
    """Each command that README or a document shows, without what a shell does behind it."""
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for text in SHOWN.findall(page.read_text()):
            found[text.replace("\\\n", " ").partition(" | ")[0].partition(" #")[0].strip()] = None
    return list(found)


def pieces_of(parser: argparse.ArgumentParser, words: list[str]) -> list[tuple[str, ...]]:
    """An option with its values is one piece, a word without a name is another."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    pieces: list[tuple[str, ...]] = []
    while words:
        taken = 1
        if (action := options.get(words[0])) is not None and action.nargs != 0:
            values = len(list(itertools.takewhile(lambda word: not word.startswith("--"), words[1:])))
            taken += values if action.nargs in ("+", "*", "?") else int(action.nargs or 1)
        pieces.append(tuple(words[:taken]))
        words = words[taken:]
    return pieces


def orders(pieces: list[tuple[str, ...]], draw: random.Random) -> Iterator[list[str]]:
    """Some orders: words without a name stay in their own."""
    words = [piece for piece in pieces if not piece[0].startswith("-")]
    for _ in range(ORDERS if len(pieces) > 1 else 0):
        turned = draw.sample(pieces, len(pieces))
        unnamed = iter(words)
        yield [word for piece in turned for word in (piece if piece[0].startswith("-") else next(unnamed))]


def test_each_command_that_is_shown_is_understood_in_every_order() -> None:
    """Of README and docs/: an option that is no more, or a name that another option swallows, fails."""
    shown, draw = shown_commands(), random.Random(1)
    assert len(shown) > 40
    parsers: dict[str, argparse.ArgumentParser] = {}
    for line in shown:
        _, command, *words = shlex.split(line)
        if command not in parsers:
            parsers[command] = argparse.ArgumentParser()
            module = next(each.module for each in COMMANDS if each.name == command)
            importlib.import_module(module).add(parsers[command])
        parser = parsers[command]
        expected = vars(parser.parse_intermixed_args(words))
        for order in orders(pieces_of(parser, words), draw):
            assert vars(parser.parse_intermixed_args(order)) == expected, (line, order)


def test_a_wrong_option_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["events", "save", "file", "--nonsense"])
    assert capsys.readouterr().err.startswith("usage: halfmoon events ")


def test_a_cluster_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(OptionInvalid, match="--cluster mine: none of this name runs on this machine"):
        bus_config(parsed(["status", "--cluster", "mine"]))
    assert bus_config(parsed(["status", "--cluster", "mine", "--nats", "nats://h:1"])).url == "nats://h:1"
