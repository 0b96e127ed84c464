"""KV events of a real cluster, read by vllm-router: its `kv_aware` policy finds prompts that were served before.

HALFMOON_VLLM_ROUTER names the program (`pip install vllm-router` in an environment of its own); without it this skips.
"""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_router import Source, post, router
from tests.cluster.harness import PATIENT, running
from tests.eventually import eventually_here
from tests.ports import HeldPorts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = "smollm2-135m-instruct"


def counted(metrics: str, result: str) -> int:
    """The router's lookups with that result."""
    with urllib.request.urlopen(metrics, timeout=5) as answer:
        name = f'vllm_router_kv_placement_lookups_total{{result="{result}"}} '
        found = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
        return int(found[0].removeprefix(name)) if found else 0


class Asked:
    """Requests through a router, which looks each up once."""

    def __init__(self, url: str, metrics: str) -> None:
        self._url, self._metrics = url, metrics
        self._count = 0

    def post(self, path: str, body: dict[str, Any]) -> None:
        post(f"{self._url}{path}", body)
        self._count += 1

    def until_found(self, path: str, body: dict[str, Any]) -> None:
        """Asks until it is found: the router hears of blocks in its own time. Asking alone makes no block new."""
        hits = counted(self._metrics, "hit")

        def found() -> bool:
            self.post(path, body)
            return counted(self._metrics, "hit") > hits

        eventually_here(found, "the router knows the blocks", every_s=0.5)

    def hits(self) -> int:
        """All others were misses."""
        hits, misses = (counted(self._metrics, result) for result in ("hit", "miss"))
        assert hits + misses == self._count
        return hits


def test_a_router_finds_what_was_served_before_it_came_and_since(tmp_path: Path) -> None:
    if not (program := os.environ.get("HALFMOON_VLLM_ROUTER")):
        pytest.skip("HALFMOON_VLLM_ROUTER names no vllm-router")
    old, new, chat = (f"{word} lies the town of {word}. " * 90 for word in ("Here", "There", "Where"))

    def prompt(text: str) -> dict[str, Any]:
        return {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}

    messages = {"model": MODEL, "messages": [{"role": "user", "content": chat}], "max_tokens": 1}
    with HeldPorts(count=4) as port:  # the second node has the next one of each
        events, replay = (f"tcp://127.0.0.1:{one}" for one in (port, port + 2))
        flags = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-tokens")
        with running(tmp_path, "--prefill", "1", "--decode", "1", *PATIENT, *flags) as cluster:
            post(f"{cluster.http}/v1/completions", prompt(old))
            source = Source(cluster.http, events, replay)
            with router(program, [source], "kv_aware", MODEL) as running_router:
                asked = Asked(running_router.http, running_router.metrics)
                asked.post("/v1/completions", prompt(new))
                assert asked.hits() == 0
                # The first batch that it heard showed a gap: what was before was asked for again.
                asked.until_found("/v1/completions", prompt(old))
                assert asked.hits() == 1
                asked.post("/v1/completions", prompt(new))
                asked.post("/v1/chat/completions", messages)
                assert asked.hits() == 2
                asked.until_found("/v1/chat/completions", messages)
                assert asked.hits() == 3
