"""Sampled tokens on their way to the frontends: one message a step for each, and again when a frontend asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from halfmoon.schemas.tokens import Delivery, ResendReply, ResendRequest, TokensSampled
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.machines import Deliver

#: Most bytes of tokens in one message; a frontend's message of them to its client is up to four times as long, and must
#: fit too.
MESSAGE_BYTES_MAX = 128 << 10
#: JSON around a delivery, of one token, and of one of its log probabilities: at most.
_DELIVERY_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 1024, 128, 40


def _token_bytes(sequence: DecodeSequence) -> int:
    return _TOKEN_BYTES + _LOGPROB_BYTES * max(0, sequence.sampling.logprobs)


def deliveries_of(fresh: Iterable[tuple[DecodeSequence, int]], worker_id: str) -> list[Deliver]:
    """Tokens of each sequence from the given index on. The frontend asks again for tokens lost in a reconnect."""
    by_frontend: dict[str, list[tuple[Delivery, int]]] = {}
    for sequence, index in fresh:
        delivery = sequence.delivery(index, worker_id)
        size = _DELIVERY_BYTES + len(delivery.tokens) * _token_bytes(sequence)
        if delivery.tokens and not index:
            size += len(delivery.tokens[0].prompt_logprobs) * 4 // 3
        by_frontend.setdefault(sequence.order.frontend_id, []).append((delivery, size))
    return [
        Deliver(frontend_id, TokensSampled(worker_id=worker_id, deliveries=part))
        for frontend_id, deliveries in by_frontend.items()
        for part in _parts(deliveries)
    ]


def _parts(deliveries: list[tuple[Delivery, int]]) -> Iterator[list[Delivery]]:
    """In messages of `MESSAGE_BYTES_MAX`; each has one at least."""
    part: list[Delivery] = []
    room = MESSAGE_BYTES_MAX
    for delivery, size in deliveries:
        if part and size > room:
            yield part
            part, room = [], MESSAGE_BYTES_MAX
        part.append(delivery)
        room -= size
    yield part


def resend_reply(sequence: DecodeSequence | None, request: ResendRequest, worker_id: str) -> ResendReply:
    """Tokens that the frontend missed, from an index on; `sequence` None: the worker knows no such order."""
    if sequence is None or sequence.order.frontend_id != request.frontend_id:
        # Another frontend's request: this one may not learn of it.
        return ResendReply(known=False)
    index = request.index
    if len(sequence.output) <= index and not sequence.finish_reason:
        return ResendReply(known=True)
    count = MESSAGE_BYTES_MAX // _token_bytes(sequence)
    more = len(sequence.output) - index > count
    return ResendReply(known=True, delivery=sequence.delivery(index, worker_id, count=count), more=more)
