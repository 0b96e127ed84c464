"""Several real vLLMs over several store agents: what one engine stored another reads, and agents die meanwhile.

As `test_tier.py`: HALFMOON_VLLM and HALFMOON_VLLM_MODEL, or this skips.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import nats
import pytest

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas import subjects
from tests.eventually import BOUND_S, eventually_here
from tests.guardian import cluster_name
from tests.ports import HeldPorts
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
    stored,
    told,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), no_model]
KILLS = int(os.environ.get("HALFMOON_VLLM_KILLS", "20"))
EVENT = EVENTS + '{{event="{}"'
#: Each request of an engine on a busy core takes seconds, and one that waits for a store that is gone some more.
LOAD_S = 600.0


class Fleet:
    """A nats-server and store agents that reach each other over TCP alone; each ends with it."""

    def __init__(self, directory: Path) -> None:
        self.name = cluster_name()
        self.directory = directory
        self.server = EmbeddedServer.start(directory / "nats")
        self.agents: dict[str, Popen[bytes]] = {}
        self._ports: dict[str, HeldPorts] = {}

    def metrics(self, node: str) -> str:
        return f"http://127.0.0.1:{self._ports[node].first}"

    def start(self, node: str) -> str:
        """Returns when its agent is well."""
        node_id = f"{self.name}-{node}"
        held = self._ports.setdefault(node, HeldPorts())
        well = self.directory / f"{node_id}.well"
        well.unlink(missing_ok=True)
        self.agents[node] = agent(
            self.server.url, self.name, node_id, BLOCK_BYTES, 256, "--transport", "tcp", "--data-port", "0",
            "--metrics", f"127.0.0.1:{held.first}", "--health-file", f"{well}",
        )  # fmt: skip

        def is_well() -> bool:
            assert self.agents[node].poll() is None
            return well.exists()

        eventually_here(is_well, f"the agent of {node} is well")
        return node_id

    def close(self) -> None:
        for running in self.agents.values():
            running.send_signal(signal.SIGTERM)
        for running in self.agents.values():
            running.wait(BOUND_S)
        for held in self._ports.values():
            held.close()
        self.server.stop()


@contextlib.contextmanager
def fleet(directory: Path) -> Iterator[Fleet]:
    made = Fleet(directory)
    try:
        yield made
    finally:
        made.close()


def test_a_second_engine_and_one_on_another_node_read_what_the_first_one_stored(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "store.md").read_text()
    prompts = [text[first : first + 1500] for first in (0, 3000, 6000)]
    with fleet(tmp_path) as here:
        near, far = here.start("near"), here.start("far")
        with engine(tmp_path, here.server.url, near) as first:
            said = [told(first, prompt) for prompt in prompts]
            stored(first, 3 * 8)
            with engine(tmp_path, here.server.url, near) as second:
                assert [told(second, prompt) for prompt in prompts] == said
                loaded = counted(second, EVENT.format("blocks_loaded"))
                assert counted(second, HITS) == 32 * loaded
                assert loaded >= 3 * 8
            # The first one is up still, and goes on with what it has.
            assert [told(first, prompt) for prompt in prompts] == said
        with engine(tmp_path, here.server.url, far, peers=[near]) as third:
            assert [told(third, prompt) for prompt in prompts] == said
            fetched = counted(third, EVENT.format("blocks_loaded"))
            assert counted(third, HITS) == 32 * fetched
            came = counted(
                here.metrics("far"), 'halfmoon_transfer_bytes_total{direction="read",transport="tcp"'
            )
    print(f"second engine: {loaded} blocks; on another node: {fetched} blocks, {came} bytes over TCP")
    assert fetched >= 3 * 8
    assert came == fetched * BLOCK_BYTES


class Killer:
    """Kills an agent once it was asked to take blocks for a load, at a drawn message after that."""

    def __init__(self, url: str, node_ids: list[str]) -> None:
        self._url, self._node_ids = url, node_ids
        self._victim: Popen[bytes] | None = None
        self._after = 0
        #: Verbs that the nodes were asked, since the first `take` after `arm`.
        self.asked: list[str] = []
        self.killed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._listen(),))
        self._thread.start()

    async def _listen(self) -> None:
        connection = await nats.connect(self._url)
        for node_id in self._node_ids:
            await connection.subscribe(subjects.store(node_id, "*"), cb=self._heard)
        await self._stop.wait()
        await connection.close()

    async def _heard(self, message: nats.aio.msg.Msg) -> None:
        if self._victim is None:
            return
        verb = message.subject.rsplit(".", 1)[-1]
        if verb == "take" or self.asked:
            self.asked.append(verb)
        if verb == "release" or len(self.asked) > self._after:
            self._victim.kill()
            self._victim = None
            self.killed.set()

    def arm(self, victim: Popen[bytes], after: int) -> None:
        """It dies at message `after` behind the take, or when the blocks are given back."""
        self.asked.clear()
        self.killed.clear()
        self._after, self._victim = after, victim

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def test_an_agent_that_is_killed_while_its_engine_loads_costs_no_token(tmp_path: Path) -> None:
    drawn = random.Random(17)
    # Together more than the 64 rows of the engine's host memory: each comes from the store again in its turn.
    prompts = [[drawn.randrange(100, 40_000) for _ in range(14 * 32 + 5)] for _ in range(6)]
    seen = Counter[str]()
    with fleet(tmp_path) as here:
        far, near = here.start("far"), here.start("near")
        with engine(tmp_path, here.server.url, far) as first:
            said = [told(first, prompt) for prompt in prompts]
            stored(first, 6 * 14)
        killer = Killer(here.server.url, [near, far])
        turns = itertools.cycle(range(len(prompts)))
        try:
            with engine(tmp_path, here.server.url, near, peers=[far], transfer_s=5.0) as running:

                def loads() -> bool:
                    """Whether the next prompt came from the store; its answer is the same in any case."""
                    forget(running)
                    hits, prompt = counted(running, HITS), next(turns)
                    assert told(running, prompts[prompt]) == said[prompt], prompt
                    return counted(running, HITS) > hits

                def killed_in_a_load() -> bool:
                    """Also after requests that were computed: the tier leaves a store that failed alone for a while."""
                    came = loads()
                    if killer.killed.is_set():
                        seen["loaded" if came else "computed"] += 1
                    return killer.killed.is_set()

                for turn in range(KILLS):
                    killer.arm(here.agents["near"], drawn.randrange(4))
                    eventually_here(killed_in_a_load, f"kill {turn} of {KILLS}", bound_s=LOAD_S)
                    here.agents["near"].wait(BOUND_S)
                    seen["mid-load" if "release" not in killer.asked else "later"] += 1
                    here.start("near")
                loaded = eventually_here(
                    lambda: loads() and counted(running, EVENT.format("blocks_loaded")),
                    "the engine loads from the last agent",
                    bound_s=LOAD_S,
                )
                away = counted(running, EVENT.format("store_away"))
        finally:
            killer.close()
    print(f"{KILLS} kills: {dict(seen)}; blocks loaded {loaded}, store away {away}")
    assert seen["mid-load"] > 0
    assert seen["computed"] > 0
    assert not list(Path("/dev/shm").glob(f"*{here.name}*"))
