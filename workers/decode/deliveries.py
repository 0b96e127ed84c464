"""Sampled tokens on their way to the frontends: one message a step for each, and again when a frontend asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.tokens import Delivery, ResendReply, ResendRequest, TokensSampled
from halfmoon.workers.decode.sequence import Sequence


class Deliveries:
    """Of one decode worker. What is lost in a reconnect the frontend asks for again."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker_id = worker_id

    def send(self, fresh: Iterable[tuple[Sequence, int]]) -> None:
        """Tokens of each sequence from the given index on."""
        by_frontend: dict[str, list[Delivery]] = defaultdict(list)
        for sequence, index in fresh:
            by_frontend[sequence.order.frontend_id].append(sequence.delivery(index, self._worker_id))
        for frontend_id, deliveries in by_frontend.items():
            message = TokensSampled(worker_id=self._worker_id, deliveries=deliveries)
            self._bus.publish_soon(subjects.tokens(frontend_id), message)

    def again(self, request: ResendRequest, sequence: Sequence | None) -> ResendReply:
        """What the frontend missed of `sequence`; None: the worker knows no such order."""
        if sequence is None:
            return ResendReply(known=False)
        if len(sequence.output) <= request.index and not sequence.finish_reason:
            return ResendReply(known=True)
        return ResendReply(known=True, delivery=sequence.delivery(request.index, self._worker_id))
