"""Engines of another's that `halfmoon up` has adapters for."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from halfmoon.schemas.roles import WorkerRole


class AdaptedEngine(NamedTuple):
    """`name` is its worker's, and its node's."""

    name: str
    role: WorkerRole
    url: str


def adapted_engines(args: argparse.Namespace) -> list[AdaptedEngine]:
    """In the order of their names, vllm-0 and on: those that do both, then prefill, then decode."""
    options: list[tuple[WorkerRole, list[str]]] = [
        ("mixed", args.adapt_vllm),
        ("prefill", args.adapt_vllm_prefill),
        ("decode", args.adapt_vllm_decode),
    ]
    urls = [(role, url) for role, each in options for url in each]
    return [AdaptedEngine(f"vllm-{number}", role, url) for number, (role, url) in enumerate(urls)]
