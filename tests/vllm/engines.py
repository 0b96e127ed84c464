"""Real vLLM servers on this CPU, and for the tests of the tier real store agents under them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from halfmoon.bus.embedded import EmbeddedServer
from tests.eventually import BOUND_S, eventually_here
from tests.guardian import cluster_name
from tests.ports import HeldPorts
from tests.store.store_harness import PATIENT

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PROGRAM, MODEL = os.environ.get("HALFMOON_VLLM", ""), os.environ.get("HALFMOON_VLLM_MODEL", "")
START_S = 900.0
#: SmolLM2 in float32: 30 layers of K and V of 32 tokens, 3 heads of 64.
BLOCK_BYTES = 30 * 2 * 32 * 3 * 64 * 4
HITS, EVENTS = "vllm:external_prefix_cache_hits_total", "vllm:kv_offload_halfmoon_events_total"
no_vllm = pytest.mark.skipif(not PROGRAM, reason="HALFMOON_VLLM names no vLLM")
no_model = pytest.mark.skipif(not PROGRAM or not MODEL, reason="HALFMOON_VLLM_MODEL names no model")


@contextlib.contextmanager
def store(directory: Path, block_bytes: int, pool_mib: int) -> Iterator[tuple[str, str]]:
    """The URL of a nats-server and the node of a store agent, `halfmoon store --block-bytes`."""
    server = EmbeddedServer.start(directory / "nats")
    node = cluster_name()
    running = agent(server.url, node, node, block_bytes, pool_mib, "--data-port", "-1")
    try:
        yield server.url, node
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(BOUND_S)
        server.stop()


def agent(
    url: str, cluster: str, node: str, block_bytes: int, pool_mib: int, *words: str
) -> subprocess.Popen[bytes]:
    size = ["--block-bytes", f"{block_bytes}", "--pool-mib", f"{pool_mib}"]
    name = ["--nats", url, "--cluster", cluster, "--node", node]
    return subprocess.Popen([sys.executable, "-m", "halfmoon.cli.main", "store", *name, *size, *words])


#: Of a vLLM on one core, with a small cache.
ON_CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip
#: Of one that finds this checkout's halfmoon, and the spec of these tests.
WITH_OURS = {"PYTHONPATH": f"{ROOT / '.links'}:{HERE}", "VLLM_SERVER_DEV_MODE": "1"}


@contextlib.contextmanager
def vllm(program: str, model: str, log: Path, *words: str, **environment: str) -> Iterator[str]:
    """The URL of `vllm serve` with these words, once it is healthy. It has ended afterwards, and left no file."""
    with HeldPorts() as port, served(program, model, log, port, *words, **environment):
        yield f"http://127.0.0.1:{port}"


def shared_memory(group: int) -> set[Path]:
    """Files of shared memory that processes of a group have mapped, under whatever name they were made, but for the
    pools of store agents: those are others'.
    """
    mapped: set[int] = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if process.name.isdigit() and os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    files = [file for file in Path("/dev/shm").iterdir() if not file.name.startswith("halfmoon-")]
    return {file for file in files if file.stat().st_ino in mapped}


@contextlib.contextmanager
def served(
    program: str, model: str, log: Path, port: int, *words: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """As `vllm`, at a port that is held: the process, first of a group that all of its processes are in."""
    url = f"http://127.0.0.1:{port}"
    command = [
        program, "serve", model, "--dtype", "float32", "--host", "127.0.0.1", "--port", f"{port}",
        "--enforce-eager", "--block-size", "32", *words,
    ]  # fmt: skip
    # Its sockets and files for a moment: in a folder with a short name, since a socket's path has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder, log.open("wb") as file:
        variables = {**os.environ, **ON_CPU, "TMPDIR": folder, **environment}
        process = subprocess.Popen(
            command, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()[-5000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                return True
            return False

        try:
            eventually_here(healthy, "vLLM answers", every_s=1, bound_s=START_S)
            yield process
        finally:
            left = shared_memory(process.pid)
            process.terminate()
            process.wait(BOUND_S)
            for file in left:
                file.unlink(missing_ok=True)


@dataclass
class RealEngine:
    """`vllm serve`, unmodified, on one core. `events`, `replay`: where it tells its KV events, and past ones."""

    url: str
    events: str
    replay: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """All its processes stand still."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """All its processes, and the shared memory that they cannot remove any more."""
        left = shared_memory(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        for file in left:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def real_engine(
    log: Path, core: int, *more: str, model: str = MODEL, **environment: str
) -> Iterator[RealEngine]:
    with HeldPorts(count=3) as port:
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port + 1}",
            "replay_endpoint": f"tcp://*:{port + 2}",
        }  # fmt: skip
        words = ["--served-model-name", "m", "--max-model-len", "2560", "--max-num-seqs", "4"]
        words += ["--kv-events-config", json.dumps(events), *more]
        # No seed: each engine names its blocks by numbers of its own, and ours are the same for all that.
        bound = f"{core % (os.cpu_count() or 1)}"
        environment = {"VLLM_CPU_OMP_THREADS_BIND": bound, **environment}
        with served(PROGRAM, model, log, port, *words, **environment) as process:
            events_at, replay_at = (f"tcp://127.0.0.1:{port + more}" for more in (1, 2))
            yield RealEngine(f"http://127.0.0.1:{port}", events_at, replay_at, process)


@contextlib.contextmanager
def engine(directory: Path, url: str, node: str, *more: str, **options: Any) -> Iterator[str]:
    """The URL of a vLLM over the store: 1,474,560 bytes a block of 32 tokens, 64 of them in its host memory.

    `more`: words of its command.
    """
    name = cluster_name()
    tier = {
        "type": "HalfmoonTier",
        "module_path": "halfmoon.store.adapters.vllm_tier",
        "nats": url,
        "node": node,
        **PATIENT,
        **options,
    }
    transfer = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": name,
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_spec", "cpu_bytes_to_use": 64 * BLOCK_BYTES,
            "secondary_tiers": [tier],
        },
    }  # fmt: skip
    words = ["--served-model-name", "m", "--max-model-len", "2560", "--max-num-seqs", "4"]
    words += ["--kv-transfer-config", json.dumps(transfer), *more]
    log = directory / f"{name}.log"
    try:
        with vllm(PROGRAM, MODEL, log, *words, **WITH_OURS) as url_of_it:
            yield url_of_it
    finally:
        # vLLM leaves its host memory behind when it is ended while it starts.
        for left in Path("/dev/shm").glob(f"vllm_offload_{name}*"):
            left.unlink()


def counted(url: str, name: str) -> float:
    """The sum of a counter at the engine's own `/metrics`; `name` may end in a part of its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    first, _, label = name.partition("{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{first}{{") and label in line)


def asked(
    url: str, prompt: str | list[int], tokens: int = 24, *, stream: bool = False
) -> urllib.request.Request:
    """A greedy completion of so many tokens, with their ids."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, "stream": stream,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)


def told(url: str, prompt: str | list[int], tokens: int = 24) -> list[int]:
    """The answer's tokens."""
    with urllib.request.urlopen(asked(url, prompt, tokens), timeout=START_S) as answer:
        said: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return said


def stored(url: str, blocks: int) -> float:
    """How many blocks the engine's tier has stored, once there are so many."""

    def count() -> float:
        told(url, "Hello")  # vLLM takes the counts when it steps
        there = counted(url, f'{EVENTS}{{event="blocks_stored"')
        return there if there >= blocks else 0

    return eventually_here(count, f"{blocks} blocks are stored", every_s=0.2)


def forget(url: str) -> None:
    """The device's prefix cache is empty afterwards."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", b""), timeout=BOUND_S).close()
