"""KV events of a real cluster, read by vllm-router: its `kv_aware` policy finds prompts that were served before.

HALFMOON_VLLM_ROUTER names the program (`pip install vllm-router` in an environment of its own); without it this skips.
"""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_router import Source, post, router
from halfmoon.bus.embedded import free_port
from tests.cluster.harness import PATIENT, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = "smollm2-135m-instruct"


def counted(metrics: str, result: str) -> int:
    """The router's lookups with that result."""
    with urllib.request.urlopen(metrics, timeout=5) as answer:
        name = f'vllm_router_kv_placement_lookups_total{{result="{result}"}} '
        found = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
        return int(found[0].removeprefix(name)) if found else 0


def test_a_router_finds_what_was_served_before_it_came_and_since(tmp_path: Path) -> None:
    if not (program := os.environ.get("HALFMOON_VLLM_ROUTER")):
        pytest.skip("HALFMOON_VLLM_ROUTER names no vllm-router")
    ports = [free_port() for _ in range(2)]
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    flags = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-tokens")
    old, new, chat = (f"{word} lies the town of {word}. " * 90 for word in ("Here", "There", "Where"))

    def prompt(text: str) -> dict[str, Any]:
        return {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}

    messages = {"model": MODEL, "messages": [{"role": "user", "content": chat}], "max_tokens": 1}
    with running(tmp_path, "--prefill", "1", "--decode", "1", *PATIENT, *flags) as cluster:
        post(f"{cluster.http}/v1/completions", prompt(old))
        source = Source(cluster.http, events, replay)
        with router(program, [source], "kv_aware", MODEL) as (url, metrics):
            post(f"{url}/v1/completions", prompt(new))
            time.sleep(0.5)
            # The first batch that it heard showed a gap: what was before was asked for again.
            post(f"{url}/v1/completions", prompt(old))
            assert (counted(metrics, "hit"), counted(metrics, "miss")) == (1, 1)
            post(f"{url}/v1/completions", prompt(new))
            post(f"{url}/v1/chat/completions", messages)
            time.sleep(0.5)
            post(f"{url}/v1/chat/completions", messages)
            assert (counted(metrics, "hit"), counted(metrics, "miss")) == (3, 2)
