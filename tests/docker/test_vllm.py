"""docker/compose.vllm.yaml on a real engine of containers: requests go where their blocks are, also after a death.

Where vLLM's program should be, in a container of vLLM's, stands the tests' engine that computes nothing
(`stand_in_vllm.py`): it takes the compose file's words for vLLM, and speaks HTTP and KV events as vLLM does.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.adapters.fake_fleet import PROMPT_BLOCKS, answer, prompt
from tests.docker.engine import run
from tests.docker.stack import Stack
from tests.eventually import eventually_here

BLOCK_TOKENS = 256
STAND_IN = """
x-stand-in: &stand-in
  volumes:
    - {checkout}/tests/docker/stand_in_vllm.py:/opt/halfmoon/bin/vllm:ro
    - {checkout}/tests:/checkout/tests:ro
services: {{vllm-0: *stand-in, vllm-1: *stand-in}}
"""
ENGINES = {"vllm-0": "vllm-1", "vllm-1": "vllm-0"}


@pytest.fixture(scope="module")
def fleet(built: Stack) -> Iterator[Stack]:
    """Frontend, conductors, two engines and their adapters, whole. When they are down nothing is left."""
    with built.another().running() as stack:
        (stack.checkout / "docker" / "compose.stand-in.yaml").write_text(
            STAND_IN.format(checkout=stack.checkout)
        )
        stack.overlays = ("compose.small.yaml", "compose.vllm.yaml", "compose.stand-in.yaml")
        stack.whole, stack.conductors = {"mixed": 2, "frontend": 1}, 2
        model = stack.checkout / "model"
        model.mkdir(exist_ok=True)
        stack.settings = {
            "HALFMOON_MODEL_DIR": str(model),
            "HALFMOON_MODEL": "smollm2-135m-instruct",
            "HALFMOON_VLLM_IMAGE": stack.image,
            "HALFMOON_VLLM_RUNTIME": "runc",
            "HALFMOON_VLLM_MEMORY": "1g",
            "HALFMOON_VLLM_SHM": "64m",
        }
        stack.up()
        stack.wait_whole()
        yield stack
        assert stack.left()
        stack.down()
        assert stack.left() == []


def asked(stack: Stack, number: int) -> dict[str, Any]:
    """The answer to one of the prompts, four tokens of it."""
    body = {"prompt": prompt(number), "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{stack.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    assert found["choices"][0]["token_ids"] == answer(prompt(number), 4)
    return found


def cached(found: dict[str, Any]) -> int:
    count: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_prompt_goes_where_its_blocks_are(fleet: Stack) -> None:
    for number in range(3):
        first = asked(fleet, number)
        assert cached(first) == 0

        def warm(number: int = number, at: str = first["decode_worker"]) -> bool:
            """Once the engine's events are known."""
            again = asked(fleet, number)
            return bool(again["decode_worker"] == at and cached(again) == PROMPT_BLOCKS * BLOCK_TOKENS)

        eventually_here(warm, "its blocks are found", every_s=0.2)
    assert "identical" in fleet.replayed()


def test_an_engine_that_is_killed_costs_no_answer_and_comes_back(fleet: Stack) -> None:
    at = asked(fleet, 7)["decode_worker"]
    (container,) = fleet.containers(at)
    fleet.docker("kill", container)
    assert asked(fleet, 7)["decode_worker"] == ENGINES[at]
    fleet.docker("start", container)
    fleet.wait_whole()
    assert "identical" in fleet.replayed()


def test_an_engine_is_reached_by_its_adapter_alone(fleet: Stack) -> None:
    """Its KV events are the text of all prompts."""
    script = "import socket; print(socket.gethostbyname('vllm-0'))"
    for network, found in (("engine-0", True), ("inside", False), ("engine-1", False), ("edge", False)):
        words = ["--network", f"{fleet.project}_{network}", "--label", f"test={fleet.project}", fleet.image]
        done = run("docker", "run", "--rm", *words, "python3", "-c", script, check=False)
        assert (done.returncode == 0) == found, (network, done.stdout, done.stderr)
