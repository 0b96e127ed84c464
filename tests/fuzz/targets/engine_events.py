"""KV events of an engine: batches that are malformed, lie, come out of order, twice or never, asked for again or not.

Nothing of it ends the reader; what the mirror holds is bounded, is what it has announced, and is nothing after a reset.
An engine that starts again after it all and is honest is mirrored as it is.

An input is what comes live, each message as its frames, and for each time that past batches are asked for what comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec

from halfmoon.schemas.keys import chain_keys, split_keys
from halfmoon.store.pool.slots import Change
from halfmoon.workers.adapters import kv_event_reader
from halfmoon.workers.adapters.engine_blocks import salt_of
from halfmoon.workers.adapters.kv_events import EngineCleared, EventBatch
from halfmoon.workers.adapters.mirror import EngineMirror
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import mutated_bytes, mutated_json

TEST_INPUTS = 600
INPUTS_MEANT = 300_000
ROOT, OURS, CACHE_BLOCKS = b"r" * 16, 64, 20
PROMPTS = [[*range(shared), *range(1000 * shared, 1000 * shared + 192 - shared)] for shared in (40, 100, 192)]
NAME_BYTES_MAX = 64
END = b"\xff" * 8
#: Later than all that is drawn, by the engine's clock.
LATER_S = 1e10

_stories = msgspec.msgpack.Decoder(tuple[list[list[bytes]], list[list[list[bytes]]]])


def make(draw: random.Random) -> bytes:
    size = draw.choice((1, 16, 16, 16, 16, 32, 48, 64))
    live, seq = [], draw.choice((0, 0, 5, 2**63))
    for at_s in range(draw.choice((1, 4, 10, 25))):
        live.append(_frames(draw, seq, _payload(draw, size, at_s)))
        seq += draw.choice((1, 1, 1, 1, 1, 1, 1, 0, 2, 3, -1, -seq, 2**64 - 2 - seq))
        seq = max(0, min(seq, 2**64 - 1))
    answers = []
    for _ in range(draw.choice((0, 1, 2, 6))):
        numbers = [max(0, seq + draw.randint(-9, 2)) for _ in range(draw.choice((0, 1, 3)))]
        if draw.randrange(3):
            numbers.sort()
        past = [_frames(draw, number, _payload(draw, size, draw.randrange(30))) for number in numbers]
        answers.append([*past, [b"", END, b""]] if draw.randrange(5) else past)
    return msgspec.msgpack.encode((live, answers))


def _frames(draw: random.Random, seq: int, payload: bytes) -> list[bytes]:
    frames = [b"", min(seq, 2**64 - 1).to_bytes(8, "big"), payload]
    match draw.randrange(40):
        case 0:
            return frames[: draw.randrange(3)]
        case 1:
            return [*frames, b""]
        case 2:
            return [b"", draw.randbytes(draw.choice((0, 7, 9))), payload]
        case _:
            return frames


def _payload(draw: random.Random, size: int, at_s: int) -> bytes:
    events = [_event(draw, size) for _ in range(draw.choice((0, 1, 1, 2, 5)))]
    times = (at_s, None, "x", -1.0, float("inf"), float("-inf"), float("nan"), 1e9)
    time_s = float(at_s) if draw.randrange(8) else draw.choice(times)
    batch: Any = [time_s, events, 0] if draw.randrange(4) else {"ts": time_s, "events": events}
    if not draw.randrange(4):
        batch = mutated_json(draw, batch)
    try:
        payload = msgspec.msgpack.encode(batch)
    except (OverflowError, ValueError):  # numbers and texts that only JSON has
        payload = b"\xc1"
    return payload if draw.randrange(12) else mutated_bytes(draw, payload)


def _event(draw: random.Random, size: int) -> dict[str, Any]:
    tokens = draw.choice(PROMPTS)
    blocks = len(tokens) // size
    first = draw.randrange(blocks)
    count = draw.randint(1, blocks - first)
    match draw.randrange(20):
        case 0:
            return {"type": "AllBlocksCleared"}
        case 1 | 2 | 3 | 4 | 5:
            names = [_name(draw, tokens, size, place) for place in range(first, first + count)]
            return {"type": "BlockRemoved", "block_hashes": names[-3:]}
        case 6 | 7 | 8:
            first = first if draw.randrange(2) else 0
        case _:
            first, count = 0, draw.randint(1, blocks)
    count = min(count, blocks - first)
    event = {
        "type": "BlockStored",
        "block_hashes": [_name(draw, tokens, size, place) for place in range(first, first + count)],
        "parent_block_hash": _name(draw, tokens, size, first - 1) if first else None,
        "token_ids": tokens[first * size : (first + count) * size],
        "block_size": size if draw.randrange(30) else draw.choice((16, 32, 128, 65_536)),
        "extra_keys": [[salt_of(ROOT)], *[None] * (count - 1)] if not first else None,
    }
    return event if draw.randrange(10) else mutated_json(draw, event)


def _name(draw: random.Random, tokens: list[int], size: int, place: int) -> Any:
    """Of a block, by all tokens up to its end; now and then another one's, or none that an engine would take."""
    if not draw.randrange(25):
        return draw.choice(
            (draw.randrange(40), b"n" * 32, b"n" * NAME_BYTES_MAX, b"n" * 100_000, -(2**63), "n")
        )
    return hash(tuple(tokens[: (place + 1) * size])) % 2**63


class Wire:
    """In place of ZeroMQ's context and of its sockets: what comes is given by the input."""

    def __init__(self) -> None:
        self.answers: list[list[list[bytes]]] = []
        self._live: asyncio.Queue[list[bytes]] = asyncio.Queue()

    def socket(self, kind: int) -> Wire | Past:
        return self if kind == kv_event_reader.zmq.SUB else Past(self.answers.pop(0) if self.answers else [])

    def ignored(self, *_: Any, **__: Any) -> None: ...

    set_hwm = setsockopt = connect = close = term = ignored

    async def recv_multipart(self) -> list[bytes]:
        frames = await self._live.get()
        self._live.task_done()
        return frames

    async def read(self, messages: list[list[bytes]], reading: asyncio.Task[None]) -> None:
        """Returns when the reader has come back for more than these, or has ended."""
        for frames in messages:
            self._live.put_nowait(frames)
        while not reading.done() and (self._live.qsize() or not self._live._getters):  # type: ignore[attr-defined]
            await asyncio.sleep(0)


class Past:
    """What one request for past batches is answered. Then nothing comes: the reader's wait is over at once."""

    def __init__(self, messages: list[list[bytes]]) -> None:
        self._messages = messages

    def ignored(self, *_: Any, **__: Any) -> None: ...

    setsockopt = connect = close = ignored

    async def send_multipart(self, _: list[bytes]) -> None: ...

    async def recv_multipart(self) -> list[bytes]:
        if not self._messages:
            raise TimeoutError
        return self._messages.pop(0)


class WatchedMirror(EngineMirror):
    """Looks at itself after whatever it is told. Raises Found."""

    def __init__(self) -> None:
        super().__init__(
            block_tokens=OURS,
            cache_tokens=CACHE_BLOCKS * 16,
            cache_blocks=CACHE_BLOCKS,
            events="e",
            replay="r",
            topic="",
        )
        self.announced: set[bytes] = set()
        self.changed = self._note

    def _note(self, changes: list[Change]) -> None:
        for change in changes:
            if (change.kind == "stored") == (change.key in self.announced):
                raise Found(f"announced twice: {change}")
            self.announced ^= {change.key}

    def batch_told(self, batch: EventBatch) -> None:
        super().batch_told(batch)
        self.check(empty=bool(batch.events) and isinstance(batch.events[-1], EngineCleared))

    def batches_lost(self) -> None:
        super().batches_lost()
        self.check(nothing_sure=True)

    def engine_restarted(self) -> None:
        super().engine_restarted()
        self.check(empty=True)

    def check(self, *, empty: bool = False, nothing_sure: bool = False) -> None:
        if self.unfit.done():  # the adapter leaves
            return
        blocks = self.blocks
        if self.announced != set(blocks.keys()):
            raise Found(f"{len(self.announced)} announced, {len(blocks.keys())} kept")
        if (nothing_sure and self.announced) or (empty and (self.announced or len(blocks))):
            raise Found(f"after a reset: {len(blocks)} blocks, {len(self.announced)} announced")
        if len(blocks) > blocks.blocks_max or len(blocks.passed_over) > 10:
            raise Found(f"{len(blocks)} blocks of {blocks.blocks_max}, {dict(blocks.passed_over)}")
        for name, block in blocks._blocks.items():
            if isinstance(name, bytes) and len(name) > NAME_BYTES_MAX:
                raise Found(f"a name of {len(name)} bytes is kept")
            if any(each not in blocks._blocks for each in block.next):
                raise Found("a block behind another is not there")


async def play(content: bytes) -> str:
    live, answers = _stories.decode(content)
    wire = Wire()
    wire.answers = answers
    with mock.patch.object(kv_event_reader.zmq.asyncio, "Context", return_value=wire):
        mirror = WatchedMirror()
        mirror.start()
    try:
        (reading,) = mirror._reading
        await wire.read(live, reading)
        outcome = "reset" if mirror.reader.counts["restarts"] else "heard"
        if not mirror.unfit.done():
            await _honest(wire, mirror, reading)
        if mirror.unfit.done():
            reason = mirror.unfit.result()
            if not reason.startswith("--block-tokens: "):
                raise Found(reason)
            return "unfit"
        return outcome
    finally:
        await mirror.stop()


async def _honest(wire: Wire, mirror: WatchedMirror, reading: asyncio.Task[None]) -> None:
    """The engine starts again. Raises Found where the mirror holds anything else than this one."""
    size = mirror.blocks.engine_block_tokens or 16
    tokens, count = list(range(5_000, 5_000 + 2 * OURS)), 2 * OURS // size
    keys = split_keys(chain_keys(ROOT, tokens, OURS))
    stored = {
        "type": "BlockStored", "block_hashes": list(range(count)), "parent_block_hash": None, "token_ids": tokens,
        "block_size": size, "extra_keys": [[salt_of(ROOT)], *[None] * (count - 1)],
    }  # fmt: skip
    fits = count <= mirror.blocks.blocks_max
    story: list[tuple[dict[str, Any], list[bytes]]] = [
        (stored, keys),
        ({"type": "BlockRemoved", "block_hashes": [count - 1]}, keys[:1]),
        ({"type": "AllBlocksCleared"}, []),
        (stored, keys),
    ]
    for seq, (event, expected) in enumerate(story):
        payload = msgspec.msgpack.encode([LATER_S + seq, [event], 0])
        await wire.read([[b"", seq.to_bytes(8, "big"), payload]], reading)
        held = set(mirror.blocks.keys())
        if not mirror.unfit.done() and fits and held != set(expected):
            raise Found(f"batch {seq} of an honest engine: {len(held)} blocks held, {len(expected)} there")


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with asyncio.Runner() as runner:
        yield lambda content: runner.run(play(content))
