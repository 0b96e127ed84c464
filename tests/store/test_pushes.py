"""The messages of a push: how many there are, and what is done about those that are lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from store_harness import Cluster, keys, layers_told, until
from test_agent import fill, same
from test_failures import empty, tell

from halfmoon.bus.connection import Bus
from halfmoon.schemas.kv import KvReady, TransferFailed
from halfmoon.schemas.store import Attach, Attached
from halfmoon.schemas.types import Message
from halfmoon.store.agent.serving.serve_workers import WorkerService
from halfmoon.store.agent_client import PUSH_TRIES, AgentClient
from halfmoon.store.errors import TransferError

LAYERS = 4


class Counts:
    """Messages by verb or kind, with the answers to them, of all that the server hears."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self._verb_of: dict[str, str] = {}

    async def listen(self, here: Cluster) -> None:
        self._nc = Client()
        await self._nc.connect(here.url)
        here.stack.push_async_callback(self._nc.close)
        await self._nc.subscribe(">", cb=self._count)
        await self._nc.flush()

    async def _count(self, message: Any) -> None:
        names = message.subject.split(".")
        if names[:2] == ["halfmoon", "store"]:
            self.of[names[3]] += 1
            self._verb_of[message.reply] = names[3]
        elif names[:2] == ["halfmoon", "kv"]:
            self.of[names[3]] += 1
        elif verb := self._verb_of.get(message.subject):
            self.of[f"{verb} answered"] += 1


class Losses:
    """What is published to an agent as `push` is lost, `times` messages long."""

    def __init__(self, patch: pytest.MonkeyPatch, times: int) -> None:
        self.left, self.lost = times, 0
        publish = Bus.publish_soon

        def publish_soon(bus: Bus, subject: str, message: Message, *, message_id: str = "") -> None:
            if subject.endswith(".push") and self.left > 0:
                self.left, self.lost = self.left - 1, self.lost + 1
            else:
                publish(bus, subject, message, message_id=message_id)

        patch.setattr(Bus, "publish_soon", publish_soon)


def older_agents(patch: pytest.MonkeyPatch) -> None:
    """Agents say nothing of what workers of an earlier version do not know."""
    attach = WorkerService.attach

    async def attach_as_before(self: WorkerService, request: Attach) -> Attached:
        return msgspec.structs.replace(await attach(self, request), hears_pushes=False)

    patch.setattr(WorkerService, "attach", attach_as_before)


def older_workers(patch: pytest.MonkeyPatch) -> None:
    """Workers say nothing of what agents of an earlier version do not know."""
    attach = WorkerService.attach

    async def attach_as_before(self: WorkerService, request: Attach) -> Attached:
        return await attach(self, msgspec.structs.replace(request, hears_runs=False))

    patch.setattr(WorkerService, "attach", attach_as_before)


async def opened(here: Cluster) -> tuple[AgentClient, AgentClient]:
    """A worker with three blocks on their way to that of another node."""
    await here.agent("n1")
    await here.agent("n2")
    one, two = await here.client("n1", "w1"), await here.client("n2", "w2")
    put = await one.open_put("o1", keys(1, 2), blocks=3)
    fill(one, put.slots, 3)
    await one.open_push("o1", "r1", target_node_id="n2", decode_worker_id="w2")
    return one, two


async def layer_by_layer(here: Cluster, one: AgentClient) -> None:
    """Each layer of the three blocks in a message of its own, heard before the next is pushed."""
    for layer in range(LAYERS):
        one.push("o1", layer=layer, first_block=0, blocks=3)
        await until(lambda layer=layer: len(here.heard["w2"]) == 2 + layer)  # type: ignore[misc]


async def released(here: Cluster, *clients: AgentClient) -> None:
    for client in clients:
        await client.release("o1")
    for agent in here.agents.values():
        await empty(agent)


@pytest.mark.parametrize("older", [False, True], ids=["", "an agent that is older"])
def test_a_push_is_published_and_not_answered(
    nats_url: str, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:
        older_agents(monkeypatch)

    async def story(here: Cluster) -> None:
        counts = Counts()
        await counts.listen(here)
        one, two = await opened(here)
        await layer_by_layer(here, one)
        assert (await one.close_push("o1")).bytes == 3 * LAYERS * 8192
        await released(here, one, two)
        await until(lambda: counts.of["release answered"] == 2)
        told = {kind: counts.of[kind] for kind in ("push", "push answered", "KvReady", "close_push")}
        answered = LAYERS if older else 0
        assert told == {"push": LAYERS, "push answered": answered, "KvReady": LAYERS, "close_push": 1}

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize("lost", [1, LAYERS, LAYERS + 1])
def test_pushes_that_are_lost_are_found_at_the_close_and_published_again(
    nats_url: str, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(here: Cluster) -> None:
        losses = Losses(monkeypatch, 0)
        one, two = await opened(here)
        losses.left = lost
        for layer in range(LAYERS):
            one.push("o1", layer=layer, first_block=0, blocks=3)
            one._send()  # so that each is a message of its own
        assert (await one.close_push("o1")).bytes == 3 * LAYERS * 8192, "each layer once"
        assert losses.lost == lost
        known = min(lost, LAYERS)
        again = LAYERS if lost > LAYERS else 0
        assert (await one.status()).counters["pushes_lost"] == known + again
        await until(lambda: len(layers_told(here.heard["w2"])) >= LAYERS)
        place: Any = here.heard["w2"][0]
        assert same(two, place.slots, 3)
        assert sorted(layers_told(here.heard["w2"])) == [(layer, 3 * 8192) for layer in range(LAYERS)]
        await released(here, one, two)

    tell(nats_url, story)


@pytest.mark.pure
def test_pushes_that_are_lost_again_and_again_end_the_push(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(here: Cluster) -> None:
        losses = Losses(monkeypatch, 0)
        one, two = await opened(here)
        losses.left = 1_000
        one.push("o1", layer=0, first_block=0, blocks=3)
        with pytest.raises(TransferError, match="1 of 1 pushes were lost"):
            await one.close_push("o1")
        assert losses.lost == PUSH_TRIES
        await one.release("o1")
        await until(lambda: any(isinstance(message, TransferFailed) for message in here.heard["w2"]))
        await released(here, two)

    tell(nats_url, story)


@pytest.mark.parametrize("older", ["", "an agent that is older", "a decode worker that is older"])
@pytest.mark.parametrize("target", ["n1", "n2"])
def test_layers_that_queue_up_are_moved_and_told_of_together(
    nats_url: str, older: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "agent" in older:
        older_agents(monkeypatch)
    elif older:
        older_workers(monkeypatch)

    async def story(here: Cluster) -> None:
        await here.agent("n1")
        await here.agent("n2")
        one, two = await here.client("n1", "w1"), await here.client(target, "w2")
        put = await one.open_put("o1", keys(1, 2), blocks=3)
        fill(one, put.slots, 3)
        await one.open_push("o1", "r1", target_node_id=target, decode_worker_id="w2")
        one.push("o1", layer=0, layers=2, first_block=0, blocks=3)
        one.push("o1", layer=2, layers=1, first_block=0, blocks=3)
        one.push("o1", layer=3, layers=1, first_block=0, blocks=2)
        one.push("o1", layer=3, layers=1, first_block=2, blocks=1)
        moved = 0 if target == "n1" else 8192
        assert (await one.close_push("o1")).bytes == 3 * LAYERS * moved
        runs = [(0, 3, 0, 3), (3, 1, 0, 2), (3, 1, 2, 1)]
        if "worker" in older:
            runs = [(0, 1, 0, 3), (1, 1, 0, 3), (2, 1, 0, 3), *runs[1:]]
        await until(lambda: len(here.heard["w2"]) == 1 + len(runs))
        place, *told = here.heard["w2"]
        assert same(two, place.slots, 3)  # type: ignore[union-attr]
        ready = [message for message in told if isinstance(message, KvReady)]
        assert [(m.layer, m.layers, m.first_block, m.blocks) for m in ready] == runs
        assert [m.moved_bytes for m in ready] == [layers * blocks * moved for _, layers, _, blocks in runs]
        await released(here, one, two)

    tell(nats_url, story)
