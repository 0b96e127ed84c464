"""A real nats-server, a real frontend, and a double that stands for all other processes of a cluster.

The double speaks the real messages over the real NATS: it reads the log as a conductor does, takes tokens and
delivers as workers do. What it says is its script's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import orjson

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.tasks import end_tasks
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import Decision, FailRequest, Ordered, RejectRequest, StartPrefill
from halfmoon.schemas.events import Event, RequestArrived
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.policy import Layout, Policy
from halfmoon.schemas.sampling import SampledToken, pack_logprobs
from halfmoon.schemas.status import ConductorStatus, NodeStatus, StatusRequest
from halfmoon.schemas.tokens import (
    Delivery,
    ResendReply,
    ResendRequest,
    TakeReply,
    TakeRequest,
    Timing,
    TokensSampled,
)
from halfmoon.schemas.types import ExactNumerics
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.frontend import Frontend
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.eventually import BOUND_S, Late, eventually
from tests.in_process import InProcessLoop

MODEL = "smollm2-135m-instruct"
LAYOUT = Layout(
    model=MODEL, model_fingerprint="f", layers=2, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32"
)
ANSWER = "Half moons: 🌓 and 🌗.\n\nThe naïve Zoë says “halló”; 半月が出た。 Then STOP and the rest."
_numbers = itertools.count(1)
TIMING = Timing(
    queue_ns=1_000_000,
    transfer_ns=2_000_000,
    prefill_ns=3_000_000,
    cached_tokens=16,
    prefill_worker="p1",
    decode_worker="d1",
)


class Double:
    """Everything behind the frontend. `script(double, seq, arrived)` runs for each request that arrives."""

    def __init__(self, bus: Bus, tokenizer: Tokenizer, frontend_id: str) -> None:
        self.bus = bus
        #: Set where it is made: the double is there before.
        self.frontend: Frontend
        self.frontend_id = frontend_id
        self.tokenizer = tokenizer
        self.eos = min(tokenizer.eos_ids)
        self.answer_ids = [*tokenizer.encode(ANSWER), self.eos]
        self.script: Callable[[Double, int, RequestArrived], Awaitable[None]] = whole_answer
        self.events: list[Event] = []
        self.resend: Callable[[ResendRequest], ResendReply] = lambda _: ResendReply(known=False)
        self.resend_requests: list[ResendRequest] = []
        self.ready = True
        self.no_attention = ""
        self.exact_numerics: ExactNumerics = ""
        self.request_tokens_max = 0
        self.failures: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        after = await self.bus.last_seq()
        await self.bus.serve(subjects.resend("d1", self.frontend_id), ResendRequest, self._on_resend)
        await self.bus.serve(subjects.resend("d2", self.frontend_id), ResendRequest, self._on_resend)
        await self.bus.serve(subjects.status("conductors"), StatusRequest, self._on_status)
        self._spawn(self._follow(after))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(task.exception())  # type: ignore[arg-type]

    async def stop(self) -> None:
        while self._tasks:
            await end_tasks(list(self._tasks))
            await asyncio.sleep(0)  # they are noted as done

    async def _follow(self, after: int) -> None:
        async for stamped in self.bus.events(after=after):
            self.events.append(stamped.event)
            if isinstance(stamped.event, RequestArrived) and stamped.event.frontend_id == self.frontend_id:
                self._spawn(self.script(self, stamped.seq, stamped.event))

    def _on_resend(self, request: ResendRequest) -> ResendReply:
        self.resend_requests.append(request)
        return self.resend(request)

    def _on_status(self, _: StatusRequest) -> ConductorStatus:
        nodes = [
            NodeStatus(id="p1", role="prefill", state="ready", node_id="n1", kv_used=1, kv_total=8),
            NodeStatus(
                id="d1",
                role="decode",
                state="ready",
                node_id="n2",
                running=2,
                exact_numerics=self.exact_numerics,
                no_attention=self.no_attention,
            ),
            NodeStatus(id=self.frontend_id, role="frontend", state="ready"),
        ]
        return ConductorStatus(
            conductor_id="c1",
            seq=5,
            digest="00ff",
            caught_up=True,
            policy=Policy(),
            request_tokens_max=self.request_tokens_max,
            nodes=nodes if self.ready else [],
        )

    # --- what workers do ------------------------------------------------------------------------------------

    async def take(self, arrived: RequestArrived, order_id: str, role: str, worker_id: str) -> TakeReply:
        request = TakeRequest(
            request_id=arrived.request_id, order_id=order_id, worker_id=worker_id, role=role
        )  # type: ignore[arg-type]
        return await self.bus.request(
            subjects.take(arrived.frontend_id, worker_id), request, TakeReply, timeout_s=BOUND_S
        )

    async def place(self, arrived: RequestArrived, order_id: str, worker_id: str = "d1") -> TakeReply:
        """As a conductor, and as both workers of the order; what the decode worker got."""
        order = StartPrefill(
            order_id=order_id,
            request_id=arrived.request_id,
            frontend_id=arrived.frontend_id,
            worker_id="p1",
            decode_worker_id=worker_id,
            decode_node_id="n2",
            prompt_tokens=arrived.prompt_tokens,
        )
        ordered = Ordered(cause_seq=int(order_id.partition("-")[0]), position=0, decision=order)
        await self.bus.order(ordered, target_id="p1")
        await self.take(arrived, order_id, "prefill", "p1")
        return await self.take(arrived, order_id, "decode", worker_id)

    def delivery(
        self, arrived: RequestArrived, order_id: str, first: int, ids: list[int], finish_reason: str = ""
    ) -> Delivery:
        tokens = [
            SampledToken(
                token_id=token, logprob=-0.5, top_logprobs=[(token, -0.5), (5, -1.5)], logits_digest="ab"
            )
            for token in ids
        ]
        return Delivery(
            request_id=arrived.request_id,
            order_id=order_id,
            index=first,
            tokens=tokens,
            finish_reason=finish_reason,  # type: ignore[arg-type]
            timing=TIMING if first == 0 else None,
        )

    async def deliver(self, *deliveries: Delivery, worker_id: str = "d1") -> None:
        message = TokensSampled(worker_id=worker_id, deliveries=list(deliveries))
        await self.bus.publish(subjects.tokens(self.frontend_id, worker_id), message)

    async def order(self, decision: Decision, seq: int, position: int = 0) -> None:
        await self.bus.order(
            Ordered(cause_seq=seq, position=position, decision=decision), target_id=self.frontend_id
        )

    async def reject(self, arrived: RequestArrived, seq: int, **fields: Any) -> None:
        """What the conductors say of a request that they do not take: `fields` of RejectRequest."""
        decision = RejectRequest(request_id=arrived.request_id, frontend_id=self.frontend_id, **fields)
        await self.order(decision, seq)

    def output(self, arrived: RequestArrived) -> tuple[list[int], str]:
        """The tokens that any worker would generate, and how they end."""
        if arrived.max_tokens >= len(self.answer_ids):
            return self.answer_ids, "stop"
        return self.answer_ids[: arrived.max_tokens], "length"

    async def heard(self, arrived: RequestArrived, count: int) -> None:
        """Returns when the frontend has so many tokens of the request: what is said from now on comes later."""
        request = self.frontend.registry.requests[arrived.request_id]
        await eventually(lambda: len(request.output_ids) >= count, f"the frontend has {count} tokens")

    async def wait_for(self, kind: type[Event], count: int = 1) -> list[Any]:
        """The events of that kind, once there are so many."""

        def found() -> list[Event]:
            return [event for event in self.events if isinstance(event, kind)]

        try:
            await eventually(lambda: len(found()) >= count, f"{count} of {kind.__name__}", every_s=0.01)
        except Late as late:
            late.add_note(f"there are {[type(event).__name__ for event in self.events]}")
            raise
        return found()


async def whole_answer(double: Double, seq: int, arrived: RequestArrived) -> None:
    """One token a message, as decode steps do."""
    order_id = f"{seq}-0"
    reply = await double.place(arrived, order_id)
    assert len(unpack_tokens(reply.token_ids)) == arrived.prompt_tokens
    ids, reason = double.output(arrived)
    for index in range(len(reply.output_ids) // 4, len(ids)):
        last = index == len(ids) - 1
        delivery = double.delivery(arrived, order_id, index, [ids[index]], reason if last else "")
        await double.deliver(scored(delivery, reply) if not index else delivery)


def scored(delivery: Delivery, reply: TakeReply) -> Delivery:
    """With how likely the prompt's own tokens were, where that was asked for: each is less so than token 5 and
    those behind it.
    """
    if (top := reply.sampling.prompt_logprobs) < 0:
        return delivery
    likely = tuple((5 + place, -1.0 - place) for place in range(top))
    rows = [(top + 2, -9.5, likely)] * (len(reply.token_ids) // 4 - 1)
    first, *others = delivery.tokens
    first = msgspec.structs.replace(first, prompt_logprobs=pack_logprobs(rows, top))
    return msgspec.structs.replace(delivery, tokens=[first, *others])


async def fail(double: Double, seq: int, arrived: RequestArrived) -> None:
    """Accepted, and given up."""
    failed = FailRequest(
        request_id=arrived.request_id, frontend_id=arrived.frontend_id, message="placed 3 times"
    )
    await double.order(failed, seq)


class FailsLater:
    """The double's script: one token, and a failure when `seen` is set."""

    def __init__(self) -> None:
        self.seen = asyncio.Event()

    async def __call__(self, double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, double.answer_ids[:1]))
        await self.seen.wait()
        await fail(double, seq, arrived)


@dataclasses.dataclass
class Cluster:
    """A frontend, its double, and clients of both edges."""

    frontend: Frontend
    double: Double
    client: Bus
    http: aiohttp.ClientSession
    url: str
    nats_url: str

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, Any]:
        """(status, headers, JSON)."""
        payload = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        async with self.http.post(self.url + path, data=payload, headers=headers, **options) as response:
            return response.status, response.headers, orjson.loads(await response.read())

    async def http_get(self, path: str, **options: Any) -> tuple[int, Any, bytes]:
        """(status, headers, body)."""
        async with self.http.get(self.url + path, **options) as response:
            return response.status, response.headers, await response.read()

    async def sse(self, path: str, body: Any) -> list[Any]:
        """The events of a stream; "[DONE]" as text."""
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"].startswith("text/event-stream")
            events = (await response.read()).decode().split("\n\n")
        assert events.pop() == ""
        texts = [event.removeprefix("data: ") for event in events]
        return [text if text == "[DONE]" else orjson.loads(text) for text in texts]

    async def ask(
        self, name: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[dict[str, str], Any]:
        """(headers, JSON) of one answer over NATS."""
        payload = body if isinstance(body, bytes) else orjson.dumps(body)
        reply = await self.client.nc.request(f"halfmoon.v1.{name}", payload, timeout=BOUND_S, headers=headers)
        return dict(reply.headers or {}), orjson.loads(reply.data)

    async def stream(self, name: str, body: Any) -> list[Any]:
        """All messages of a NATS stream, up to the last."""
        inbox = self.client.nc.new_inbox()
        subscription = await self.client.nc.subscribe(inbox)
        await self.client.nc.publish(
            f"halfmoon.v1.{name}", orjson.dumps({**body, "stream": True}), reply=inbox
        )
        messages = []
        while True:
            message = await subscription.next_msg(timeout=BOUND_S)
            messages.append(orjson.loads(message.data))
            if messages[-1].get("done") or "error" in messages[-1]:
                await subscription.unsubscribe()
                return messages


def inboxes_of_a_client(bus: Bus, prefix: bytes = b"_INBOX") -> None:
    """It is no process of ours."""
    bus.nc._inbox_prefix = bytearray(prefix)
    bus.nc._resp_sub_prefix = None


@contextlib.asynccontextmanager
async def cluster(
    server_url: str, tokenizer: Tokenizer, *, layout: Layout = LAYOUT, **options: Any
) -> AsyncIterator[Cluster]:
    """Checks what must be so at the end of any scenario."""
    frontend_id = f"f{next(_numbers)}"
    settings: dict[str, Any] = {
        "http_port": 0,
        "model": MODEL,
        "context_tokens": 2048,
        "drain_ns_max": 2 * 10**9,
    }
    config = FrontendConfig(frontend_id=frontend_id, **{**settings, **options})
    buses = [
        await Bus.connect(BusConfig(url=server_url), name=name) for name in ("frontend", "double", "client")
    ]
    inboxes_of_a_client(buses[2])
    try:
        double = Double(buses[1], tokenizer, frontend_id)
        await double.start()
        frontend = double.frontend = Frontend(buses[0], config, tokenizer, layout)
        await frontend.start()
        loop = asyncio.get_running_loop()
        connector = loop.connector() if isinstance(loop, InProcessLoop) else None
        patience = aiohttp.ClientTimeout(total=BOUND_S)
        async with aiohttp.ClientSession(timeout=patience, connector=connector) as http:
            yield Cluster(frontend, double, buses[2], http, frontend.http_url, server_url)
        await frontend.stop()
        await double.stop()
        assert not frontend.registry.requests
        assert not double.failures, double.failures
        assert not [bus.invalid for bus in buses[1:] if bus.invalid]
    finally:
        for bus in buses:
            await bus.close(flush_s=0.5)
