"""The messages of a TCP link, `[mac, header, payload…]`, between two ends that have proved themselves (`streams`).

::

    client                                        server
      │◀────────── Welcome(incarnation) ──────────│
      │── Read / Write + payload ────────────────▶│
      │◀────────── Chunk + payload / Ack / Refusal│

Headers are numbered. Under TLS the mac is empty; in the clear it is a sum under the session's key (`Seal`), so that
nothing of another connection can be replayed, nor of this one. In any case a layer of a block counts only when its
xxh3_64 is the one in the header.

A payload frame is a run of layers of one block, of at most 512 KiB (or one layer, when that is larger): small
enough to be in the cache still when it is verified. Layers are whole; of a block that is filled in part a Write
has what is filled of each (`Run.fill`), packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.base import Run, Slice, joined, layer_bytes
from halfmoon.store.transports.tcp.streams import Seal

FRAME_BYTES = 512 * 1024

MESSAGE_BYTES = 4 * 1024 * 1024
#: Asked for at once, since the first frame can be taken before the last one is sent: every
#: request that is sent while an answer comes costs a quarter of a millisecond.
STREAM_BYTES = 64 * 1024 * 1024
#: Runs in one message: a header stays small.
RUNS_PER_MESSAGE = 512


class FrameHeader(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The begin of every message."""

    #: Counts the messages of one direction of a connection, from 1.
    number: int = 0


class Welcome(FrameHeader, frozen=True, kw_only=True):
    """The first message: the server takes the client."""

    incarnation: str


class Read(FrameHeader, frozen=True, kw_only=True):
    """Asks for block-layers."""

    order_id: str
    runs: list[Run]


class Write(FrameHeader, frozen=True, kw_only=True):
    """`sums`: xxh3_64 of every layer of every run, in order; so in Chunk."""

    order_id: str
    party: str
    runs: list[Run]
    sums: list[int]


class Chunk(FrameHeader, frozen=True, kw_only=True):
    """Answers one Read: all of its runs."""

    sums: list[int]


class Ack(FrameHeader, frozen=True, kw_only=True):
    """Answers one Write: its bytes are readable."""


class RefusalFrame(FrameHeader, frozen=True, kw_only=True, tag="Refusal"):
    """Answers anything."""

    reason: str
    kind: Literal["refused", "corrupted"] = "refused"


AnyFrame = Welcome | Read | Write | Chunk | Ack | RefusalFrame
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyFrame)
_encoder = msgspec.msgpack.Encoder()


class FrameInvalid(Exception):
    """Bytes that are no message of this protocol, or not of this session."""


def encode(header: AnyFrame) -> bytes:
    return _encoder.encode(header)


def decode(raw: bytes) -> AnyFrame:
    """Raises FrameInvalid."""
    try:
        header: AnyFrame = _decoder.decode(raw)
        return header
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise FrameInvalid(f"malformed header: {problem}") from None


class Session:
    """The headers of one connection, as one end sees them. `key`: of their macs; b"": they need none."""

    def __init__(self, key: bytes, me: Literal["server", "client"]) -> None:
        self._seal = Seal(key, b"link", server=me == "server") if key else None
        self._sent = self._received = 0

    def seal(self, header: AnyFrame) -> tuple[bytes, bytes]:
        """`(mac, header)`, numbered."""
        self._sent += 1
        raw = encode(msgspec.structs.replace(header, number=self._sent))
        return self._seal.make(raw) if self._seal is not None else b"", raw

    def open(self, mac: bytes, raw: bytes) -> AnyFrame:
        """Raises FrameInvalid for a header that the other end did not make, or made for another moment."""
        if mac if self._seal is None else not self._seal.genuine(raw, mac):
            raise FrameInvalid("wrong mac")
        header = decode(raw)
        self._received += 1
        if header.number != self._received:
            raise FrameInvalid(f"message {header.number} where {self._received} was due")
        return header


def split(
    items: Sequence[Slice], layer_block_bytes: int, message_bytes: int = MESSAGE_BYTES
) -> Iterator[list[Slice]]:
    """`items` cut into messages: runs of at most FRAME_BYTES, together at most `message_bytes` (one layer at
    least).
    """
    message: list[Slice] = []
    total = 0
    for item in joined(items):
        each = layer_bytes(item, layer_block_bytes)
        layers_max = max(1, FRAME_BYTES // each)
        for first in range(item.first_layer, item.first_layer + item.layers, layers_max):
            layers = min(layers_max, item.first_layer + item.layers - first)
            size = layers * each
            if message and (total + size > message_bytes or len(message) == RUNS_PER_MESSAGE):
                yield message
                message, total = [], 0
            message.append(item._replace(first_layer=first, layers=layers))
            total += size
    if message:
        yield message


def frame_bytes_max(view: PoolView) -> int:
    """No frame is longer, nor is a header."""
    return max(FRAME_BYTES, view.geometry.layer_block_bytes) + 65536
