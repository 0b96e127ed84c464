"""Publishes this node's blocks in vLLM's wire form, for routers of other systems. Off unless an address is given.

PUB: multipart `[topic, seq as 8 bytes big-endian, payload]`; the payload is msgpack, an array `[ts, events,
data_parallel_rank]` of tagged maps. ROUTER (if given an address): `[id, "", seq]` is answered with `[id, "",
topic, seq, payload]` for each batch from there on that is still kept, and an end marker whose sequence number
is -1. A new agent begins with `AllBlocksCleared` and sequence number 0.

A block's hash is its 16-byte key. Tokens and parents are published only with the option `tokens`, because they are
text. Then a router can find its own prompts among them, and only blocks of known tokens are published: a hash without
its tokens would be of no use to it. A worker sends the tokens when it puts blocks, and the agent keeps them as long as
it has the blocks.

Source: vLLM's `distributed/kv_events.py`, for the form.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from halfmoon.schemas.keys import split_keys, unpack_tokens
from halfmoon.store.errors import TransferError
from halfmoon.store.pool.slots import Change

#: Batches that can be asked for again, and their bytes: beyond either the oldest batches are forgotten.
KEPT = 10_000
KEPT_BYTES_MAX = 64 << 20
UNSENT_MAX = 100_000
#: Most bytes of a frame from a subscriber or an asker: a topic, a sequence number.
HEARD_BYTES_MAX = 256
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIA = {"dram": "CPU", "ssd": "STORAGE"}
_TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class KvEventsOptions:
    """`address` "": nothing is published. `topic`: the first frame of each message."""

    address: str = ""
    replay_address: str = ""
    topic: str = ""
    tokens: bool = False


class Origin(NamedTuple):
    """Whence a block's key comes: the key before it, None at a prompt's head, and the block's tokens, packed."""

    parent: bytes | None
    token_ids: bytes


@dataclass(slots=True)
class _Told:
    """A published block, and the media on which it is."""

    origin: Origin
    media: set[str] = field(default_factory=set)


class BlockStored(msgspec.Struct, tag=True):
    """Blocks became readable on a medium."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """The node's last copy on that medium is gone."""

    block_hashes: list[bytes]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing older counts."""


class KvEventBatch(msgspec.Struct, array_like=True):
    """One payload."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


class KvEvents:
    """`start`, then `add` on the event loop; sends never wait (a slow subscriber loses, and asks for a
    replay).
    """

    def __init__(self, options: KvEventsOptions, *, block_tokens: int, slots: int) -> None:
        """`slots`: the pool's; this many blocks may wait to be committed."""
        self._options = options
        self._topic = options.topic.encode()
        self._block_tokens = block_tokens
        self._slots = slots
        #: Tokens of blocks that are put and not here yet; the oldest make room.
        self._expected: OrderedDict[bytes, Origin] = OrderedDict()
        self._told: dict[bytes, _Told] = {}
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._seq = 0
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def wants_tokens(self) -> bool:
        return bool(self._options.address) and self._options.tokens

    def start(self) -> None:
        """Raises TransferError: an address is taken, or makes no sense."""
        if not self._options.address:
            return
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(UNSENT_MAX)
        self._pub.setsockopt(zmq.MAXMSGSIZE, HEARD_BYTES_MAX)
        # ZeroMQ refuses an address in brackets without it. With it, `*` would listen on every IPv6 address as well.
        self._pub.setsockopt(zmq.IPV6, int("[" in self._options.address))
        try:
            self._pub.bind(self._options.address)
            if self._options.replay_address:
                self._router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                self._router.setsockopt(zmq.MAXMSGSIZE, HEARD_BYTES_MAX)
                self._router.setsockopt(zmq.IPV6, int("[" in self._options.replay_address))
                self._router.bind(self._options.replay_address)
                self._replaying = asyncio.create_task(self._replay(self._router))
        except zmq.ZMQError as problem:
            where = f"{self._options.address} {self._options.replay_address}"
            raise TransferError(f"KV events: {where}: {problem}") from None
        self._send([AllBlocksCleared()])

    async def stop(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._pub = self._router = self._context = None

    def learn(self, block_keys: bytes, token_ids: bytes, *, head_keys: bytes = b"") -> None:
        """The tokens, packed, of whole blocks that are about to be put; `head_keys`: of the chain before them.

        Raises ValueError when keys and tokens do not match in number.
        """
        if not self.wants_tokens or not token_ids:
            return
        keys, heads = split_keys(block_keys), split_keys(head_keys)
        step = _TOKEN_BYTES * self._block_tokens
        if len(token_ids) != step * len(keys):
            raise ValueError(f"token_ids: {len(token_ids)} bytes are not those of {len(keys)} blocks")
        parent = heads[-1] if heads else None
        for number, key in enumerate(keys):
            if key not in self._told:
                self._expected[key] = Origin(parent, token_ids[number * step : (number + 1) * step])
                self._expected.move_to_end(key)
            parent = key
        while len(self._expected) > self._slots:
            self._expected.popitem(last=False)

    def tokens_of(self, keys: Sequence[bytes]) -> bytes:
        """The tokens of a chain from its head, packed, for another agent; b"" where any is not known."""
        found = [self._told[key].origin if key in self._told else self._expected.get(key) for key in keys]
        if not found or found[0] is None or found[0].parent is not None:
            return b""
        return b"" if None in found else b"".join(origin.token_ids for origin in found if origin is not None)

    def add(self, changes: Sequence[Change]) -> None:
        """One batch, in the order in which it happened."""
        if not self._options.address:
            return
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        for kind, key, tier in changes:
            medium = _MEDIA[tier]
            origin: Origin | None = Origin(None, b"")
            if self._options.tokens:
                origin = self._stored(key, medium) if kind == "stored" else self._removed(key, medium)
            if origin is None:
                continue
            last = events[-1] if events else None
            if kind == "stored":
                follows = not self._options.tokens or (
                    isinstance(last, BlockStored) and last.block_hashes[-1] == origin.parent
                )
                if not isinstance(last, BlockStored) or last.medium != medium or not follows:
                    last = BlockStored([], origin.parent, [], self._block_tokens, None, medium)
                    events.append(last)
                last.token_ids += unpack_tokens(origin.token_ids)
            elif not isinstance(last, BlockRemoved) or last.medium != medium:
                last = BlockRemoved([], medium)
                events.append(last)
            last.block_hashes.append(key)
        if events:
            self._send(events)

    def _stored(self, key: bytes, medium: str) -> Origin | None:
        """None: its tokens are not known, and it is not published."""
        told = self._told.get(key)
        if told is None:
            origin = self._expected.pop(key, None)
            if origin is None:
                return None
            told = self._told[key] = _Told(origin)
        told.media.add(medium)
        return told.origin

    def _removed(self, key: bytes, medium: str) -> Origin | None:
        """None: it was not published."""
        told = self._told.get(key)
        if told is None or medium not in told.media:
            return None
        told.media.remove(medium)
        if not told.media:
            del self._told[key]
        return told.origin

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        if self._pub is None:
            return
        payload = msgspec.msgpack.encode(KvEventBatch(time.time(), events))
        self._kept.append((self._seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])
        with contextlib.suppress(zmq.Again):
            self._pub.send_multipart([self._topic, self._seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._seq += 1

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            who, start = frames[0], int.from_bytes(frames[2], "big")
            for seq, payload in list(self._kept):
                if seq >= start:
                    await router.send_multipart([who, b"", self._topic, seq.to_bytes(8, "big"), payload])
            await router.send_multipart([who, b"", b"", _END, b""])
