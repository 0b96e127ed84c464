"""KV events of a real cluster, read by vllm-router: its `kv_aware` policy finds prompts that were served before.

HALFMOON_VLLM_ROUTER names the program (`pip install vllm-router` in an environment of its own); without it this skips.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon.bus.embedded import free_port
from tests.cluster.harness import PATIENT, Cluster, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = "smollm2-135m-instruct"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def counted(port: int, result: str) -> int:
    """The router's lookups with that result."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        name = f'vllm_router_kv_placement_lookups_total{{result="{result}"}} '
        found = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
        return int(found[0].removeprefix(name)) if found else 0


@contextlib.contextmanager
def router(cluster: Cluster, events: str, replay: str) -> Iterator[tuple[str, int]]:
    """Its URL, and the port of its metrics."""
    port, metrics = free_port(), free_port()
    source = f"{cluster.http}="
    words = [
        os.environ["HALFMOON_VLLM_ROUTER"], "--host", "127.0.0.1", "--port", f"{port}", "--worker-urls", cluster.http,
        "--policy", "kv_aware", "--kv-event-source", source + events, "--kv-event-replay-source", source + replay,
        "--kv-event-block-size", "256", "--kv-event-model", MODEL, "--prometheus-port", f"{metrics}",
        "--worker-startup-check-interval", "1",
    ]  # fmt: skip
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < until, "the router does not start"
                time.sleep(0.2)
        time.sleep(1.0)  # until its subscription is known
        yield f"http://127.0.0.1:{port}", metrics
    finally:
        process.terminate()
        process.wait(20)


def test_a_router_finds_what_was_served_before_it_came_and_since(tmp_path: Path) -> None:
    if not os.environ.get("HALFMOON_VLLM_ROUTER"):
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
        with router(cluster, events, replay) as (url, metrics):
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
