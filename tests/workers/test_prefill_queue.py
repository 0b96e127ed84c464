"""Orders of a prefill worker that are cancelled while they wait for another one. Real bus, no model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import CancelOrder, StartPrefill
from halfmoon.schemas.events import WorkerJoined
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.kv import KvMessage, PrefillResult
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.tokens import TakeReply, TakeRequest, TokensGiven
from halfmoon.workers.model.loading.files import load_config
from halfmoon.workers.model.null_engine import NullEngine
from halfmoon.workers.prefill.stages import PrefillStage
from halfmoon.workers.prefill.worker import PrefillWorker
from halfmoon.workers.worker import WorkerConfig
from tests.eventually import BOUND_S, eventually
from tests.nats_in_process import in_process

LAYOUT = Layout(
    model="null", model_fingerprint="null", layers=0, kv_heads=0, head_dim=0, block_tokens=256, dtype="none"
)
TOKENS = [1, 2, 3]


def order(number: int) -> StartPrefill:
    return StartPrefill(
        order_id=f"{number}-0",
        request_id=f"r{number}",
        frontend_id="silent",
        worker_id="p1",
        decode_worker_id="d1",
        decode_node_id="n2",
        prompt_tokens=len(TOKENS),
    )


class Bench:
    """One prefill worker, whose frontend is the test: an order waits for as long as its tokens are not given."""

    def __init__(self, bus: Bus, worker: PrefillWorker) -> None:
        self.bus = bus
        self.worker = worker
        self.results: list[str] = []

    async def give(self, number: int) -> None:
        taken = TakeReply(token_ids=pack_tokens(TOKENS), max_tokens=1)
        given = TokensGiven(frontend_id="silent", order_id=f"{number}-0", taken=taken)
        await self.bus.publish(subjects.give("p1", "silent"), given)

    async def result_of(self, number: int) -> None:
        await eventually(lambda: f"{number}-0" in self.results, f"the result of order {number}")


@contextlib.asynccontextmanager
async def benched(url: str) -> AsyncIterator[Bench]:
    bus = await Bus.connect(BusConfig(url=url), name="test")
    engine = NullEngine(load_config("smollm2-135m-instruct"), num_blocks=64, block_tokens=256)
    config = WorkerConfig(
        worker_id="p1",
        node_id="n1",
        layout=LAYOUT,
        profile=CostProfile(),
        kv_blocks=64,
        context_tokens_max=8192,
        exact_numerics="not_held",
    )
    worker = PrefillWorker(bus, engine, None, config)
    made = Bench(bus, worker)

    def note(message: Any) -> None:
        if isinstance(message, PrefillResult):
            made.results.append(message.order_id)

    await bus.subscribe(subjects.kv_for("d1"), KvMessage, note)
    ended = asyncio.Event()

    async def say_nothing(_: TakeRequest) -> None:
        await ended.wait()

    await bus.serve(subjects.take("silent", "p1"), TakeRequest, say_nothing)
    await worker.start()
    yield made
    ended.set()
    await worker.stop()
    await bus.close()


@pytest.mark.pure
@in_process
async def test_a_cancelled_order_leaves_the_queue_at_once(url: str) -> None:
    async with benched(url) as bench:
        worker = bench.worker
        for number in (1, 2, 3):
            worker.obey(order(number))
        assert worker.heartbeat().orders == ["1-0", "2-0", "3-0"]
        worker.obey(CancelOrder(order_id="2-0", worker_id="p1"))
        assert worker.heartbeat().orders == ["1-0", "3-0"]
        assert worker.heartbeat().queued == 2
        await bench.give(3)
        await bench.give(1)
        await bench.result_of(3)
        assert bench.results == ["1-0", "3-0"]
        assert worker.orders_open() == 0


@pytest.mark.pure
@in_process
async def test_the_first_of_the_queue_is_cancelled_while_it_waits_for_its_tokens(url: str) -> None:
    async with benched(url) as bench:
        worker = bench.worker
        for number in (1, 2):
            worker.obey(order(number))
        await bench.give(2)
        await eventually(
            lambda: worker.state.jobs["2-0"].stage is PrefillStage.PREPARED, "the second could begin"
        )
        assert worker.state.turn is None  # in the order of arrival
        assert bench.results == []
        worker.obey(CancelOrder(order_id="1-0", worker_id="p1"))
        await bench.result_of(2)
        assert bench.results == ["2-0"]
        assert worker.orders_open() == 0
        assert not worker.failed.done()


@pytest.mark.pure
@in_process
async def test_a_worker_tells_the_log_what_it_found_of_its_cpu(url: str) -> None:
    async with benched(url) as bench:
        async with asyncio.timeout(BOUND_S):
            async for stamped in bench.bus.events(after=0):
                if isinstance(stamped.event, WorkerJoined):
                    assert stamped.event.exact_numerics == "not_held"
                    return
