"""Tokens of a cache here, sent to a hold elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.store.channels.inbox import REASON_BYTES_MAX, MessageRefused
from halfmoon.workers.attention.errors import PartRefused
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.model.paged_cache import PagedCache

#: Most messages of one push, by the field of the header that counts them.
MESSAGES_MAX = 2**16


def push_tokens(
    channel: WorkerChannel,
    hold: int,
    cache: PagedCache,
    blocks: Sequence[int],
    first_token: int,
    tokens: int,
    *,
    offset: int = 0,
    kv_heads: slice = slice(None),
) -> int:
    """Sends the KV of `tokens` tokens, which begin `offset` tokens into the first of `blocks`, to be those of the hold
    from its token `first_token` on; `kv_heads`: the heads of the hold's cache. Returns the bytes of KV that were sent,
    once all of them are there. No one else uses the channel meanwhile.

    Raises PartRefused, ChannelLost, ValueError: too many tokens for one push.
    """
    size = cache.block_tokens
    ends = [min(size, offset + tokens - at * size) for at in range(-(-(offset + tokens) // size))]
    chunks = [
        (block, offset if at == 0 else 0, end)
        for at, (block, end) in enumerate(zip(blocks, ends, strict=False))
    ]
    assert sum(end - begin for _, begin, end in chunks) == tokens > 0, (tokens, offset, len(blocks))
    left = len(chunks) * cache.layers
    if left > MESSAGES_MAX:
        raise ValueError(f"tokens: {tokens} are {left} messages, and a push has {MESSAGES_MAX} at most")
    total, first = 0, first_token
    for block, begin, end in chunks:
        rows = end - begin
        for layer in range(cache.layers):
            left -= 1
            payload = [
                bytes_of(half[layer, block, begin:end, kv_heads].contiguous()) for half in (cache.k, cache.v)
            ]
            header = MessageHeader(
                Op.APPEND, DTYPES[cache.dtype], layer=layer, parts=left, rows=rows, step=first, slots=hold
            )
            channel.send(header, *payload)
            total += sum(each.nbytes for each in payload)
        first += rows
    _await_done(channel)
    return total


def _await_done(channel: WorkerChannel) -> None:
    reason = bytearray()

    def into(header: MessageHeader) -> memoryview:
        if header.op not in (Op.DONE, Op.REFUSED) or header.payload_bytes > REASON_BYTES_MAX:
            raise MessageRefused(f"op: {header.op.name} of {header.payload_bytes} does not answer a push")
        reason.extend(bytes(header.payload_bytes))
        return memoryview(reason)

    if channel.receive(into).op is Op.REFUSED:
        raise PartRefused(channel.peer.worker_id, reason.decode(errors="replace"))
