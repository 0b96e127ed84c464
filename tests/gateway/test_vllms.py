"""Two real vLLMs behind a real Envoy: the text of one, hits where the blocks are, chats as the engine gives them.

HALFMOON_ENVOY names Envoy's program, HALFMOON_VLLM vLLM's, and HALFMOON_VLLM_MODEL a model's directory
(`tests/vllm/make_model.py`): this skips without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.events import RequestFinished
from tests.adapters.fleet import OTHER, AdaptedFleet
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, running
from tests.eventually import eventually
from tests.gateway.envoy import envoy, no_envoy
from tests.ports import HeldPorts
from tests.vllm.engines import START_S, RealEngine, counted, no_model, real_engine, told
from tests.vllm.test_fleet import HITS, OURS, THEIRS, prompts

pytestmark = [no_envoy, no_model, pytest.mark.slow, pytest.mark.timeout(3_600)]
CHAT = {"messages": [{"role": "user", "content": "Name the moons of Mars."}], "max_tokens": 24}


def chat(url: str, **fields: Any) -> list[dict[str, Any]]:
    """The answer, or its pieces."""
    body = json.dumps({**CHAT, "temperature": 0, **fields}).encode()
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=START_S) as said:
        lines = [line.removeprefix("data: ") for line in said.read().decode().splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text(pieces: list[dict[str, Any]]) -> str:
    choices = [choice for piece in pieces for choice in piece["choices"]]
    return "".join(choice.get("message", choice.get("delta"))["content"] or "" for choice in choices)


async def finished(fleet: AdaptedFleet, after: int) -> list[str]:
    """Where each answer since then was drawn, once the log has one."""

    async def ended() -> list[str]:
        return [at for at in OTHER for _ in await fleet.told(after, RequestFinished, at)]

    return await eventually(ended, "the log has the answer", every_s=0.05)


@contextlib.asynccontextmanager
async def before_vllms(place: Path) -> AsyncIterator[tuple[str, AdaptedFleet, dict[str, RealEngine]]]:
    """A gateway's URL, the fleet that it asks, and the engines by their workers' names."""
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(real_engine(place / f"{name}.log", core))
            for core, name in enumerate(OTHER)
        }
        picker = stack.enter_context(HeldPorts())
        flags = [word for engine in engines.values() for word in ("--adapt-vllm", engine.url)]
        cluster = stack.enter_context(
            running(place, *flags, "--dtype", "float32", "--ext-proc-port", f"{picker}", *PATIENT)
        )
        nc = await cluster.connect()
        try:
            yield stack.enter_context(envoy(place, picker)), AdaptedFleet(cluster, OTHER, nc), engines
        finally:
            await nc.close()


async def test_a_gateway_before_two_vllms_gives_what_one_vllm_says(tmp_path: Path) -> None:
    async with before_vllms(tmp_path) as (gateway, fleet, engines):
        alone = engines[next(iter(OTHER))].url
        for ids in prompts():
            expected = await asyncio.to_thread(told, alone, ids)
            after = await fleet.last_seq()
            assert await asyncio.to_thread(told, gateway, ids) == expected
            (at,) = await finished(fleet, after)
            await fleet.stored(after, at, (len(ids) - 1) // OURS)
            before = {name: counted(engine.url, HITS) for name, engine in engines.items()}
            assert await asyncio.to_thread(told, gateway, ids) == expected
            gained = {name: counted(engine.url, HITS) - before[name] for name, engine in engines.items()}
            print(f"{len(ids)} tokens: at {at}, {gained[at]:.0f} of them hit by vLLM's own count")
            assert gained == {at: (len(ids) - 1) // THEIRS * THEIRS, OTHER[at]: 0}
        # Chats have the engine's own template and pieces.
        wanted = text(await asyncio.to_thread(chat, alone))
        assert len(wanted) > 20
        for stream in (False, True):
            assert text(await asyncio.to_thread(chat, gateway, stream=stream)) == wanted
        print(f"a chat, whole and in pieces: {wanted!r}")
        assert "identical" in replayed(fleet.cluster, tmp_path)
