"""Messages to the TCP data plane, without a socket, from a caller that has the secret and does not keep to the
protocol. Each is served or refused and counted; no slot, hold or writer is left behind.
"""

from __future__ import annotations

import contextlib
import random
import struct
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import xxhash

from halfmoon.store.pool.checksums import run_sums
from halfmoon.store.pool.guard import PoolGuard
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.segment import Geometry, Segment, segment_name
from halfmoon.store.pool.slots import Owner
from halfmoon.store.transports.tcp import wire
from halfmoon.store.transports.tcp.channel import FrameMissing
from halfmoon.store.transports.tcp.service import TcpService
from halfmoon.store.transports.tcp.streams import Seal
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import VALUES, mutated_bytes, mutated_json

TEST_INPUTS = 1500
INPUTS_MEANT = 900_000
KEY = b"the session's key"
SLOTS, LAYERS, LAYER_BYTES = 6, 3, 256
#: The caller's order has reserved the first two slots, and leases the third one.
ORDER, PARTY = "o", "w"

#: What is in an input: messages with a genuine mac ("s"), with any bytes as their mac ("f").
Messages = list[tuple[str, list[bytes]]]
messages = msgspec.msgpack.Decoder(Messages)


def make(draw: random.Random) -> bytes:
    said: Messages = []
    for _ in range(draw.randint(1, 5)):
        where = draw.choice("ssssssf")
        if where == "s" and draw.random() < 0.5:
            header, payload = _honest(draw)
        else:
            header, payload = _strange(draw)
        raw = _encoded(draw, header)
        said.append((where, [raw, *payload] if draw.random() < 0.97 else []))
    return msgspec.msgpack.encode(said)


def _honest(draw: random.Random) -> tuple[dict[str, Any], list[bytes]]:
    """A read or a write as a peer makes it, or with one thing wrong."""
    first = draw.randint(0, LAYERS - 1)
    runs = [[draw.randint(0, 2), first, draw.randint(1, LAYERS - first)] for _ in range(draw.randint(0, 3))]
    wrong = draw.randrange(12)
    if wrong == 0 and runs:
        draw.choice(runs)[draw.randrange(3)] = draw.choice((-1, SLOTS, 2**31, 2**63 - 1, 2**64 - 1, 0))
    if wrong == 1:
        runs *= 300
    if draw.random() < 0.4:
        return {"number": 0, "type": "Read", "order_id": ORDER, "runs": runs}, []
    payload = [draw.randbytes(1) * (LAYER_BYTES * min(run[2], LAYERS)) for run in runs[:20]]
    sums = [xxhash.xxh3_64_intdigest(frame[:LAYER_BYTES]) for run, frame in zip(runs, payload, strict=False)
            for _ in range(min(run[2], LAYERS))]  # fmt: skip
    if wrong == 2 and payload:
        payload[-1] = payload[-1][:-1]
    if wrong == 3:
        payload = payload[1:] or [b"x"]
    if wrong == 4 and sums:
        sums[0] ^= 1
    owner = {"order_id": "p" if wrong == 5 else ORDER, "party": "p" if wrong == 6 else PARTY}
    return {"number": 0, "type": "Write", **owner, "runs": runs, "sums": sums}, payload


def _strange(draw: random.Random) -> tuple[dict[str, Any], list[bytes]]:
    header, payload = _honest(draw)
    kinds: list[dict[str, Any]] = [
        {"type": "Welcome", "incarnation": "i"},
        {"type": "Chunk", "sums": []},
        {"type": "Ack"},
        {"type": "Refusal", "reason": "no"},
        header,
        header,
        header,
    ]
    changed: dict[str, Any] = mutated_json(draw, {"number": 0, **draw.choice(kinds)})
    return changed, payload


def _encoded(draw: random.Random, header: Any) -> bytes:
    if not draw.randrange(50):
        depth = draw.choice((30, 500, 20_000))
        return b"\x81\xa1x" + draw.choice((b"\x91", b"\x81\xa1x")) * depth + b"\xc0"
    try:
        raw = msgspec.msgpack.encode(header)
    except (UnicodeEncodeError, OverflowError, TypeError):  # values that only JSON can say
        raw = msgspec.msgpack.encode(draw.choice([v for v in VALUES if isinstance(v, bool | float | list)]))
    # Lengths that promise 4 GB: of a text, of bytes, of a list, of a map.
    huge = draw.choice((b"\xdb", b"\xc6", b"\xdd", b"\xdf")) + struct.pack(">I", 2**32 - 1)
    match draw.randrange(30):
        case 0:
            return mutated_bytes(draw, raw)
        case 1:
            return raw[: draw.randint(0, len(raw))] + huge
        case 2:
            return raw + b"\x00"
        case _:
            return raw


def _numbered(raw: bytes, session: wire.Session) -> bytes:
    """The header with the number that is due, where it has 0: what went before decides about that."""
    if raw[1:9] != b"\xa6number\0":
        return raw
    return raw[:8] + bytes([session._received + 1]) + raw[9:]


def genuine_mac(key: bytes, header: bytes) -> bytes:
    """As a caller makes it that has the session's key."""
    return Seal(key, b"link", server=False).make(header)


class GivenFrames:
    """The frames of one message, as a connection would give them."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = deque(frames)

    def more(self) -> bool:
        return bool(self._frames)

    def small(self) -> bytes:
        if not self._frames:
            raise FrameMissing("a frame is missing")
        return self._frames.popleft()

    def into(self, buffer: memoryview) -> int:
        if not self._frames:
            return -1
        frame = self._frames.popleft()
        some = min(len(frame), len(buffer))
        buffer[:some] = frame[:some]
        return len(frame)


class Port:
    """A service of a small pool, and a caller at it."""

    def __init__(self) -> None:
        self.geometry = Geometry(slots=SLOTS, layers=LAYERS, layer_block_bytes=LAYER_BYTES)
        self.segment = Segment.create(segment_name("fuzz", uuid.uuid4().hex[:12]), self.geometry)
        self.view = self.segment.view
        self.counters: Counter[str] = Counter()
        self.pool = Pool(SLOTS)
        self.guard = PoolGuard(self.pool, ttl_ns=10**15, grace_ns=0, announce=lambda changes: None)
        self.service = TcpService(self.view, self.guard, incarnation="i", counters=self.counters)
        self.guard.open_put(Owner(ORDER, PARTY), [], 2, writer="worker")
        lease = Owner(ORDER, "reader")
        hold = self.guard.open_put(lease, [bytes(16)], 1, writer="worker")
        self.view.sums[hold.slots[0]] = run_sums(self.view, hold.slots[0], 0, LAYERS)
        self.guard.commit(lease, {0: 0})
        self.guard.close_writer(lease, "worker")
        self.before = self.guard.counts(), dict(self.pool.writers)

    def play(self, content: bytes) -> str:
        session, goes_on = wire.Session(KEY, "server"), True
        outcomes: Counter[str] = Counter()
        for where, frames in messages.decode(content):
            if not goes_on:
                session = wire.Session(KEY, "server")
            mac = bytes(32)
            if where == "s":
                frames[:1] = [_numbered(raw, session) for raw in frames[:1]]
                mac = genuine_mac(KEY, frames[0]) if frames else b""
            outcome, goes_on = self._answered([mac, *frames], session)
            outcomes[outcome] += 1
        self.check()
        return " ".join(sorted(outcomes))

    def _answered(self, frames: list[bytes], session: wire.Session) -> tuple[str, bool]:
        answers: list[Sequence[bytes | memoryview]] = []
        refused = sum(self.counters.values())
        goes_on = self.service.receive(GivenFrames(frames), session, answers.append)
        if len(answers) != 1:
            raise Found(f"{len(answers)} answers to one message")
        answer = wire.decode(bytes(answers[0][1]))
        if isinstance(answer, wire.RefusalFrame) and sum(self.counters.values()) == refused:
            raise Found(f"refused and not counted: {answer.reason}")
        if len(answer.reason if isinstance(answer, wire.RefusalFrame) else "") > 300:
            raise Found("a refusal as long as what it refuses")
        return type(answer).__name__, goes_on

    def check(self) -> None:
        self.guard.check()
        if (self.guard.counts(), dict(self.pool.writers)) != self.before:
            raise Found(f"left behind: {self.guard.counts()}, {self.pool.writers}")


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    port = Port()
    try:
        yield port.play
    finally:
        port.segment.close()
