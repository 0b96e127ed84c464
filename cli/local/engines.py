"""Engines of another's that `halfmoon up` has adapters for."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from halfmoon.schemas.roles import WorkerRole


class AdaptedEngine(NamedTuple):
    """`name` is its worker's, and its node's. `kind`: of `ENGINE_TITLES`."""

    name: str
    kind: str
    role: WorkerRole
    url: str


def adapted_engines(args: argparse.Namespace) -> list[AdaptedEngine]:
    """vLLMs are vllm-0 and on, those that do both before prefill and decode; SGLangs are sglang-0 and on."""
    options: list[tuple[WorkerRole, list[str]]] = [
        ("mixed", args.adapt_vllm),
        ("prefill", args.adapt_vllm_prefill),
        ("decode", args.adapt_vllm_decode),
    ]
    urls = [(role, url) for role, each in options for url in each]
    vllms = [AdaptedEngine(f"vllm-{number}", "vllm", *each) for number, each in enumerate(urls)]
    return vllms + [
        AdaptedEngine(f"sglang-{number}", "sglang", "mixed", url)
        for number, url in enumerate(args.adapt_sglang)
    ]
