"""Every option of `halfmoon up` reaches a process, or is `up`'s own."""

from __future__ import annotations

import argparse
import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from halfmoon.cli import up
from halfmoon.cli.commands import parser_of
from halfmoon.cli.local import cluster
from halfmoon.cli.local.flags import SECRETS, process_flags, secret_environment, worker_flags
from halfmoon.cli.local.forked import ForkServers
from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas.roles import WORKER_ROLES

#: How many processes there are, and where `up` itself listens and reads.
OWN = {
    *WORKER_ROLES,
    "adapt_vllm",
    "adapt_vllm_prefill",
    "adapt_vllm_decode",
    "adapt_sglang",
    "adapt_sglang_prefill",
    "adapt_sglang_decode",
    "conductors",
    "port",
    "metrics_port",
    "nats_port",
    "config",
    "http_port",
    "help",
}
#: They reach a process under another name.
TRANSLATED = {"attention_split": {"attention_segments": True}} | {
    f"{role}_kv_blocks": {"kv_blocks": 7} for role in WORKER_ROLES
}
PROCESSES = ("conductor", "store", "frontend", *WORKER_ROLES)


def options() -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    up.add(parser)
    return parser._actions


def other_value(action: argparse.Action) -> Any:
    """One that is not the default."""
    if action.nargs == 0:
        return True
    if action.choices is not None:
        return next(each for each in reversed(list(action.choices)) if each != action.default)
    if isinstance(action.default, list):
        return ["a=1", "b=2"]
    if action.type in (int, float):
        return (action.default or 0) + 7
    return "-4" if action.dest == "decode_groups" else "tcp://127.0.0.1:7000"


def given(**changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add(parser)
    args = parser.parse_args([])
    for role in WORKER_ROLES:
        setattr(args, role, 2)
    return argparse.Namespace(**{**vars(args), "command": "up", "attention_split": "heads", **changes})


#: One of each: a parser takes longer to be made than to parse.
one_parser_of = functools.cache(parser_of)


def as_started(args: argparse.Namespace, command: str, number: int = 0) -> argparse.Namespace:
    """What a process of this command reads from its flags."""
    own: dict[str, Any] = {"id": "x", "node": "n", "layout_file": "f", "drain_s": 8.0}
    if command in WORKER_ROLES:
        own |= worker_flags(args, command)  # type: ignore[arg-type]
    flags = process_flags(args, command, own, node_number=number)
    return one_parser_of(command).parse_args(flags)


@pytest.mark.parametrize("action", options(), ids=lambda action: action.dest)
def test_an_option_reaches_every_process_that_has_it(action: argparse.Action) -> None:
    name = action.dest
    value = other_value(action)
    args = given(**{name: value})
    if name in OWN:
        return
    if name in SECRETS:
        assert value in secret_environment(args).values()
        assert not any(value in process_flags(args, command, {}) for command in PROCESSES)
        return
    expected = TRANSLATED.get(name, {name: value})
    reached = []
    for command in PROCESSES:
        seen = vars(as_started(args, command))
        if name in ("layout_file", "decode_attention"):
            assert name not in seen or seen[name] in ("f", "remote", value)
        elif name in seen:
            assert seen[name] == value, command
        reached += [command for each in expected if seen.get(each) == expected[each]]
    assert reached or name == "layout_file", f"--{name} is dropped"


def test_values_that_look_like_options_and_repeated_ones_arrive_as_they_are() -> None:
    args = given(decode_groups="-4", quota=["a=1", "b=2"], kv_events_public=True)
    assert as_started(args, "decode").decode_groups == "-4"
    store = as_started(args, "store")
    assert (store.quota, store.kv_events_public) == (["a=1", "b=2"], True)
    assert as_started(given(), "store").quota == []


def test_the_nodes_of_one_machine_listen_at_places_of_their_own() -> None:
    args = given(
        data_port=9_000, channel_port=9_100, kv_events="tcp://*:5557", kv_events_replay="ipc:///run/replay"
    )
    first, third = as_started(args, "store"), as_started(args, "store", 2)
    assert (first.data_port, first.kv_events, first.kv_events_replay) == (
        9_000, "tcp://*:5557", "ipc:///run/replay",
    )  # fmt: skip
    assert (third.data_port, third.kv_events, third.kv_events_replay) == (
        9_002, "tcp://*:5559", "ipc:///run/replay-2",
    )  # fmt: skip
    assert as_started(args, "decode", 3).channel_port == 9_103
    assert as_started(given(), "store", 3).data_port == 0, "any free one, for all"
    with pytest.raises(OptionInvalid, match="--data-port: there is no port 65536 for node 1"):
        as_started(given(data_port=65_535), "store", 1)


async def test_who_has_not_joined_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "START_S_MAX", 0.1)
    started = cluster.LocalCluster(argparse.Namespace(metrics_port=0), tmp_path, ForkServers())
    started.joined = {"prefill-0"}
    watcher = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(
        TimeoutError, match=r"have not joined within 0.1 s: decode-0, frontend-0; see .*/output$"
    ):
        await started._all_joined({"prefill-0", "frontend-0", "decode-0"}, watcher)  # type: ignore[arg-type]
    watcher.cancel()
