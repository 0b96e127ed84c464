"""Engines of another's that `halfmoon up` has adapters for."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas.roles import WorkerRole
from halfmoon.workers.adapters.options import ENGINE_TITLES

#: Roles, and how the options of `up` for them end.
_OPTIONS: tuple[tuple[WorkerRole, str], ...] = ("mixed", ""), ("prefill", "_prefill"), ("decode", "_decode")


class AdaptedEngine(NamedTuple):
    """`name` is its worker's, and its node's. `kind`: of `ENGINE_TITLES`."""

    name: str
    kind: str
    role: WorkerRole
    url: str


def adapted_engines(args: argparse.Namespace) -> list[AdaptedEngine]:
    """vLLMs are vllm-0 and on, those that do both before prefill and decode; SGLangs likewise sglang-0 and on."""
    found = []
    for kind in ENGINE_TITLES:
        urls = [(role, url) for role, option in _OPTIONS for url in getattr(args, f"adapt_{kind}{option}")]
        found += [AdaptedEngine(f"{kind}-{number}", kind, *each) for number, each in enumerate(urls)]
    return found


def check_halves(args: argparse.Namespace) -> None:
    """Raises OptionInvalid where one half of a request would have no engine for the other."""
    pairs = []
    for kind in ENGINE_TITLES:
        prefill, decode = (getattr(args, f"adapt_{kind}_{role}") for role in ("prefill", "decode"))
        names = f"--adapt-{kind}-prefill", f"--adapt-{kind}-decode"
        if bool(prefill) != bool(decode):
            raise OptionInvalid(f"{names[0]} and {names[1]}: some of both, or none of either")
        if prefill and args.prefill:
            raise OptionInvalid(
                f"{names[0]}: its KV does not come to decode workers of --decode, nor theirs to an engine"
            )
        if prefill:
            pairs.append(names[0])
    if len(pairs) > 1:
        raise OptionInvalid(f"{' and '.join(pairs)}: engines of one kind do not get the KV of another's")
