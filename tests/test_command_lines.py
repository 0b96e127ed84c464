"""Options and words in every order, and errors that name them."""

from __future__ import annotations

import argparse
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from halfmoon.cli.commands import COMMANDS, module_of, parser_of
from halfmoon.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_NATS,
    OptionInvalid,
    bus_config,
    parse,
    state_directory,
)
from halfmoon.cli.run_file import LOCK, RunFile

#: What each command takes without a name, and its options with their values, of which any may stand anywhere.
WORDS: dict[str, tuple[list[str], list[list[str]]]] = {
    "generate": (["a text"], [["--max-tokens", "4"], ["--json"], ["--stop", "x"], ["--cluster", "c"]]),
    "chat": (["hello"], [["--system", "s"], ["--nats", "nats://a:1"]]),
    "events": (["save", "file"], [["--nats", "nats://a:1"], ["--cluster", "c"]]),
    "replay": (["file"], [["--until", "5"], ["--json"]]),
    "policy": (["set", "name=random", "seed=7"], [["--cluster", "c"], ["--json"]]),
    "drain": (["node-1"], [["--cluster", "c"]]),
    "reset-prefix-cache": (["vllm-0"], [["--cluster", "c"]]),
    "role": (["prefill-1", "decode"], [["--nats", "nats://a:1"]]),
    "audit": (["node-1"], [["--sample", "4"], ["--kv-events-replay", "tcp://a:1"]]),
    "secrets": (["directory"], [["--tenants", "acme"]]),
    "adapt": (["vllm"], [["--url", "http://a:1"], ["--id", "vllm-0"], ["--events", "tcp://a:2"]]),
    "experiments": (["hits", "reuse"], [["--out", "directory"]]),
}


def parsed(argv: list[str]) -> Any:
    top = argparse.ArgumentParser(prog="halfmoon")
    subparsers = top.add_subparsers(dest="command", required=True)
    parsers = {each.name: subparsers.add_parser(each.name) for each in COMMANDS}
    return parse(top, parsers, argv, lambda name: module_of(name).add(parsers[name]))


@pytest.mark.parametrize("command", [each.name for each in COMMANDS])
def test_options_may_stand_anywhere(command: str) -> None:
    positional = [a for a in parser_of(command)._actions if not a.option_strings]
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


def test_a_wrong_option_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["events", "save", "file", "--nonsense"])
    assert capsys.readouterr().err.startswith("usage: halfmoon events ")


def test_a_cluster_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(OptionInvalid, match="--cluster mine: none of this name runs on this machine"):
        bus_config(parsed(["status", "--cluster", "mine"]))
    assert bus_config(parsed(["status", "--cluster", "mine", "--nats", "nats://h:1"])).url == "nats://h:1"


def test_a_cluster_that_still_starts_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its lock is held, and nobody can be let in yet: the server at the default port may be its own, or another's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = state_directory(DEFAULT_CLUSTER)
    directory.mkdir(parents=True)
    with (directory / LOCK).open("w") as lock:
        assert bus_config(parsed(["status"])).url == DEFAULT_NATS
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OptionInvalid, match="it is still starting"):
            bus_config(parsed(["status"]))
        RunFile(nats="nats://h:2", http="", pid=os.getpid()).write(directory)
        assert bus_config(parsed(["status"])).url == "nats://h:2"
