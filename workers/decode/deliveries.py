"""Sampled tokens on their way to the frontends: one message a step for each, and again when a frontend asks."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.schemas.tokens import Delivery, ResendReply, ResendRequest, TokensSampled
from halfmoon.workers.decode.actions import Deliver
from halfmoon.workers.decode.sequence import DecodeSequence


def deliveries_of(fresh: Iterable[tuple[DecodeSequence, int]], worker_id: str) -> list[Deliver]:
    """Tokens of each sequence from the given index on. What is lost in a reconnect the frontend asks for again."""
    by_frontend: dict[str, list[Delivery]] = {}
    for sequence, index in fresh:
        by_frontend.setdefault(sequence.order.frontend_id, []).append(sequence.delivery(index, worker_id))
    return [
        Deliver(frontend_id, TokensSampled(worker_id=worker_id, deliveries=deliveries))
        for frontend_id, deliveries in by_frontend.items()
    ]


def resend_reply(sequence: DecodeSequence | None, request: ResendRequest, worker_id: str) -> ResendReply:
    """Tokens that the frontend missed, from an index on; `sequence` None: the worker knows no such order."""
    if sequence is None or sequence.order.frontend_id != request.frontend_id:
        return ResendReply(known=False)  # what is another frontend's is unknown to this one
    index = request.index
    if len(sequence.output) <= index and not sequence.finish_reason:
        return ResendReply(known=True)
    return ResendReply(known=True, delivery=sequence.delivery(index, worker_id))
