"""The header of a message: HEADER_BYTES, always, in front of its payload.

::

    magic version op dtype | group layer parts rows | step | slots | payload_bytes | sequence | consumed | seal
      2      1     1   1       2     2     2    4      8      4          4             8          8       16

Little-endian. `sequence` counts the messages of one direction of a channel, from 1. `consumed` counts the taken data
messages of the other direction, which is the other end's credit. `seal` is a keyed sum of the bytes before it, where
the link is neither local nor encrypted, and zeros elsewhere.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.store.transports.tcp.streams import SEAL_BYTES

HEADER_BYTES = 64
SEALED_BYTES = HEADER_BYTES - SEAL_BYTES
MAGIC = 0x6D68
VERSION = 1
_LAYOUT = struct.Struct("<HBBBxHHHIQIIQQ")
assert _LAYOUT.size == SEALED_BYTES


class Op(enum.IntEnum):
    """Meaning of a message. Those below QUERY are the channel's own."""

    HELLO = 1
    #: No payload: its header has the credit.
    CREDIT = 2
    #: The last word of an end that gives the channel up: a reason, in UTF-8.
    ERROR = 3
    #: Rows of q of one layer.
    QUERY = 16
    #: Rows of new k, then v, of one layer, which follow their query, where all of the past is at the other end.
    KEY_VALUE = 17
    #: States of `parts` parts: `out`, then the f32 log-sum-exp. Answers a QUERY.
    PARTIAL = 18
    #: Rows of the residual, from one range of layers to the next.
    ACTIVATION = 19
    #: k, then v, of `rows` tokens of one layer, from token `step` of hold `slots` on; `parts` more messages of the
    #: same push follow. The last one is answered.
    APPEND = 20
    #: The slots of the list are free.
    DROP = 21
    #: The slot list of number `slots`, which the headers after it name. Payload: i32. `parts` 1: of whole caches.
    SLOTS = 22
    #: Answers a message that has no other answer (APPEND, DROP): done.
    DONE = 23
    #: Answers any message: not done, and why, in UTF-8; `rows`: the hold that it is about, 0: all. The channel goes on.
    REFUSED = 24
    #: Rows of attention's result. Answers a KEY_VALUE, and the query before it.
    OUT = 25
    #: Begins a part of a prompt that several workers compute, by a range of layers each: the plan, in msgpack. Then
    #: KEY_VALUEs of `layer` and block `step`, and ACTIVATIONs of chunk `step`, by the plan; DONE ends it.
    STAGE = 26


class Dtype(enum.IntEnum):
    """Numbers of the payload."""

    NONE = 0
    F32 = 1
    BF16 = 2
    F16 = 3
    I32 = 4


class MessageHeader(NamedTuple):
    """A message without its payload. The sender leaves the last two to the channel."""

    op: Op
    dtype: Dtype = Dtype.NONE
    group: int = 0
    layer: int = 0
    #: Parts (segments) of each row, where the payload is states; of an APPEND, messages that follow it.
    parts: int = 0
    rows: int = 0
    step: int = 0
    #: Number of a slot list that was sent before; 0: none.
    slots: int = 0
    payload_bytes: int = 0
    sequence: int = 0


class HeaderInvalid(ValueError):
    """Bytes that are no header; the text names the field."""


_OPS: Sequence[Op | None] = [next((op for op in Op if op == number), None) for number in range(256)]
_DTYPES: Sequence[Dtype | None] = [
    next((dtype for dtype in Dtype if dtype == number), None) for number in range(256)
]


def pack_into(
    buffer: memoryview, header: MessageHeader, payload_bytes: int, sequence: int, consumed: int
) -> None:
    """All but the seal. Raises HeaderInvalid: a field of `header` does not fit."""
    op, dtype, group, layer, parts, rows, step, slots, _, _ = header
    try:
        _LAYOUT.pack_into(
            buffer, 0, MAGIC, VERSION, op, dtype, group, layer, parts, rows, step, slots,
            payload_bytes, sequence, consumed,
        )  # fmt: skip
    except struct.error as problem:
        raise HeaderInvalid(f"{header}: {problem}") from None


def unpack(buffer: memoryview) -> tuple[MessageHeader, int]:
    """The header, and `consumed`. Raises HeaderInvalid."""
    (
        magic, version, op_number, dtype_number, group, layer, parts, rows, step, slots,
        payload_bytes, sequence, consumed,
    ) = _LAYOUT.unpack_from(buffer)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise HeaderInvalid(f"version: {magic:#06x} {version} where {MAGIC:#06x} {VERSION} was due")
    op, dtype = _OPS[op_number], _DTYPES[dtype_number]
    if op is None:
        raise HeaderInvalid(f"op: {op_number} is none")
    if dtype is None:
        raise HeaderInvalid(f"dtype: {dtype_number} is none")
    fields = (op, dtype, group, layer, parts, rows, step, slots, payload_bytes, sequence)
    return tuple.__new__(MessageHeader, fields), consumed  # half the time of MessageHeader(...)
