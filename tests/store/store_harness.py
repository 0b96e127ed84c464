"""Agents and clients over a real nats-server, with small pools in real shared memory."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.schemas.kv import KvMessage, KvReady
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.subjects import kv_for
from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.client import StoreClient
from halfmoon.store.config import StoreConfig
from tests.eventually import BOUND_S, eventually
from tests.guardian import cluster_name
from tests.nats_in_process import run_at

#: Sequences for decisions that tests give: a stream drops a second decision of the same identity.
CAUSES = itertools.count(1)
SECRET = "the tests' secret"
BOUND_NS = int(BOUND_S) * 10**9
#: Options of an engine's link to the store: none runs out unless the test is about it.
PATIENT = dict.fromkeys(("connect_s", "lookup_s", "transfer_s"), BOUND_S)


def layout(*, layers: int = 4, block_tokens: int = 16, kv_heads: int = 2, head_dim: int = 32) -> Layout:
    """4 layers of 8 KiB a block, unless told otherwise."""
    return Layout(
        model="test",
        model_fingerprint="f",
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype="float32",
    )


def keys(*numbers: int) -> bytes:
    """Made-up block keys."""
    return b"".join(number.to_bytes(16, "little") for number in numbers)


class Cluster:
    """Agents, clients and what was said to workers; all gone at the end, with the pools' books checked."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.name = cluster_name()
        self.agents: dict[str, StoreAgent] = {}
        self.heard: dict[str, list[KvMessage]] = {}
        self.stack = stack
        #: As the process of that name.
        self.connect: Callable[[str], Awaitable[Bus]] = lambda name: Bus.connect(
            BusConfig(url=self.url), name=name
        )
        #: Where the log stood when the first agent of this cluster was made.
        self.began_seq = -1

    async def bus(self, name: str) -> Bus:
        bus = await self.connect(name)
        self.stack.push_async_callback(bus.close)
        return bus

    def config(self, node_id: str, **changes: Any) -> StoreConfig:
        fields: dict[str, Any] = {
            "cluster": self.name,
            "node_id": node_id,
            "layout": layout(),
            "slots": 32,
            "cluster_secret": SECRET,
            # Long enough that none of them runs out unless the test is about it.
            "lease_ttl_ns": 4 * BOUND_NS,
            "transfer_ns_max": BOUND_NS,
            "stall_ns_max": BOUND_NS,
            "control_timeout_s": BOUND_S,
        }
        return StoreConfig(**{**fields, **changes})

    async def agent(self, node_id: str, **changes: Any) -> StoreAgent:
        bus = await self.bus(f"store-{node_id}")
        if self.began_seq < 0:
            self.began_seq = await bus.last_seq()
        agent = StoreAgent(bus, self.config(node_id, **changes))
        await agent.start()
        self.agents[node_id] = agent
        self.stack.push_async_callback(self._finish, agent)
        return agent

    async def log(self) -> list[Any]:
        """All events since the cluster began."""
        assert self.began_seq >= 0, "no agent was made in this process"
        bus = await self.bus("reader")
        last = await bus.last_seq()
        found: list[Any] = []
        if last == self.began_seq:
            return found
        async for stamped in bus.events(after=self.began_seq):
            found.append(stamped.event)
            if stamped.seq == last:
                break
        return found

    async def _finish(self, agent: StoreAgent) -> None:
        agent.context.guard.check()
        await agent.stop()

    async def client(self, node_id: str, worker_id: str) -> AgentClient:
        """A worker of the node, attached, whose KV messages are kept in `heard`."""
        bus = await self.bus(worker_id)
        self.heard[worker_id] = heard = []
        await bus.subscribe(kv_for(worker_id), KvMessage, heard.append)
        client = AgentClient(bus, node_id=node_id, worker_id=worker_id)
        await client.attach()
        self.stack.push_async_callback(client.close)
        return client


@asynccontextmanager
async def cluster(url: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(url, stack)


def layers_told(heard: list[KvMessage]) -> list[tuple[int, int]]:
    """(layer, bytes moved) of each layer that was told of, by itself or with others."""
    return [
        (layer, message.moved_bytes // message.layers)
        for message in heard
        if isinstance(message, KvReady)
        for layer in range(message.layer, message.layer + message.layers)
    ]


async def until(true: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Waits for it; fails when it does not come."""
    await eventually(true, "what the test waits for", every_s=0.01)


Story = Callable[[Cluster], Awaitable[None]]


def tell(url: str, story: Story) -> None:
    """Runs a story on a fresh cluster."""

    async def run() -> None:
        async with cluster(url) as here:
            await story(here)

    run_at(url, run())


async def open_client(
    here: Cluster, node_id: str, tenant: str = "", peers: tuple[str, ...] = ()
) -> StoreClient:
    """Closed with the cluster."""
    client = await StoreClient.connect(here.url, node_id=node_id, tenant=tenant, peers=peers)
    here.stack.push_async_callback(client.close)
    return client
