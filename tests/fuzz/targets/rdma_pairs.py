"""What reaches an agent's RDMA side: offers of queue pairs and answers to ours, from strangers and from peers that have
the secret and send nonsense; what is written into its mailboxes, and completions of the device in any order.

All of the transport is real but the device: a stand-in for pyverbs that takes numbers as wide as the hardware's, as
pyverbs does. Whatever comes, it is taken or refused and counted, an honest offer still makes a pair afterwards, and no
pair, mailbox, hold or writer is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.store import QueuePair
from halfmoon.store.errors import StoreError, TransferError
from halfmoon.store.transports.base import Call, Peer, Run, ServedPool, Slice
from halfmoon.store.transports.rdma import transport, verbs, wire
from halfmoon.store.transports.rdma.connection import CELL_BYTES, CELLS, RECEIVED
from halfmoon.store.transports.rdma.device import Port
from halfmoon.store.transports.rdma.options import RdmaOptions
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_json
from tests.fuzz.targets import data_plane
from tests.fuzz.targets.data_plane import LAYERS, ORDER, PARTY, SLOTS

TEST_INPUTS = 400
INPUTS_MEANT = 500_000
SECRET = "the cluster's secret"
DEADLINE_S = 20.0
#: Of the event loop, after which a move waits for its other end, or for the thread.
ROUNDS = 12
PORT = Port("mlx", 1, True, 0, 3, "::ffff:10.77.0.1", "eth0", 4096)
ENUMS = [
    "WC_SUCCESS",
    "WC_WR_FLUSH_ERR",
    "WC_REM_ACCESS_ERR",
    "WC_RETRY_EXC_ERR",
    "ACCESS_LOCAL_WRITE",
    "ACCESS_REMOTE_WRITE",
    "ACCESS_REMOTE_READ",
    "QPT_RC",
    "QPS_INIT",
    "QPS_RTR",
    "QPS_RTS",
    "QP_STATE",
    "QP_PORT",
    "QP_ACCESS_FLAGS",
    "QP_PKEY_INDEX",
    "QP_AV",
    "QP_PATH_MTU",
    "QP_DEST_QPN",
    "QP_RQ_PSN",
    "QP_MAX_DEST_RD_ATOMIC",
    "QP_MIN_RNR_TIMER",
    "QP_SQ_PSN",
    "QP_TIMEOUT",
    "QP_RETRY_CNT",
    "QP_RNR_RETRY",
    "QP_MAX_QP_RD_ATOMIC",
    "WR_RDMA_READ",
    "WR_RDMA_WRITE",
    "WR_RDMA_WRITE_WITH_IMM",
    "SEND_SIGNALED",
]
NUMBERS = (0, 1, 17, 255, 4096, 2**16, 2**24, 2**31, 2**32 - 1, 2**32, 2**63 - 1)


class Story(msgspec.Struct):
    """An input: what happens, one after the other, each a kind and its bytes or numbers."""

    steps: list[tuple[str, bytes, list[int]]]


_stories = msgspec.msgpack.Decoder(Story)


def _pair(draw: random.Random, number: int, *, answer: bool) -> bytes:
    memory = {"address": str(draw.choice((4096, 2**63, 2**64 - 1, 10**20 - 1))), "size": 4096, "rkey": 7}
    made: dict[str, Any] = {
        "type": "QueuePair", "node_id": "two", "incarnation": "two-1", "to_node_id": "n", "to_incarnation": "i",
        "number": number, "answer": answer, "qpn": 17, "psn": 1, "gid": "::ffff:10.77.0.2", "lid": 0,
        "ethernet": True, "mtu": 4096, "region": {**memory, "size": data_plane_bytes()}, "mailbox": memory,
        "still": [],
    }  # fmt: skip
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        name = draw.choice(
            ("qpn", "psn", "lid", "mtu", "number", "gid", "ethernet", "node_id", "rkey", "still")
        )
        match name:
            case "gid":
                made[name] = draw.choice(("", "::", "x", "1.2.3.4", "fe80::1%eth0", "\x00", "a" * 39))
            case "ethernet":
                made[name] = False
            case "node_id":
                made[draw.choice(("node_id", "incarnation", "to_node_id", "to_incarnation"))] = "three"
            case "rkey":
                made[draw.choice(("region", "mailbox"))] = {**memory, "rkey": draw.choice(NUMBERS)}
            case "still":
                made[name] = draw.choices(NUMBERS, k=3)
            case _:
                made[name] = draw.choice(NUMBERS)
    return json_bytes(draw, mutated_json(draw, made)) if not draw.randrange(5) else json_bytes(draw, made)


def data_plane_bytes() -> int:
    """Of the pool's file, which a peer must have registered as a whole."""
    return data_plane.Geometry(
        slots=SLOTS, layers=LAYERS, layer_block_bytes=data_plane.LAYER_BYTES
    ).file_bytes


def _mail(draw: random.Random) -> bytes:
    runs = [
        Run(draw.choice((0, 1, 2, SLOTS, -1)), draw.choice((0, 1, LAYERS)), draw.choice((1, LAYERS, 0)))
        for _ in range(draw.randint(0, 3))
    ]
    sums = [draw.getrandbits(64) for _ in range(sum(max(run.layers, 0) for run in runs))]
    message: Any = wire.Arrived(draw.choice((ORDER, "p")), draw.choice((PARTY, "p")), runs, sums)
    if draw.random() < 0.3:
        message = wire.WriteVerdict(draw.choice(("", "no_reservation")), draw.choice(("", "no")))
    raw = wire.pack(message)
    return mutated_bytes(draw, raw) if draw.random() < 0.4 else raw


def make(draw: random.Random) -> bytes:
    steps: list[tuple[str, bytes, list[int]]] = []
    for number in range(1, draw.randint(2, 6)):
        kind = draw.choice(("offer", "offer", "forged", "told", "told", "told", "move", "completed"))
        numbers = [draw.choice(NUMBERS), draw.randrange(8), draw.randrange(3)]
        match kind:
            case "offer" | "forged":
                content = _pair(draw, number, answer=not draw.randrange(8))
            case "move":  # what is answered to our own offer
                content = _pair(draw, draw.choice((0, 0, 0, number)), answer=bool(draw.randrange(8)))
            case "told":
                content = _mail(draw)
            case _:
                content = draw.choice((b"", b"WC_WR_FLUSH_ERR", b"WC_REM_ACCESS_ERR", b"WC_RETRY_EXC_ERR"))
        steps.append((kind, content, numbers))
    return msgspec.msgpack.encode(Story(steps))


class Unable(Exception):
    """The stand-in's PyverbsError."""


def within(bits: int, *numbers: int) -> None:
    """As Cython has it, which puts a number into a C integer."""
    if not all(0 <= number < 2**bits for number in numbers):
        raise OverflowError(f"{numbers} in {bits} bits")


class Attributes(SimpleNamespace):
    """`QPAttr`."""

    def check(self, *_: Any) -> None:
        for name, value in vars(self).items():
            if name in ("dest_qp_num", "rq_psn", "sq_psn"):
                within(32, value)
            elif name == "path_mtu" and not 1 <= value <= 5:
                raise Unable("EINVAL")


class Queue:
    """`CQ`, and what has completed in it."""

    def __init__(self, *_: Any) -> None:
        self.completed: deque[SimpleNamespace] = deque()
        self.req_notify = self.close = lambda: None
        self.ack_events = lambda count: None

    def poll(self, most: int) -> tuple[int, list[SimpleNamespace]]:
        found = [self.completed.popleft() for _ in range(min(most, len(self.completed)))]
        return len(found), found


def device() -> SimpleNamespace:
    """Stands for the modules of pyverbs; everything that is posted is forgotten."""
    numbers = itertools.count(100)

    def refuse(*_: Any) -> None:
        raise Unable("nothing there")

    def address(text: str) -> str:
        if "\0" in text:
            raise ValueError("embedded null character")
        return str(ipaddress.IPv6Address(text))

    def route(*, dgid: str, sgid_index: int) -> str:
        return dgid

    def way(*, gr: str, is_global: int, port_num: int, dlid: int) -> str:
        within(16, dlid)
        return gr

    def pair(*_: Any) -> SimpleNamespace:
        nothing = lambda *_: None  # noqa: E731
        return SimpleNamespace(
            qp_num=next(numbers), modify=lambda attr, mask: attr.check(), post_send=nothing, post_recv=nothing,
            close=nothing,
        )  # fmt: skip

    def send(*, imm_data: int, **_: Any) -> SimpleNamespace:
        within(32, imm_data)
        return SimpleNamespace(set_wr_rdma=lambda rkey, at: (within(32, rkey), within(64, at)))

    def piece(at: int, size: int, key: int) -> None:
        within(64, at)
        within(32, size, key)

    limits = SimpleNamespace(max_qp_wr=1000, max_cqe=100_000, max_qp_rd_atom=16, max_qp_init_rd_atom=16)
    opened = SimpleNamespace(
        query_device=lambda: limits,
        query_port=lambda number: SimpleNamespace(active_mtu=5),
        close=lambda: None,
    )
    closing = SimpleNamespace(close=lambda: None, get_cq_event=refuse, lkey=1, rkey=2)
    return SimpleNamespace(
        addr=SimpleNamespace(GID=address, GlobalRoute=route, AHAttr=way),
        cq=SimpleNamespace(CQ=Queue, CompChannel=lambda context: closing),
        device=SimpleNamespace(Context=lambda name: opened),
        e=SimpleNamespace(**{f"IBV_{name}": 1 << place for place, name in enumerate(ENUMS)}),
        mr=SimpleNamespace(MR=lambda domain, size, access, address: closing),
        pd=SimpleNamespace(PD=lambda context: closing),
        qp=SimpleNamespace(QPCap=dict, QPInitAttr=dict, QP=pair, QPAttr=Attributes),
        wr=SimpleNamespace(RecvWR=dict, SendWR=send, SGE=piece),
        Error=Unable,
    )


class Side:
    """An agent's RDMA transport over the pool of `data_plane`. `play` raises Found."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._port = data_plane.Port()
        self._answer = b""
        self._fd = os.eventfd(0)
        self._verified = itertools.count(1)
        channel = mock.patch.object(
            verbs.Verbs, "_make_channel", lambda made: (made._pv.cq.CompChannel(None), self._fd)
        )
        with (
            mock.patch.object(verbs, "load", device),
            mock.patch.object(transport, "choose", return_value=PORT),
            channel,
        ):
            options = RdmaOptions(node_id="n", cluster_secret=SECRET)
            pool = ServedPool(
                view=self._port.view,
                access=self._port.guard,
                incarnation="i",
                counters=self._port.counters,
            )
            self._rdma = transport.RdmaTransport(pool, options, executor, exchange=self._exchange)
        self._peer = Peer(
            node_id="two", incarnation="two-1", host="elsewhere", segment="none", geometry=self._port.geometry,
            endpoints=(Endpoint(transport="rdma", address="::1"),),
        )  # fmt: skip

    async def close(self) -> None:
        await self._rdma.close()
        os.close(self._fd)
        self._port.segment.close()

    async def _exchange(self, node_id: str, offer: QueuePair) -> QueuePair:
        """The peer answers what the input says, signed; `number` 0 there means that which was asked."""
        answer = decode(self._answer, QueuePair)
        number = answer.number or offer.number
        return wire.sign(msgspec.structs.replace(answer, number=number), SECRET)

    async def play(self, content: bytes) -> str:
        outcomes = []
        for kind, raw, numbers in _stories.decode(content).steps:
            match kind:
                case "offer" | "forged":
                    outcomes.append(self._offered(raw, forged=kind == "forged"))
                case "move":
                    outcomes.append(await self._moved(raw, reading=bool(numbers[1] % 2)))
                case "told":
                    self._tell(raw, numbers)
                case _:
                    self._complete(raw.decode() or "WC_SUCCESS", numbers[0], numbers[2])
            while self._rdma._judging:
                await asyncio.wait(self._rdma._judging)
        self._check()
        return " ".join(sorted(set(outcomes))) or "mail"

    def _offered(self, raw: bytes, *, forged: bool) -> str:
        refused = sum(self._port.counters.values())
        try:
            offer = decode(raw, QueuePair)
            if not forged:
                offer = wire.sign(offer, SECRET)
            answer = self._rdma.accept(offer)
        except MessageInvalid:
            return "invalid"
        except TransferError as problem:
            if type(problem).__name__ == "TransferRefused" and sum(self._port.counters.values()) == refused:
                raise Found(f"refused and not counted: {problem}") from None
            return "refused"
        if forged:
            raise Found("an offer without proof is taken")
        decode(encode(answer), QueuePair)
        return "paired"

    async def _moved(self, answer: bytes, *, reading: bool) -> str:
        """A move of ours, whose other end answers this and is not heard of again."""
        self._answer = answer
        call = Call(order_id=ORDER, party=PARTY, deadline_ns=2**62)
        move = (self._rdma.read if reading else self._rdma.write)(self._peer, [Slice(0, 0, 0, LAYERS)], call)
        task = asyncio.ensure_future(move)
        for _ in range(2):  # before and after its sums are computed
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(self._executor, int)
        task.cancel()
        try:
            await task
        except (MessageInvalid, StoreError) as problem:
            return type(problem).__name__
        except asyncio.CancelledError:
            return "under way"
        raise Found("nobody moved anything")

    def _complete(self, status: str, wr_id: int, immediate: int) -> None:
        number = getattr(self._rdma._verbs._pv.e, f"IBV_{status}")
        one = SimpleNamespace(status=number, wr_id=wr_id, imm_data=immediate)
        self._rdma._verbs.queue.completed.append(one)
        self._rdma._completed()

    def _tell(self, raw: bytes, numbers: list[int]) -> None:
        """A write with an immediate, from the other end of the newest pair that was asked for."""
        size = numbers[0] if not numbers[2] else len(raw)
        served = list(self._rdma._served.values())
        if not served:
            return
        pair, cell = served[-1], numbers[1]
        if cell < CELLS and len(raw) <= CELL_BYTES:
            at = pair.home + cell * CELL_BYTES
            self._rdma._context.mailbox_bytes[at : at + len(raw)] = memoryview(raw)
        self._complete("WC_SUCCESS", pair.number << 16 | RECEIVED, (cell << 24 | size) & 0xFFFFFFFF)

    def _check(self) -> None:
        """An honest offer is taken, from a life that nobody has spoken for; then nothing is left."""
        rdma, number = self._rdma, next(self._verified)
        memory = {"address": "4096", "size": data_plane_bytes(), "rkey": 7}
        honest = {
            "type": "QueuePair", "node_id": "honest", "incarnation": f"h{number % 5}", "to_node_id": "n",
            "to_incarnation": "i", "number": number, "answer": False, "qpn": 5, "psn": 1, "gid": "::1", "lid": 0,
            "ethernet": True, "mtu": 4096, "region": memory, "mailbox": memory,
        }  # fmt: skip
        if self._offered(msgspec.json.encode(honest), forged=False) != "paired":
            raise Found("an honest offer is refused")
        for pair in list(rdma._pairs.values()):
            rdma._destroy(pair)
        rdma._links.clear()
        rdma._offers._taken.clear()
        if len(rdma._homes) != rdma._verbs.pairs_max or rdma._served or rdma._running:
            raise Found(f"left behind: {len(rdma._homes)} homes, {rdma._served}, {rdma._running}")
        self._port.check()


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    up = mock.patch.object(transport, "why_down", return_value="")
    with up, ThreadPoolExecutor(1) as executor, asyncio.Runner() as runner:

        async def made() -> Side:
            return Side(executor)

        run = runner.get_loop().run_until_complete
        side = run(made())
        try:
            yield lambda content: run(side.play(content))
        finally:
            run(side.close())
