"""A prefill worker computes prompts longer than its cache, with the bits of a worker whose cache holds them.

Real nats-server, real pools, the real worker with two layers of the real model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from store_harness import Cluster, cluster, keys, layout, until

from halfmoon.schemas import subjects
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Fetch, StartPrefill
from halfmoon.schemas.events import PrefillFailed, PrefillFinished, WorkerJoined
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.kv import PrefillResult, TransferOpened
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.tokens import TakeReply, TokensGiven
from halfmoon.store.pool.guard import WORKER
from halfmoon.store.pool.slots import Owner
from halfmoon.workers import token_inbox
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel, load_model
from halfmoon.workers.prefill.worker import PrefillWorker
from halfmoon.workers.worker import WorkerConfig
from tests.eventually import eventually
from tests.nats_in_process import run_at

LAYERS, BLOCK, SEGMENT = 2, 16, 32
#: Blocks of the cache, and a prompt of more than three times as many; the last one is half full.
CACHE, BLOCKS, TOKENS = 5, 17, 16 * 17 - 8
PROMPT = [(i * i * 31 + 17 * i) % 40000 + 20 for i in range(TOKENS)]
LAYOUT = changed(
    layout(layers=LAYERS, block_tokens=BLOCK, kv_heads=3, head_dim=64),
    numerics="exact",
    segment_tokens=SEGMENT,
)
KEYS = keys(*range(1, BLOCKS))
Story = Callable[["Nodes"], Awaitable[None]]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    found = load_model("smollm2-135m-instruct", dtype=torch.float32)
    return replace(found, config=replace(found.config, layers=LAYERS))


def make(model: LoadedModel, blocks: int) -> Engine:
    return Engine(model, num_blocks=blocks, block_tokens=BLOCK, exact=True, segment_tokens=SEGMENT)


@pytest.fixture(scope="module")
def whole(model: LoadedModel) -> tuple[str, np.ndarray]:
    """Digest of the last token's logits and the bytes of all whole blocks, `[blocks, layers, bytes]`, of an engine
    whose cache holds the prompt.
    """
    engine = make(model, BLOCKS)
    table, logits = engine.allocator.allocate(BLOCKS), None
    for at in range(0, TOKENS, BLOCK):
        logits = engine.prefill_chunk(PROMPT[at : at + BLOCK], at, table, want_logits=at + BLOCK >= TOKENS)
    assert logits is not None
    held = np.zeros((BLOCKS - 1, LAYERS, engine.cache.layer_block_bytes), dtype=np.uint8)
    for block in range(BLOCKS - 1):
        for layer in range(LAYERS):
            engine.cache.read_block(layer, table[block], held[block, layer])
    return engine.logits_digest(logits), held


@pytest.fixture(autouse=True)
def no_frontend_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none: what was given ahead is waited for, also on a machine whose other tests keep it busy."""
    monkeypatch.setattr(token_inbox, "GIVE_S", 30.0)


class Nodes:
    """Prefill workers with little cache, and a decode worker's node to push to."""

    def __init__(self, here: Cluster, model: LoadedModel) -> None:
        self.here, self.model = here, model
        self.workers: dict[str, PrefillWorker] = {}

    async def open(self) -> None:
        await self.here.agent("n-d", layout=LAYOUT, slots=64)
        self.decode = await self.here.client("n-d", "d1")
        for number in (1, 2):
            await self.here.agent(f"n{number}", layout=LAYOUT)
            store = await self.here.client(f"n{number}", f"p{number}")
            config = WorkerConfig(
                worker_id=f"p{number}",
                node_id=f"n{number}",
                layout=LAYOUT,
                profile=CostProfile(),
                kv_blocks=CACHE,
                context_tokens_max=1_000,
            )
            bus = await self.here.bus(f"p{number}-worker")
            worker = PrefillWorker(bus, make(self.model, CACHE), store, config)
            await worker.start()
            self.here.stack.push_async_callback(worker.stop)
            self.workers[config.worker_id] = worker

    async def order(self, worker_id: str, order_id: str, fetches: list[Fetch] | None = None) -> Any:
        """The worker's answer in the log."""
        worker = self.workers[worker_id]
        taken = TakeReply(
            token_ids=pack_tokens(PROMPT),
            block_keys=KEYS,
            max_tokens=1,
            sampling=Sampling(temperature=0.0, logits_digest=True),
        )
        given = TokensGiven(frontend_id="f1", order_id=order_id, taken=taken)
        await worker.bus.publish(subjects.give(worker_id, "f1"), given)
        worker.obey(
            StartPrefill(
                order_id=order_id,
                request_id=f"r{order_id}",
                frontend_id="f1",
                worker_id=worker_id,
                decode_worker_id="d1",
                decode_node_id="n-d",
                prompt_tokens=TOKENS,
                fetches=fetches or [],
            )
        )
        found: list[Any] = []

        async def answered() -> bool:
            kinds = (PrefillFinished, PrefillFailed)
            log = await self.here.log()
            found[:] = [e for e in log if isinstance(e, kinds) and e.order_id == order_id]
            return bool(found)

        await until(answered)
        assert worker.engine.allocator.free_blocks == CACHE
        return found[0]

    def result(self, order_id: str) -> PrefillResult | None:
        heard = self.here.heard["d1"]
        return next((m for m in heard if isinstance(m, PrefillResult) and m.order_id == order_id), None)

    def pushed(self, order_id: str) -> np.ndarray:
        """Whole blocks of the order at the decode node."""
        heard = self.here.heard["d1"]
        opened = next(m for m in heard if isinstance(m, TransferOpened) and m.order_id == order_id)
        blocks: np.ndarray = self.decode.view.blocks[opened.slots[: BLOCKS - 1]].copy()
        return blocks


def play(nats_url: str, model: LoadedModel, story: Story) -> None:
    async def run() -> None:
        async with cluster(nats_url) as here:
            nodes = Nodes(here, model)
            await nodes.open()
            await story(nodes)

    run_at(nats_url, run())


@pytest.mark.pure
def test_a_prompt_longer_than_the_cache_computed_cached_and_fetched(
    nats_url: str, model: LoadedModel, whole: tuple[str, np.ndarray]
) -> None:
    async def story(nodes: Nodes) -> None:
        joined = [event for event in await nodes.here.log() if isinstance(event, WorkerJoined)]
        assert [event.prompt_tokens_max for event in joined] == [1_000, 1_000]
        orders = [("p1", "1-1", []), ("p1", "2-1", []), ("p2", "3-1", [Fetch("n1", 0, BLOCKS - 1)])]
        seen = []
        for worker_id, order_id, fetches in orders:
            finished = await nodes.order(worker_id, order_id, fetches)
            assert isinstance(finished, PrefillFinished), finished
            result = await eventually(lambda order_id=order_id: nodes.result(order_id), "d1 has heard of it")
            assert result.first.logits_digest == whole[0], order_id
            assert np.array_equal(nodes.pushed(order_id), whole[1]), order_id
            seen.append((finished.cached_local_tokens, finished.cached_fetched_tokens))
        prefix = (BLOCKS - 1) * BLOCK
        assert seen == [(0, 0), (prefix, 0), (0, prefix)]

    play(nats_url, model, story)


@pytest.mark.pure
@pytest.mark.parametrize("cached", [False, True], ids=["it attended to them", "it loaded them"])
def test_slots_that_were_given_away_while_it_computed_are_noticed(
    nats_url: str, model: LoadedModel, cached: bool
) -> None:
    """A lease may end under a process that stands still; a token drawn from others' bytes would be wrong."""

    async def story(nodes: Nodes) -> None:
        worker, loop = nodes.workers["p1"], asyncio.get_running_loop()
        guard, compute = nodes.here.agents["n1"].context.guard, worker.engine.prefill_chunk
        if cached:
            assert isinstance(await nodes.order("p1", "1-0"), PrefillFinished)

        async def give_away() -> None:
            guard.release(Owner("1-1", "p1"), writers=[WORKER])
            guard.open_put(Owner("other", "w"), [], guard.counts().slots, writer="w")

        def interrupted(*args: Any, want_logits: bool, **named: Any) -> Any:
            logits = compute(*args, want_logits=want_logits, **named)
            if want_logits:
                asyncio.run_coroutine_threadsafe(give_away(), loop).result()
            return logits

        worker.engine.prefill_chunk = interrupted
        failed = await nodes.order("p1", "1-1")
        assert isinstance(failed, PrefillFailed), failed
        assert failed.retryable
        assert "was given to another order" in failed.reason
        assert nodes.result("1-1") is None

    play(nats_url, model, story)
