"""Two real vLLMs on nodes of their own, whose prompts' KV goes by `HalfmoonConnector`."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.bus.embedded import EmbeddedServer
from tests.eventually import BOUND_S
from tests.guardian import cluster_name
from tests.vllm.engines import BLOCK_BYTES, ROOT, START_S, RealEngine, agent, asked, real_engine

LAYERS = 30


@dataclass
class Pair:
    """`prefill` computes prompts for `decode`; each has a store agent on a node of its own."""

    prefill: RealEngine
    decode: RealEngine
    agents: dict[str, subprocess.Popen[bytes]]
    nats: str


@contextlib.contextmanager
def running_pair(place: Path, *words: str) -> Iterator[Pair]:
    """Up and healthy, each with these words for vLLM too; ended afterwards."""
    server, cluster = EmbeddedServer.start(place / "nats"), cluster_name()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        agents, engines = {}, {}
        for core, name in enumerate(("prefill", "decode")):
            layers = ["--block-layers", f"{LAYERS}", "--transport", "tcp"]
            agents[name] = agent(server.url, cluster, name, BLOCK_BYTES, 256, *layers)
            stack.callback(agents[name].wait, BOUND_S)
            stack.callback(agents[name].send_signal, signal.SIGTERM)
            transfer = {
                "kv_connector": "HalfmoonConnector", "kv_role": "kv_both",
                "kv_connector_module_path": "halfmoon.store.adapters.vllm_connector",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"nats": server.url, "node": name, "worker": name, "wait_s": START_S},
            }  # fmt: skip
            more = ["--kv-transfer-config", json.dumps(transfer), "--num-gpu-blocks-override", "128", *words]
            links = f"{ROOT / '.links'}"
            engines[name] = stack.enter_context(
                real_engine(place / f"{name}.log", core, *more, PYTHONPATH=links)
            )
        yield Pair(engines["prefill"], engines["decode"], agents, server.url)


def with_params(
    url: str, prompt: list[int], params: dict[str, Any], *, tokens: int = 24, stream: bool = False
) -> urllib.request.Request:
    """A greedy completion with these `kv_transfer_params`."""
    request = asked(url, prompt, stream=stream)
    assert isinstance(request.data, bytes)
    body = json.loads(request.data) | {"kv_transfer_params": params, "max_tokens": tokens}
    request.data = json.dumps(body).encode()
    return request


def answer(url: str, prompt: list[int], params: dict[str, Any], tokens: int = 24) -> dict[str, Any]:
    """All that the engine says."""
    request = with_params(url, prompt, params, tokens=tokens)
    with urllib.request.urlopen(request, timeout=START_S) as said:
        found: dict[str, Any] = json.load(said)
    return found
