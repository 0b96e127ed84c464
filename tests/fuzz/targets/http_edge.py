"""Requests to every path of a frontend, in one process and without a socket.

The registry, both parsers, the handlers and the page are those of a real frontend. Its bus is scripted: a worker
answers, refuses, falls silent or leaves tokens out, as the input says. Every input is a connection of its own, whose
client hangs up once nothing more comes. (`http` and `http_bytes` play the same over real sockets and a real server.)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlparse

from halfmoon.bus.edge.http_server import _Server
from halfmoon.bus.errors import PeerError, PeerUnreachable
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import decode, encode
from halfmoon.schemas.decisions import Ordered, RejectRequest, StartPrefill
from halfmoon.schemas.events import Event, RequestArrived
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.status import ConductorStatus
from halfmoon.schemas.tokens import DecodeGiven, Delivery, TakeReply, TokensGiven, TokensSampled
from halfmoon.schemas.view import ClusterView
from halfmoon.workers.frontend import cluster_status
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.frontend import Frontend
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.eventually import eventually
from tests.frontend.frontend_double import LAYOUT, MODEL, TIMING, scored
from tests.fuzz.frame import Found, Play, found_where_late
from tests.fuzz.http_player import LAST, PAGE_STREAM, judged
from tests.fuzz.targets import http, http_bytes
from tests.fuzz.targets.nats_wire import sample

TEST_INPUTS = 300
INPUTS_MEANT = 1_200_000
DEADLINE_S = 20.0
FRONTEND = "f1"
#: What a worker does with a request, by the input's first byte.
SCRIPTS = ("whole", "whole", "whole", "whole", "rejected", "silent", "gap", "another's")
#: Rounds of the event loop after which nothing more comes of what was sent.
QUIET_ROUNDS = 12
ROUNDS_MAX = 5000


def make(draw: random.Random) -> bytes:
    """A byte for the script, one for the cut of what is sent, and that."""
    sent = (http if draw.random() < 0.9 else http_bytes).make(draw)
    return bytes([draw.randrange(len(SCRIPTS)), draw.randrange(256)]) + sent


class ScriptedBus:
    """A bus whose other end is a conductor and a worker that obey `script`."""

    def __init__(self) -> None:
        self.script = SCRIPTS[0]
        self.nc: Any = self
        self.is_connected, self.is_closed = True, False
        self.connected_url = urlparse("nats://127.0.0.1:4222")
        self.stats = {"reconnects": 0, "in_msgs": 0, "out_msgs": 0, "in_bytes": 0, "out_bytes": 0}
        self.unacknowledged = self.invalid = 0
        self.unstored_s = 0.0
        self.max_payload = 8 << 20
        self._heard: dict[str, Callable[[Any], Any]] = {}
        self._orders: asyncio.Queue[Ordered] = asyncio.Queue()
        self._given: TakeReply | None = None
        self._seq = 0
        self.status = ConductorStatus(
            conductor_id="c1",
            seq=5,
            digest="00",
            caught_up=True,
            policy=Policy(),
            request_tokens_max=0,
            nodes=[],
        )
        view = {**sample(random.Random(1), ClusterView), "conductor_id": "c1", "full": True}
        self.view: ClusterView = decode(encode(view), ClusterView)

    # --- as the registry and the edge know it ---------------------------------------------------------------

    async def open_decisions(self, target_id: str) -> str:
        return "decisions"

    async def open_placements(self, frontend_id: str) -> str:
        return "placements"

    async def follow_decisions(self, tail: str) -> AsyncIterator[Ordered]:
        """Rejections are the only decisions; placements are told to the registry at once."""
        while True:
            yield await (self._orders.get() if tail == "decisions" else asyncio.Future())

    async def serve(self, subject: str, *_: Any, **__: Any) -> None:
        pass

    async def subscribe(self, subject: str, *args: Any, cb: Any = None, **_: Any) -> Any:
        """The bus' own, and that of NATS' client, which has a `cb`."""
        self._heard[subject.removesuffix(".*")] = cb or args[1]
        return SimpleNamespace(unsubscribe=self.flush)

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        if subject == subjects.status(subjects.CONDUCTORS):
            await self._heard[reply](SimpleNamespace(data=encode(self.status)))

    def send(self, subject: str, payload: bytes, reply: str = "") -> None:
        if subject == subjects.view(subjects.CONDUCTORS):
            asyncio.get_running_loop().call_soon(self._heard[reply.rpartition(".")[0]], self.view)
        elif subject == subjects.give("d1", FRONTEND):
            self._given = decode(payload, TokensGiven | DecodeGiven).taken

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def request(self, subject: str, message: Any, kind: Any, **_: Any) -> Any:
        await asyncio.sleep(0)
        encode(message)
        if kind is ConductorStatus:
            return self.status
        if kind is ClusterView:
            return self.view
        if subject == subjects.explain("c1"):
            raise PeerError("not_found", "no such request")
        raise PeerUnreachable(f"{subject}: nobody answers")

    async def append(self, event: Event, *, source_id: str) -> int:
        return 1

    def append_soon(self, event: Event, *, source_id: str) -> None:
        encode(event)
        if isinstance(event, RequestArrived):
            self._seq += 1
            asyncio.get_running_loop().call_soon(self._act, event, f"{self._seq}-0")

    async def flush(self, timeout_s: float = 0.0) -> bool:
        return True

    # --- as conductor and worker ----------------------------------------------------------------------------

    def _act(self, arrived: RequestArrived, order_id: str) -> None:
        if self.script == "rejected":
            rejected = RejectRequest(
                request_id=arrived.request_id, frontend_id=FRONTEND, reason="ttft_slo", message="no"
            )
            self._orders.put_nowait(Ordered(cause_seq=self._seq, position=0, decision=rejected))
        if self.script in ("rejected", "silent"):
            return
        self._given = None
        self.placed(
            StartPrefill(
                order_id=order_id, request_id=arrived.request_id, frontend_id=FRONTEND, worker_id="p1",
                decode_worker_id="d1", decode_node_id="n2", prompt_tokens=arrived.prompt_tokens,
            )
        )  # fmt: skip
        first = 1 if self.script == "gap" else 0
        count = min(arrived.max_tokens, 3)
        tokens = [
            SampledToken(token_id=5 + index, logprob=-0.5, top_logprobs=[(5, -0.5)], logits_digest="ab")
            for index in range(first, count)
        ]
        ended: Any = "length" if count == arrived.max_tokens else "stop"
        delivery = Delivery(
            request_id=arrived.request_id, order_id=order_id, index=first, tokens=tokens, finish_reason=ended,
            timing=None if first else TIMING,
        )  # fmt: skip
        if self._given is not None and not first:
            delivery = scored(delivery, self._given)
        worker = "d2" if self.script == "another's" else "d1"
        self._heard[subjects.tokens(FRONTEND, "*").removesuffix(".*")](
            TokensSampled(worker_id=worker, deliveries=[delivery])
        )

    #: Told by the registry's own reader of placements, elsewhere.
    placed: Callable[[StartPrefill], None]


class Wire(asyncio.Transport):
    """The server's end of a connection whose other end keeps what it is sent."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.received = bytearray()
        self.closed = False
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 5) if name == "peername" else default

    def write(self, data: Any) -> None:
        if self.closed:
            raise Found("it writes to a connection that it has closed")
        self.received += data

    def writelines(self, list_of_data: Any) -> None:
        for part in list_of_data:
            self.write(part)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close


class Edge:
    """A frontend, and one connection to it for each input. `play` raises Found."""

    def __init__(self) -> None:
        self.bus = ScriptedBus()
        config = FrontendConfig(
            frontend_id=FRONTEND,
            http_port=0,
            model=MODEL,
            context_tokens=2048,
            nats_api=False,
            drain_ns_max=10**9,
        )
        self._frontend = Frontend(self.bus, config, Tokenizer.load(MODEL), LAYOUT)  # type: ignore[arg-type]
        self._registry = self._frontend.registry
        registry = self._registry
        self.bus.placed = lambda order: registry.exchange.on_placed(
            order, order.worker_id, order.decode_worker_id
        )

    async def start(self) -> None:
        await self._frontend.start()
        assert self._frontend._http is not None
        self._server = self._frontend._http._server
        self._connect = _Server(self._server)
        await self._round(50)
        self._tasks = len(asyncio.all_tasks())

    async def stop(self) -> None:
        await self._frontend.stop()

    async def play(self, content: bytes) -> str:
        if len(content) < 2:
            return "too short"
        self.bus.script = SCRIPTS[content[0] % len(SCRIPTS)]
        sent = content[2:] + LAST
        cut = len(sent) * content[1] // 255
        protocol = self._connect()
        wire = Wire(protocol)
        protocol.connection_made(wire)
        for part in (sent[:cut], sent[cut:]):
            if part and not wire.closed:
                protocol.data_received(part)
                await asyncio.sleep(0)
        await self._quiet(wire)
        left = not wire.closed
        if left:
            protocol.eof_received()
            wire.close()
        await self._ended()
        try:
            statuses = " ".join(sorted(set(judged(bytes(wire.received)))))
        except (ValueError, KeyError) as problem:
            raise Found(f"{problem!r} in {bytes(wire.received[:600])!r}") from None
        return f"{statuses or 'nothing'}{', left' if left else ''}"

    async def _quiet(self, wire: Wire) -> None:
        quiet = 0
        while quiet < QUIET_ROUNDS and not wire.closed and PAGE_STREAM not in wire.received:
            count = len(wire.received)
            tokenized = await self._tokenized()
            await asyncio.sleep(0)
            quiet = 0 if len(wire.received) > count or tokenized else quiet + 1

    async def _ended(self) -> None:
        """Nothing of the connection is left."""
        for _ in range(ROUNDS_MAX):
            if (
                not self._registry.requests
                and not self._server.room.connections
                and len(asyncio.all_tasks()) <= self._tasks
            ):
                return
            await self._tokenized()
            await asyncio.sleep(0)
        tasks = [str(task)[:300] for task in asyncio.all_tasks()]
        raise Found(f"left behind: {list(self._registry.requests)}, {self._server.room.connections}, {tasks}")

    async def _tokenized(self) -> bool:
        """Returns when the thread tokenizes no prompt; whether it did."""
        prompts = self._registry.prompts
        if not prompts.pending:
            return False
        with found_where_late():
            await eventually(lambda: not prompts.pending, "the prompts are tokenized", every_s=0.001)
        return True

    async def _round(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with mock.patch.object(cluster_status, "GATHER_S", 0), asyncio.Runner() as runner:
        edge = Edge()
        run = runner.get_loop().run_until_complete
        run(edge.start())
        problems: deque[dict[str, Any]] = deque(maxlen=10)
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))

        def play(content: bytes) -> str:
            outcome = run(edge.play(content))
            if problems:
                told = problems[0]
                problems.clear()
                raise told.get("exception") or Found(str(told))
            return outcome

        try:
            yield play
        finally:
            run(edge.stop())
