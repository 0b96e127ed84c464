"""The verbs of a store agent, as workers, programs and other agents say them: well formed and senseless, wrong,
repeated, out of order; and what other agents answer, which may be as senseless. Each is answered, or refused by a code
of the store. Afterwards the pool's books are right, and once all orders are released nothing of it is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from halfmoon.bus.errors import PeerError, PeerUnreachable
from halfmoon.schemas import store as messages
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.policy import Layout
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.open_tier import open_tier
from halfmoon.store.agent.peers import sign
from halfmoon.store.agent.processes import KnownProcesses
from halfmoon.store.agent.release import release_order
from halfmoon.store.agent.replicas import Replicator
from halfmoon.store.agent.serving import serve
from halfmoon.store.config import StoreConfig
from halfmoon.store.errors import StoreError, from_code
from halfmoon.store.pool.segment import Segment, segment_name
from tests.eventually import within
from tests.fuzz.frame import Found, Play, found_where_late
from tests.fuzz.mutate import mutated_json

TEST_INPUTS = 150
INPUTS_MEANT = 120_000
DEADLINE_S = 20.0
SECRET = "the cluster's secret"
SLOTS = 8
LAYOUT = Layout(
    model="m", model_fingerprint="f", layers=2, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32"
)
ME, OTHERS = "n1", ("n2", "n3")
ORDERS, WORKERS = ("o1", "o2", "o3"), ("w1", "w2", "n2", "node-n2")
KEYS = [bytes([number]) * 16 for number in range(1, 6)]
MARKS = ("", "", "0" * 32, "ab" * 16)
NUMBERS = (0, 0, 1, 1, 2, 3, SLOTS, 65535, 2**31 - 1)


class Story(msgspec.Struct):
    """An input: verbs with their messages, and what other agents answer, one after the other."""

    asked: list[tuple[str, bytes]]
    answers: list[bytes]


#: Codes that are no class of `halfmoon.store.errors`.
_CODES = {"invalid_request", "store_error"}
_stories = msgspec.msgpack.Decoder(Story)


def make(draw: random.Random) -> bytes:
    asked = [("attach", json.dumps({"worker_id": "w1", "process": "p"}).encode())]
    for _ in range(draw.randint(2, 12)):
        verb = draw.choice(list(serve.VERBS))
        asked.append((verb, _json(draw, _message(draw, serve.VERBS[verb]))))
    answers = [_json(draw, _answer(draw)) for _ in range(draw.randint(0, 6))]
    return msgspec.msgpack.encode(Story(asked, answers))


def _json(draw: random.Random, message: dict[str, Any]) -> bytes:
    changed = mutated_json(draw, message) if not draw.randrange(6) else message
    return json.dumps(changed, default=str).encode(errors="surrogatepass")


_type_info = cache(msgspec.inspect.type_info)


def _message(draw: random.Random, kind: type[Any]) -> dict[str, Any]:
    """One that could be meant: of few orders, workers and keys, so that they meet."""
    info = _type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = {
        field.name: _field(draw, field) for field in info.fields if field.required or draw.random() < 0.7
    }
    return {"type": kind.__name__, **fields}


def _field(draw: random.Random, field: msgspec.inspect.Field) -> Any:
    name = field.name
    kind = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
    if name in ("block_keys", "head_keys"):
        return _base64(b"".join(draw.choices(KEYS, k=draw.choice((0, 1, 1, 2, 3)))))
    if name == "mapped":
        return "{incarnation}"
    if name in ("mark",) or (name == "tenant" and draw.random() < 0.5):
        return draw.choice(MARKS)
    if name in ("source_node_id", "target_node_id", "node_id", "writer_node_id"):
        return draw.choice((ME, *OTHERS))
    if name == "order_id":
        return draw.choice(ORDERS)
    match kind:
        case msgspec.inspect.BoolType():
            return draw.random() < 0.3
        case msgspec.inspect.IntType():
            return 0 if name == "block_bytes" and draw.random() < 0.8 else draw.choice(NUMBERS)
        case msgspec.inspect.ListType():
            if name == "pushes":
                return [_message(draw, messages.PushLayer) for _ in range(draw.randint(0, 3))]
            if name == "endpoints":
                return []
            named = name.endswith("_ids")
            return [
                draw.choice((*OTHERS, *ORDERS)) if named else draw.choice(NUMBERS)
                for _ in range(draw.randint(0, 3))
            ]
        case msgspec.inspect.StructType(cls=cls):
            return msgspec.to_builtins(LAYOUT) if cls is Layout else _message(draw, cls)
        case _:
            return draw.choice((*WORKERS, *WORKERS, "123"))


def _base64(keys: bytes) -> str:
    return str(msgspec.to_builtins(keys))


def _answer(draw: random.Random) -> dict[str, Any]:
    """What another agent says: mostly a genuine hello and answers of the right kind."""
    kinds: list[type[Any]] = [
        messages.Leased, messages.Leased, messages.Reserved, messages.Reserved, messages.Probed, messages.Removed,
        messages.StoreStatus, messages.Done, messages.Replicated, messages.LeaseEnded, messages.Pushed,
    ]  # fmt: skip
    if draw.random() < 0.4:
        return {"type": "Hello", "node_id": draw.choice(OTHERS), "incarnation": draw.choice("ab")}
    return _message(draw, draw.choice(kinds))


class GivenAnswers:
    """The bus of an agent whose peers answer what the input says; what it publishes goes nowhere."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []

    async def request(self, subject: str, message: Any, kind: Any, *, timeout_s: float = 0.0) -> Any:
        await asyncio.sleep(0)
        if not self.answers:
            raise PeerUnreachable(f"{subject}: nobody answers")
        encode(message)
        raw = self.answers.pop(0)
        try:
            if (hello := _hello(raw)) is not None and kind is messages.Hello:
                return hello
            return decode(raw, kind)
        except MessageInvalid as problem:
            raise PeerUnreachable(f"{subject}: {problem}") from None

    async def publish(self, subject: str, message: Any) -> None:
        encode(message)

    def append_soon(self, event: Any, *, source_id: str) -> None:
        encode(event)


def _hello(raw: bytes) -> messages.Hello | None:
    """A genuine one of the peer that the input names."""
    try:
        named = json.loads(raw)
        bare = messages.Hello(
            node_id=named["node_id"],
            incarnation=named["incarnation"],
            host="elsewhere",
            segment="halfmoon-none-none",
            slots=4,
            layout=LAYOUT,
            endpoints=[Endpoint(transport="tcp", address="tcp://127.0.0.1:1")],
        )
        return sign(decode(encode(bare), messages.Hello), SECRET)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class Agent:
    """All of a store agent but the bus: its pool, transports, tier, and its table of verbs."""

    def __init__(self, directory: Path) -> None:
        config = StoreConfig(
            cluster=f"fuzz{uuid.uuid4().hex[:8]}", node_id=ME, layout=LAYOUT, slots=SLOTS, cluster_secret=SECRET,
            ssd=str(directory / "tier"), ssd_bytes=1 << 20, transport="tcp", rdma="off", encryption="never",
            transfer_ns_max=200_000_000, stall_ns_max=200_000_000, control_timeout_s=0.2,
        )  # fmt: skip
        self.bus = GivenAnswers()
        self.context = AgentContext(self.bus, config)  # type: ignore[arg-type]
        self.context.tier = open_tier(self.context)
        self.processes = KnownProcesses(self.context)
        self.replicator = Replicator(self.context)
        self.answers = serve.answers(self.context, self.processes, self.replicator)

    async def start(self) -> None:
        config = self.context.config
        self.context.segment = Segment.create(segment_name(config.cluster, config.node_id), config.geometry)
        await self.context.open_transports()
        assert self.context.tier is not None
        await self.context.tier.start()

    async def stop(self) -> None:
        context = self.context
        await context.orders.end_all("stopped")
        await context.cancel_background()
        assert context.tier is not None
        await context.tier.stop()
        await context.transports.close()
        context.executor.shutdown()
        assert context.segment is not None
        context.segment.close()

    async def play(self, content: bytes) -> str:
        story = _stories.decode(content)
        self.bus.answers = list(story.answers)
        outcomes = set()
        for verb, raw in story.asked:
            raw = raw.replace(b"{incarnation}", self.context.incarnation.encode())
            outcomes.add(await self._asked(verb, raw))
            self.context.guard.check()
        await self._released()
        return " ".join(sorted(outcomes)[:3])

    async def _asked(self, verb: str, raw: bytes) -> str:
        kind, answer = serve.VERBS[verb], self.answers[verb]
        try:
            request = decode(raw, kind)
        except MessageInvalid:
            return "invalid"
        try:
            answered = answer(request)
            if asyncio.iscoroutine(answered):
                answered = await within(answered, f"{verb} is answered")
        except PeerError as problem:
            if problem.code not in _CODES and type(from_code(problem.code, "")) is StoreError:
                raise Found(f"{verb} is refused with {problem.code}: {problem}") from None
            return problem.code
        except TimeoutError:
            raise Found(f"{verb} is not answered") from None
        if answered is not None:
            encode(answered)
        return "answered"

    async def _released(self) -> None:
        """The end of every order: nothing of it is held, and nothing of it runs."""
        context = self.context
        owners = {owner.order_id for owner in context.guard._pool.holds} | set(ORDERS)
        for order_id in owners:
            await release_order(context, order_id)
        with found_where_late():
            while background := list(context._background):
                await within(asyncio.wait(background), "what runs in the background ends")
        context.guard._gone.clear()
        pool = context.guard._pool
        pool.sweep(2**63)
        pool.take_changes()
        context.guard.check()
        if pool.holds or pool.writers or context.guard._receiving or context.orders._by_owner:
            raise Found(f"left behind: {pool.holds} {pool.writers} {context.orders._by_owner}")
        counts = context.guard.counts()
        if counts.free + counts.committed != SLOTS:
            raise Found(f"slots that are nobody's: {counts}")
        context.counters.clear()
        context.drained.clear()


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        agent = Agent(Path(directory))
        run = runner.get_loop().run_until_complete
        run(agent.start())
        problems: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))

        def play(content: bytes) -> str:
            outcome = run(agent.play(content))
            if problems:
                told = problems.pop(0)
                problems.clear()
                raise told.get("exception") or Found(str(told))
            return outcome

        try:
            yield play
        finally:
            run(agent.stop())
