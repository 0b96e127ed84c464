"""Publishes what this node holds in vLLM's wire form, for routers of other systems. Off unless an address is given.

PUB: multipart `[topic, seq as 8 bytes big-endian, payload]`; the payload is msgpack, an array `[ts, events,
data_parallel_rank]` of tagged maps. ROUTER (if given an address): `[id, "", seq]` is answered with `[id, "",
topic, seq, payload]` for each batch from there on that is still kept, and an end marker whose sequence number
is -1.

A block's hash is its 16-byte key. Tokens and parents are not told: the store does not know them (`token_ids`
is empty,
`parent_block_hash` nil). A new agent begins with `AllBlocksCleared` and sequence number 0.

Source: vLLM's `distributed/kv_events.py`, for the form.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from halfmoon.store.errors import TransferError
from halfmoon.store.pool.slots import Change

TOPIC = b"kv@halfmoon"
KEPT = 10_000
UNSENT_MAX = 100_000
#: What a subscriber or an asker may send in one frame: a topic, a sequence number.
HEARD_BYTES_MAX = 256
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIA = {"dram": "CPU", "ssd": "STORAGE"}


class BlockStored(msgspec.Struct, tag=True):
    """Blocks became readable on a medium."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


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

    def __init__(self, address: str, replay_address: str, block_tokens: int) -> None:
        """No `address`: it does nothing."""
        self._address, self._replay_address = address, replay_address
        self._block_tokens = block_tokens
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._seq = 0
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def start(self) -> None:
        """Raises TransferError: an address is taken, or makes no sense."""
        if not self._address:
            return
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(UNSENT_MAX)
        self._pub.setsockopt(zmq.MAXMSGSIZE, HEARD_BYTES_MAX)
        try:
            self._pub.bind(self._address)
            if self._replay_address:
                self._router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                self._router.setsockopt(zmq.MAXMSGSIZE, HEARD_BYTES_MAX)
                self._router.bind(self._replay_address)
                self._replaying = asyncio.create_task(self._replay(self._router))
        except zmq.ZMQError as problem:
            raise TransferError(f"KV events: {self._address} {self._replay_address}: {problem}") from None
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

    def add(self, changes: Sequence[Change]) -> None:
        """One batch, in the order in which it happened."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        last: tuple[str, str] | None = None
        for kind, key, tier in changes:
            if (kind, tier) != last:
                stored = BlockStored([], None, [], self._block_tokens, None, _MEDIA[tier])
                events.append(stored if kind == "stored" else BlockRemoved([], _MEDIA[tier]))
                last = (kind, tier)
            event = events[-1]
            assert not isinstance(event, AllBlocksCleared)
            event.block_hashes.append(key)
        if events:
            self._send(events)

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        if self._pub is None:
            return
        payload = msgspec.msgpack.encode(KvEventBatch(time.time(), events))
        self._kept.append((self._seq, payload))
        with contextlib.suppress(zmq.Again):
            self._pub.send_multipart([TOPIC, self._seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._seq += 1

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            who, start = frames[0], int.from_bytes(frames[2], "big")
            for seq, payload in list(self._kept):
                if seq >= start:
                    await router.send_multipart([who, b"", TOPIC, seq.to_bytes(8, "big"), payload])
            await router.send_multipart([who, b"", b"", _END, b""])
