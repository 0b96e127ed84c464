"""Several real vLLMs over several store agents: what one engine stored another reads, and agents die meanwhile.

As `test_tier.py`: HALFMOON_VLLM and HALFMOON_VLLM_MODEL, or this skips.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import nats
import pytest

from halfmoon.bus.embedded import EmbeddedServer, free_port
from halfmoon.schemas import subjects
from tests.vllm.engines import (
    BLOCK_BYTES,
    EVENTS,
    HITS,
    ROOT,
    agent,
    counted,
    engine,
    forget,
    no_model,
    told,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), no_model]
KILLS = int(os.environ.get("HALFMOON_VLLM_KILLS", "20"))
EVENT = EVENTS + '{{event="{}"'


class Fleet:
    """A nats-server and store agents that reach each other over TCP alone; each ends with it."""

    def __init__(self, directory: Path) -> None:
        self.name = f"f{uuid.uuid4().hex[:8]}"
        self.directory = directory
        self.server = EmbeddedServer.start(directory / "nats")
        self.agents: dict[str, Popen[bytes]] = {}
        self.metrics: dict[str, str] = {}

    def start(self, node: str) -> str:
        """Returns when its agent is well."""
        node_id, port = f"{self.name}-{node}", free_port()
        well = self.directory / f"{node_id}.well"
        well.unlink(missing_ok=True)
        self.metrics[node] = f"http://127.0.0.1:{port}"
        self.agents[node] = agent(
            self.server.url, self.name, node_id, BLOCK_BYTES, 256, "--transport", "tcp", "--data-port", "0",
            "--metrics", f"127.0.0.1:{port}", "--health-file", f"{well}",
        )  # fmt: skip
        until = time.monotonic() + 60
        while not well.exists():
            assert time.monotonic() < until
            assert self.agents[node].poll() is None
            time.sleep(0.05)
        return node_id

    def close(self) -> None:
        for running in self.agents.values():
            running.send_signal(signal.SIGTERM)
        for running in self.agents.values():
            running.wait(30)
        self.server.stop()


@contextlib.contextmanager
def fleet(directory: Path) -> Iterator[Fleet]:
    made = Fleet(directory)
    try:
        yield made
    finally:
        made.close()


def stored(url: str, blocks: int) -> None:
    """Returns when the engine's tier has stored so many."""
    until = time.monotonic() + 30
    while counted(url, EVENT.format("blocks_stored")) < blocks:
        assert time.monotonic() < until
        told(url, "Hello")  # vLLM takes the counts when it steps
        time.sleep(0.2)


def test_a_second_engine_and_one_on_another_node_read_what_the_first_one_stored(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "store.md").read_text()
    prompts = [text[first : first + 1500] for first in (0, 3000, 6000)]
    with fleet(tmp_path) as here:
        near, far = here.start("near"), here.start("far")
        with engine(tmp_path, here.server.url, near) as first:
            said = [told(first, prompt)[0] for prompt in prompts]
            stored(first, 3 * 8)
            with engine(tmp_path, here.server.url, near) as second:
                assert [told(second, prompt)[0] for prompt in prompts] == said
                loaded = counted(second, EVENT.format("blocks_loaded"))
                assert counted(second, HITS) == 32 * loaded
                assert loaded >= 3 * 8
            # The first one is up still, and goes on with what it has.
            assert [told(first, prompt)[0] for prompt in prompts] == said
        with engine(tmp_path, here.server.url, far, peers=[near]) as third:
            assert [told(third, prompt)[0] for prompt in prompts] == said
            fetched = counted(third, EVENT.format("blocks_loaded"))
            assert counted(third, HITS) == 32 * fetched
            came = counted(
                here.metrics["far"], 'halfmoon_transfer_bytes_total{direction="read",transport="tcp"'
            )
    print(f"second engine: {loaded} blocks; on another node: {fetched} blocks, {came} bytes over TCP")
    assert fetched >= 3 * 8
    assert came == fetched * BLOCK_BYTES


class Killer:
    """Kills an agent a drawn while after it was asked to take blocks for a load, and knows if it had answered."""

    def __init__(self, url: str, node_id: str) -> None:
        self._url, self._node_id = url, node_id
        self._armed: tuple[Popen[bytes], float] | None = None
        #: Subjects of what the node was asked, since `arm`.
        self.asked: list[str] = []
        self.killed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._listen(),))
        self._stop = asyncio.Event()
        self._thread.start()

    async def _listen(self) -> None:
        connection = await nats.connect(self._url)
        await connection.subscribe(subjects.store(self._node_id, "*"), cb=self._heard)
        await self._stop.wait()
        await connection.close()

    async def _heard(self, message: nats.aio.msg.Msg) -> None:
        verb = message.subject.rsplit(".", 1)[-1]
        self.asked.append(verb)
        if verb == "take" and self._armed is not None:
            (victim, after_s), self._armed = self._armed, None
            await asyncio.sleep(after_s)
            self.asked.append("kill")
            victim.kill()
            self.killed.set()

    def arm(self, victim: Popen[bytes], after_s: float) -> None:
        self.asked.clear()
        self.killed.clear()
        self._armed = (victim, after_s)

    def in_mid_load(self) -> bool:
        """It was killed before the engine gave the blocks back."""
        assert "kill" in self.asked
        return "release" not in self.asked[: self.asked.index("kill")]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def test_an_agent_that_is_killed_while_its_engine_loads_costs_time_and_no_token(tmp_path: Path) -> None:
    drawn = random.Random(17)
    # Together more than the 64 rows of the engine's host memory: each comes from the store again in its turn.
    prompts = [[drawn.randrange(100, 40_000) for _ in range(14 * 32 + 5)] for _ in range(6)]
    seen, took_s = Counter[str](), []
    with fleet(tmp_path) as here:
        far, near = here.start("far"), here.start("near")
        with engine(tmp_path, here.server.url, far) as first:
            said = [told(first, prompt)[0] for prompt in prompts]
            stored(first, 6 * 14)
        killer = Killer(here.server.url, near)
        try:
            with engine(tmp_path, here.server.url, near, peers=[far], transfer_s=5.0) as running:
                for turn in range(KILLS):
                    prompt = turn % len(prompts)
                    forget(running)
                    killer.arm(here.agents["near"], drawn.uniform(0, 0.15))
                    hits, began = counted(running, HITS), time.monotonic()
                    assert told(running, prompts[prompt])[0] == said[prompt], turn
                    took_s.append(time.monotonic() - began)
                    assert killer.killed.wait(30), (turn, killer.asked)
                    here.agents["near"].wait(20)
                    seen["mid-load" if killer.in_mid_load() else "later"] += 1
                    seen["computed" if counted(running, HITS) == hits else "loaded"] += 1
                    here.start("near")
                    time.sleep(1.5)  # the tier leaves a store that failed alone for a second
                loaded = counted(running, EVENT.format("blocks_loaded"))
                away = counted(running, EVENT.format("store_away"))
        finally:
            killer.close()
    print(
        f"{KILLS} kills: {dict(seen)}; blocks loaded {loaded}, store away {away};"
        f" an answer took {sorted(took_s)[len(took_s) // 2]:.1f} s, {max(took_s):.1f} at most"
    )
    assert seen["mid-load"] >= KILLS // 4
    assert seen["computed"] > 0
    assert max(took_s) < 30
    assert not list(Path("/dev/shm").glob(f"*{here.name}*"))
