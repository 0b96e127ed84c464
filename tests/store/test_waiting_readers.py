"""A decode worker whose cache has no room yet keeps its slots in the pool for as long as it waits;
one that stood still learns whether they were still its own."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest
from lease_clock import LEASE_NS, LEASES, LeaseClock
from store_harness import Cluster, cluster, keys, layout, until

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import CancelOrder, StartDecode
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.subjects import give
from halfmoon.schemas.tokens import TakeReply, TokensGiven
from halfmoon.store.agent.release import release_order
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.pool.slots import Owner
from halfmoon.workers.decode.worker import DecodeWorker
from halfmoon.workers.worker import WorkerConfig
from tests.eventually import BOUND_S
from tests.nats_in_process import run_at

BLOCKS = 3
ORDER = StartDecode(
    order_id="5-1",
    request_id="r1",
    frontend_id="f1",
    worker_id="d1",
    prefill_worker_id="p1",
    prompt_tokens=BLOCKS * layout().block_tokens,
    max_tokens=1,
    tbt_slo_ns=0,
    placement=1,
)


@asynccontextmanager
async def decode_worker(
    here: Cluster, numerics: str, cache: object, kv_blocks: int
) -> AsyncIterator[DecodeWorker]:
    """`d1` on node `n-d`, which has its prompt and its order; the KV is still at `p1` on `n-p`."""
    decode = await here.client("n-d", "d1")
    config = WorkerConfig(
        worker_id="d1",
        node_id="n-d",
        layout=msgspec.structs.replace(layout(), numerics=numerics),
        profile=CostProfile(),
        kv_blocks=kv_blocks,
        context_tokens_max=1_000,
    )
    engine = SimpleNamespace(config=SimpleNamespace(eos_token_ids=[]), cache=cache)
    bus = await here.bus("d1")
    worker = DecodeWorker(bus, engine, decode, config)
    await worker.inbox.open()
    await worker.prepare()
    try:
        taken = TakeReply(token_ids=pack_tokens([1] * ORDER.prompt_tokens))
        given = TokensGiven(frontend_id=ORDER.frontend_id, order_id="5-1", taken=taken)
        await bus.publish(give("d1", ORDER.frontend_id), given)
        worker.obey(ORDER)
        yield worker
    finally:
        await worker.stop()


async def push_all(prefill: AgentClient) -> None:
    await prefill.open_put("5-1", keys(1, 2, 3), blocks=BLOCKS)
    await prefill.open_push("5-1", "r1", target_node_id="n-d", decode_worker_id="d1")
    for layer in range(layout().layers):
        prefill.push("5-1", layer=layer, first_block=0, blocks=BLOCKS)
    await prefill.close_push("5-1")
    await prefill.release("5-1")


@pytest.mark.pure
def test_kv_that_waits_for_room_longer_than_a_lease_is_still_there(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LeaseClock(monkeypatch)

    async def story() -> None:
        async with cluster(nats_url) as here:
            await here.agent("n-p", **LEASES)
            target = await here.agent("n-d", **LEASES)
            prefill = await here.client("n-p", "p1")
            async with decode_worker(here, "exact", None, BLOCKS - 1) as worker:
                await push_all(prefill)
                await until(lambda: worker.state.orders.leased() == ["5-1"])
                await clock.passes(3 * LEASE_NS, target, renewed=[Owner("5-1", "d1")])
                counts = target.context.guard.counts()
                assert (counts.holds, counts.leased) == (1, BLOCKS), counts
                worker.obey(CancelOrder(order_id="5-1", worker_id="d1"))
                await until(lambda: target.context.guard.counts().holds == 0)

    run_at(nats_url, story())


class StoppedCache:
    """A cache into which nothing is copied before `go_on` is set: its process stands still."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def write_block(self, layer: int, block: int, content: object, tokens: int = 0) -> None:
        self.go_on.wait(BOUND_S)


@pytest.mark.pure
@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_worker_that_stood_still_learns_whether_its_slots_were_given_away(
    nats_url: str, withdrawn: bool
) -> None:
    """In fast numerics, where it would share what it computes from them."""

    async def story() -> None:
        async with cluster(nats_url) as here:
            await here.agent("n-p")
            target = await here.agent("n-d")
            prefill, cache = await here.client("n-p", "p1"), StoppedCache()
            async with decode_worker(here, "fast", cache, BLOCKS) as worker:
                await push_all(prefill)
                sequence = worker.state.orders.open["5-1"]
                await until(lambda: bool(sequence.kv.copying))
                if withdrawn:  # as the conductor does for an order that another worker has now
                    await release_order(target.context, "5-1")
                cache.go_on.set()
                await until(lambda: sequence.released and target.context.guard.counts().holds == 0)
                await until(lambda: sequence.lease_held or withdrawn)
                assert sequence.lease_held is not withdrawn

    run_at(nats_url, story())
