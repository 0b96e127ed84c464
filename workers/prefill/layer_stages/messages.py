"""The messages between the workers that compute one prompt together, over a channel from the last one to each other.

::

    last ── STAGE (plan) ── KEY_VALUE × (own layers · cached blocks) ── ACTIVATION × chunks (not to the first) ─▶ stage
    last ◀─ chunk by chunk: KEY_VALUE × (own layers · blocks of the chunk), then ACTIVATION ── stage
    last ── DONE ─▶ stage

Both ends know the next message, and take no other. A KEY_VALUE is one layer of one block as it lies in a pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import Dtype, MessageHeader, Op
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.model.attention.kernel import Tensor

#: A stage that sends nothing, or takes nothing, for longer is lost; a cached layer's fetch may take this long.
STAGE_S_MAX = 60.0
#: Of a plan: tokens of the longest prompts, and some more.
PLAN_BYTES_MAX = 64 << 20


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage needs to know this beside its decision."""

    order_id: str
    #: Of the whole prompt, for the first stage; else [].
    token_ids: list[int]
    #: First token and end of each chunk.
    chunks: list[tuple[int, int]]
    prefix_blocks: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StagePlan)


def send_plan(channel: WorkerChannel, plan: StagePlan) -> None:
    """Raises ChannelLost, ValueError: it is longer than a message may be."""
    channel.send(MessageHeader(Op.STAGE), memoryview(_encoder.encode(plan)), timeout_s=STAGE_S_MAX)


def receive_plan(channel: WorkerChannel, timeout_s: float) -> StagePlan:
    """The first message of a channel. Raises ChannelLost, also for one that is no plan."""
    raw = bytearray()

    def into(header: MessageHeader) -> memoryview:
        if header.op is not Op.STAGE or header.payload_bytes > PLAN_BYTES_MAX:
            raise MessageRefused(f"op: {header.op.name} of {header.payload_bytes} bytes where a plan was due")
        raw.extend(bytes(header.payload_bytes))
        return memoryview(raw)

    channel.receive(into, timeout_s)
    return _decoder.decode(raw)


def send_block(channel: WorkerChannel, layer: int, block: int, payload: memoryview) -> None:
    """Raises ChannelLost."""
    channel.send(MessageHeader(Op.KEY_VALUE, layer=layer, step=block), payload, timeout_s=STAGE_S_MAX)


def receive_block(channel: WorkerChannel, layer: int, block: int, memory: memoryview) -> None:
    """Raises ChannelLost."""
    _receive(channel, Op.KEY_VALUE, Dtype.NONE, layer, block, memory)


def send_activation(channel: WorkerChannel, chunk: int, rows: Tensor) -> None:
    """Raises ChannelLost."""
    header = MessageHeader(Op.ACTIVATION, DTYPES[rows.dtype], rows=rows.shape[0], step=chunk)
    channel.send(header, bytes_of(rows), timeout_s=STAGE_S_MAX)


def receive_activation(channel: WorkerChannel, chunk: int, rows: Tensor) -> None:
    """Into `rows`. Raises ChannelLost."""
    _receive(channel, Op.ACTIVATION, DTYPES[rows.dtype], 0, chunk, bytes_of(rows))


def send_done(channel: WorkerChannel) -> None:
    """Raises ChannelLost."""
    channel.send(MessageHeader(Op.DONE))


def receive_done(channel: WorkerChannel) -> None:
    """Raises ChannelLost."""
    _receive(channel, Op.DONE, Dtype.NONE, 0, 0, memoryview(b""))


def blocks_of(chunk: Sequence[int], block_tokens: int) -> range:
    """The blocks of a chunk `(first token, end)`, which begins with one."""
    return range(chunk[0] // block_tokens, -(-chunk[1] // block_tokens))


def _receive(channel: WorkerChannel, op: Op, dtype: Dtype, layer: int, step: int, memory: memoryview) -> None:
    def into(header: MessageHeader) -> memoryview:
        due = (op, dtype, layer, step, memory.nbytes)
        if (header.op, header.dtype, header.layer, header.step, header.payload_bytes) != due:
            raise MessageRefused(f"op: {header} where {due} was due")
        return memory

    channel.receive(into, STAGE_S_MAX)
