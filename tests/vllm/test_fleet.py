"""Two real vLLMs behind the conductor: the text of one, hits where the blocks are, an engine killed in mid-answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon.bus.embedded import free_port
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.vllm.engines import MODEL, PROGRAM, START_S, counted, environment, no_model, told

pytestmark = [no_model, pytest.mark.slow, pytest.mark.timeout(1_800)]
OTHER = {"vllm-0": "vllm-1", "vllm-1": "vllm-0"}
HITS = "vllm:prefix_cache_hits_total"
ARTICLE = (
    "The moon is Earth's only natural satellite, and it has been watched for as long as there are people. "
)


class RealEngine:
    """`vllm serve`, unmodified, on one core; all its processes are of one group."""

    def __init__(self, log: Path, core: int) -> None:
        port = free_port(count=3)
        self.url, self.log = f"http://127.0.0.1:{port}", log
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port + 1}",
            "replay_endpoint": f"tcp://*:{port + 2}",
        }  # fmt: skip
        words = [
            PROGRAM, "serve", MODEL, "--served-model-name", "m", "--dtype", "float32", "--host", "127.0.0.1", "--port",
            f"{port}", "--enforce-eager", "--max-model-len", "2560", "--max-num-seqs", "4", "--block-size", "32",
            "--kv-events-config", json.dumps(events),
        ]  # fmt: skip
        # No seed: each engine names its blocks by numbers of its own, and ours are the same for all that.
        own = {**environment(), "VLLM_CPU_OMP_THREADS_BIND": f"{core % (os.cpu_count() or 1)}"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words, env=own, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        until = time.monotonic() + START_S
        while True:
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(self.log.read_text()[-5000:])
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealEngine]]:
    place = tmp_path_factory.mktemp("engines")
    found = {name: RealEngine(place / f"{name}.log", core) for core, name in enumerate(OTHER)}
    try:
        for each in found.values():
            each.wait()
        yield found
    finally:
        for each in found.values():
            each.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: dict[str, RealEngine]) -> Iterator[Cluster]:
    flags = [word for engine in engines.values() for word in ("--adapt-vllm", engine.url)]
    with running(tmp_path_factory.mktemp("fleet"), *flags, "--dtype", "float32", *PATIENT) as one:
        yield one


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load("smollm2-135m-instruct")
    return [tokenizer.encode(f"Chapter {number}. {ARTICLE * 28}")[: 540 + 40 * number] for number in range(4)]


async def ask(cluster: Cluster, ids: list[int], tokens: int = 24) -> dict[str, Any]:
    nc = await cluster.connect()
    try:
        return await cluster.generate(nc, 300, prompt=ids, max_tokens=tokens, temperature=0)
    finally:
        await nc.close()


def test_a_fleet_says_what_one_vllm_says(
    cluster: Cluster, engines: dict[str, RealEngine], tmp_path: Path
) -> None:
    alone = [told(engines["vllm-0"].url, ids)[0] for ids in prompts()]

    async def through() -> None:
        for ids, expected in zip(prompts(), alone, strict=True):
            cold = await ask(cluster, ids)
            assert cold["token_ids"] == expected
            assert cold["usage"]["cached_tokens"] == 0
            await asyncio.sleep(0.5)  # the answer does not wait for the conductor to hear of the blocks
            before = {name: counted(engine.url, HITS) for name, engine in engines.items()}
            warm = await ask(cluster, ids)
            gained = {name: counted(engine.url, HITS) - before[name] for name, engine in engines.items()}
            at = cold["decode_worker"]
            assert (warm["token_ids"], warm["decode_worker"]) == (expected, at)
            assert warm["usage"]["cached_tokens"] == (len(ids) - 1) // 256 * 256
            # By the engine's own count: all whole blocks of its own, of which ours are made.
            assert gained == {at: (len(ids) - 1) // 32 * 32, OTHER[at]: 0}
            print(f"{len(ids)} tokens: at {at}, {gained[at]:.0f} of them hit by vLLM's own count")
        several = await asyncio.gather(*(ask(cluster, ids) for ids in prompts()))
        assert [said["token_ids"] for said in several] == alone

    asyncio.run(through())


def test_an_engine_that_is_killed_in_mid_answer_costs_no_token(
    cluster: Cluster, engines: dict[str, RealEngine], tmp_path: Path
) -> None:
    ids = prompts()[0][:300]

    async def killed() -> tuple[dict[str, Any], dict[str, Any], str]:
        whole = await ask(cluster, ids, 60)
        asking = asyncio.ensure_future(ask(cluster, ids, 60))
        drawn = {
            name: counted(engine.url, "vllm:generation_tokens_total") for name, engine in engines.items()
        }
        async with asyncio.timeout(60):
            while True:
                for name, engine in engines.items():
                    if counted(engine.url, "vllm:generation_tokens_total") > drawn[name] + 8:
                        engine.kill()
                        return whole, await asking, name
                await asyncio.sleep(0.05)

    whole, said, at = asyncio.run(killed())
    assert said["token_ids"] == whole["token_ids"]
    assert said["decode_worker"] == OTHER[at]
    told_of = replayed(cluster, tmp_path)
    assert "identical" in told_of
    words = [
        sys.executable,
        "-m",
        "halfmoon.cli.main",
        "replay",
        str(tmp_path / "run.jsonl.zst"),
        "--explain",
    ]
    done = subprocess.run([*words, said["id"]], capture_output=True, text=True, check=True)
    assert set(re.findall(r"vllm-\d", done.stdout)) == set(OTHER), done.stdout
    print(done.stdout)
