"""The flags that `halfmoon up` gives its processes.

An option of `up` reaches every process whose command has that option. So nothing is lost on the way, and a new option
of a process needs no line here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from halfmoon.cli.commands import parser_of
from halfmoon.cli.options import PREFIX, OptionInvalid
from halfmoon.cli.processes.attention import decode_attention
from halfmoon.schemas.roles import ROLES, WorkerRole

DRAIN_S = 8.0
PORT_MAX = 65535
#: Values that are no flags: other users of this machine see the words of a command, but not its environment.
SECRETS = ("nats_user", "nats_password", "nats_token")
#: Flags that `up` decides on for each process, or for itself.
_UNSAID = frozenset((*SECRETS, "config", "metrics", "health_file"))
#: Ports of each node: the first has the option's, each further one the next.
_PORTS = frozenset(("data_port", "channel_port"))
_ADDRESSES = frozenset(("kv_events", "kv_events_replay"))


def process_flags(
    args: argparse.Namespace, command: str, own: Mapping[str, Any], *, node_number: int = 0
) -> list[str]:
    """Flags of one process, by its command's parser: `own` by name, and else `up`'s value of that name, in `args`.

    Defaults are given too, since the process's environment may have other values. Raises OptionInvalid.
    """
    flags: list[str] = []
    for action in parser_of(command)._actions:
        name = action.dest
        if name in own:
            flags += _said(action, own[name])
        elif name not in _UNSAID and hasattr(args, name):
            flags += _said(action, _at_node(name, getattr(args, name), node_number))
    return flags


def _said(action: argparse.Action, value: Any) -> list[str]:
    option = action.option_strings[-1]
    if value is None:
        return []
    if action.nargs == 0:  # a switch
        return [option] if value else []
    values = value if isinstance(value, list) else [value]
    return [
        word
        for each in values
        for word in ([f"{option}={each}"] if f"{each}"[:1] == "-" else [option, f"{each}"])
    ]


def _at_node(name: str, value: Any, number: int) -> Any:
    """Nodes of one machine cannot listen at one place."""
    if not value or not number:
        return value
    if name in _PORTS:
        return _port(name, value, number)
    if name not in _ADDRESSES:
        return value
    scheme, _, place = value.partition("://")
    host, _, port = place.rpartition(":")
    if scheme == "tcp" and port.isdecimal():
        return f"tcp://{host}:{_port(name, int(port), number)}"
    return f"{value}-{number}"


def _port(name: str, first: int, number: int) -> int:
    if first + number > PORT_MAX:
        raise OptionInvalid(
            f"--{name.replace('_', '-')}: there is no port {first + number} for node {number}"
        )
    return first + number


def secret_environment(args: argparse.Namespace) -> dict[str, str]:
    """The environment of every process, beside its flags."""
    return {f"{PREFIX}{name.upper()}": getattr(args, name) for name in SECRETS}


def worker_flags(args: argparse.Namespace, role: WorkerRole) -> dict[str, Any]:
    """Options of a worker that follow from several of `up`'s."""
    holds = "holds" in ROLES[role].duties
    return {
        "kv_blocks": getattr(args, f"{role}_kv_blocks") or args.kv_blocks,
        "decode_attention": decode_attention(args, attention_workers=args.attention),
        "iteration_ms": args.tbt_slo_ms,
        "attention_parts": args.attention if holds and args.attention_split == "heads" else 1,
        "attention_segments": holds and args.attention_split == "sequence",
    }
