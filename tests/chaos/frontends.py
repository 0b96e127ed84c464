"""Frontends and clients of a make-believe cluster: they give tokens to workers, and piece answers together.

The rules of `halfmoon.workers.frontend`: only the newest order counts; tokens are taken in the order of their index,
repeats are dropped, a gap is asked for again. Every token is compared with the text that the client must get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from halfmoon.schemas.decisions import AnnounceYourself, Decision, FailRequest, RejectRequest
from halfmoon.schemas.events import (
    Event,
    FrontendHeartbeat,
    FrontendJoined,
    FrontendLeft,
    RequestCancelled,
)
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.tokens import (
    Delivery,
    ResendReply,
    ResendRequest,
    TakeReply,
    TakeRequest,
    TokensSampled,
)
from tests.chaos.network import Process
from tests.chaos.texts import Text
from tests.conductor.conductor_scripts import S

if TYPE_CHECKING:
    from tests.chaos.world import World

UNKNOWN_COUNT_MAX = 3


@dataclass
class OpenRequest:
    """What a client waits for, and what it has."""

    text: Text
    output: list[int] = field(default_factory=list)
    rank: tuple[int, ...] = (0, 0)
    order_id: str = ""
    decode_worker: str = ""
    unknown_count: int = 0


class Frontend(Process):
    """`open` are the requests whose clients wait."""

    role = "frontend"

    def __init__(self, world: World, process_id: str) -> None:
        super().__init__(world.net, process_id)
        self.world = world
        self.open: dict[str, OpenRequest] = {}

    def reset(self) -> None:
        self.open = {}
        self.announce()
        self.beat()

    def announce(self) -> None:
        self.say(FrontendJoined(frontend_id=self.process_id, incarnation=self.incarnation))
        for request in self.open.values():
            self.say(request.text.arrived)

    def beat(self) -> None:
        self.say(FrontendHeartbeat(frontend_id=self.process_id, incarnation=self.incarnation))
        for request_id in list(self.open):
            self.ask(request_id)
        self.net.remember_mark(self)
        self.later(1 * S, self.beat)

    def obey(self, decision: Decision) -> None:
        match decision:
            case AnnounceYourself():
                self.announce()
            case RejectRequest() | FailRequest():
                self.end(decision.request_id, type(decision).__name__)
            case _:
                raise AssertionError(decision)

    def left(self, incarnation: str) -> Event:
        return FrontendLeft(frontend_id=self.process_id, incarnation=incarnation)

    def under_way(self) -> str:
        return f"open at {self.process_id}: {sorted(self.open)}" if self.open else ""

    def die(self) -> None:
        super().die()
        for request_id in list(self.open):
            self.end(request_id, "frontend lost")

    # --- clients --------------------------------------------------------------------------------------------

    def accept(self, text: Text) -> None:
        self.open[text.arrived.request_id] = OpenRequest(text)
        self.say(text.arrived)

    def cancel(self, request_id: str) -> None:
        if request_id in self.open:
            self.end(request_id, "cancelled")
            self.say(RequestCancelled(request_id=request_id))

    def end(self, request_id: str, how: str) -> None:
        if self.open.pop(request_id, None) is not None:
            self.world.ended(request_id, how)

    # --- tokens, to the workers and from them ---------------------------------------------------------------

    def take(self, ask: TakeRequest) -> TakeReply:
        """A worker wants the tokens; `gone` when a newer order has the request."""
        request = self.open.get(ask.request_id)
        rank = tuple(int(part) for part in ask.order_id.split("-"))
        if request is None or rank < request.rank:
            return TakeReply(gone=True)
        if rank > request.rank:
            request.rank, request.order_id = rank, ask.order_id
            request.decode_worker, request.unknown_count = "", 0
        if ask.role in ("decode", "mixed"):
            request.decode_worker = ask.worker_id
        self.net.counts["resumed"] += bool(request.output) and ask.role in ("decode", "mixed")
        arrived = request.text.arrived
        return TakeReply(
            token_ids=request.text.packed_prompt,
            block_keys=arrived.block_keys,
            root_key=b"root",
            output_ids=pack_tokens(request.output) if request.output else b"",
            max_tokens=arrived.max_tokens,
            retain_percent=self.world.similar.retain_percent(request.text.number),
        )

    def hear_tokens(self, message: TokensSampled) -> None:
        for delivery in message.deliveries:
            self.accept_tokens(delivery, message.worker_id)

    def accept_tokens(self, delivery: Delivery, worker_id: str) -> None:
        request = self.open.get(delivery.request_id)
        if request is None or request.order_id != delivery.order_id:
            return
        request.decode_worker, request.unknown_count = worker_id, 0
        have, text = len(request.output), request.text
        if delivery.index > have:
            self.net.counts["gaps"] += 1
            self.ask(delivery.request_id)
            return
        for place, token in enumerate(delivery.tokens, delivery.index):
            wanted = text.tokens[place] if place < len(text.tokens) else "nothing"
            assert token.token_id == wanted, ("I97 another token", delivery.request_id, place, token, wanted)
        request.output += [token.token_id for token in delivery.tokens[have - delivery.index :]]
        # What becomes of an aborted order is for the conductors to say.
        if delivery.finish_reason in ("stop", "length"):
            assert delivery.finish_reason == text.reason, ("I97 ended otherwise", delivery, text.reason)
            assert request.output == text.tokens, ("I97 a wrong text", request.output, text.tokens)
            self.end(delivery.request_id, "finished")

    def ask(self, request_id: str) -> None:
        """Asks the decode worker for what was lost; one that knows nothing is told to the conductors anew."""
        request = self.open[request_id]
        if not request.decode_worker or not self.net.reachable(self):
            return
        worker = self.world.decoder(request.decode_worker)
        order_id = request.order_id
        reply = ResendReply(known=False)
        if worker.alive:
            if not self.net.reachable(worker):
                return
            question = ResendRequest(
                frontend_id=self.process_id,
                request_id=request_id,
                order_id=order_id,
                index=len(request.output),
            )
            reply = worker.resend(question)
        self.later(self.net.lag_ns(), lambda: self.answered(request_id, order_id, reply))

    def answered(self, request_id: str, order_id: str, reply: ResendReply) -> None:
        request = self.open.get(request_id)
        if request is None or request.order_id != order_id:
            return
        if reply.delivery is not None:
            self.accept_tokens(reply.delivery, request.decode_worker)
        elif not reply.known:
            request.unknown_count += 1
            if request.unknown_count % UNKNOWN_COUNT_MAX == 0:
                self.net.counts["answers lost"] += 1
                self.say(msgspec.structs.replace(request.text.arrived, answer_lost=True))
