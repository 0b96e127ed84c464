"""A prompt's tokens go to the workers that a conductor named, an answer's tokens come back to its open request.

Request ids and order ids are no secret among workers, so they are no right to a text.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from halfmoon.bus.errors import PeerError
from halfmoon.bus.tail import StreamTail
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import encode
from halfmoon.schemas.decisions import StartDecode, StartMixed, StartPrefill
from halfmoon.schemas.roles import ROLES
from halfmoon.schemas.tokens import (
    ORDER_UNKNOWN,
    DecodeGiven,
    TakeReply,
    TakeRequest,
    TokensGiven,
    TokensSampled,
)
from halfmoon.workers.frontend.open_request import OpenRequest, Progress, order_rank
from halfmoon.workers.frontend.prompts import PromptReader
from halfmoon.workers.frontend.redelivery import OpenRequests, Redelivery

#: A worker that asks before its placement was heard here waits so long; shorter than it waits for an answer.
_PLACED_NS_MAX = 1_500_000_000
_PLACED_PAUSE_S = 0.02
#: Of packed tokens: a shorter prompt's go to both workers, in one message that is written once.
_SHORT_BYTES = 4096


class EndingRequests(OpenRequests, Protocol):
    """The part of the registry that the exchange needs."""

    prompts: PromptReader

    def finish(self, request: OpenRequest, *, stopped: bool) -> None: ...


class TokenExchange:
    """One for a registry. `redelivery` asks again for what was lost on the way. `prompts_to_decode`: decode workers
    name the blocks that they generate by all tokens before them.
    """

    def __init__(self, requests: EndingRequests, *, prompts_to_decode: bool) -> None:
        self._requests = requests
        self._prompts_to_decode = prompts_to_decode
        self.redelivery = Redelivery(requests, self.on_tokens)
        self._newest_rank = (-1, -1)

    async def start(self) -> None:
        """Raises BusError."""
        bus, frontend_id = self._requests.bus, self._requests.config.frontend_id
        placements = await bus.open_placements(frontend_id)
        await bus.serve(subjects.take(frontend_id, "*"), TakeRequest, self._on_take, author="worker_id")
        tokens = subjects.tokens(frontend_id, "*")
        await bus.subscribe(tokens, TokensSampled, self.on_tokens, author="worker_id")
        self._requests.spawn(self._follow(placements))

    async def _follow(self, reader: StreamTail) -> None:
        async for ordered in self._requests.bus.follow_decisions(reader):
            match ordered.decision:
                case StartPrefill() as order:
                    self.on_placed(order, order.worker_id, order.decode_worker_id)
                case StartDecode() as order:
                    self.on_placed(order, "", order.worker_id)
                case StartMixed() as order:
                    self.on_placed(order, order.worker_id, order.worker_id)
                case _:
                    pass

    def on_placed(
        self, order: StartPrefill | StartDecode | StartMixed, prefill_id: str, decode_id: str
    ) -> None:
        """Give the workers the tokens before they ask. `prefill_id` "": nothing is to be computed anew."""
        prompts, rank = self._requests.prompts, order_rank(order.order_id)
        if rank > self._newest_rank:
            self._newest_rank, prompts.weight_version = rank, order.weight_version
        request = self._requests.requests.get(order.request_id)
        if request is None or rank <= request.order_rank:
            return  # not wanted any more; or another conductor's copy
        if order.weight_version != request.arrived.weight_version:
            keys = prompts.keys_of(request.ask, request.packed_prompt, order.weight_version)
            request.rekey(*keys, order.weight_version)
        resumes = bool(request.output_ids)
        request.prefill_worker = prefill_id
        request.progress_at_ns = time.monotonic_ns()
        ask = TakeRequest(
            request_id=order.request_id,
            order_id=order.order_id,
            worker_id=decode_id,
            role="decode",
        )
        self._give(order.order_id, request.take(ask), prefill_id, decode_id)
        if resumes:
            self._requests.metrics.resumed += 1

    def _give(self, order_id: str, taken: TakeReply, prefill_id: str, decode_id: str) -> None:
        send, me = self._requests.bus.nc.send, self._requests.config.frontend_id
        short = len(taken.token_ids) < _SHORT_BYTES
        to_both = short or self._prompts_to_decode or taken.sampling.reads_prompt
        receivers = dict.fromkeys(filter(None, (prefill_id, decode_id if to_both else "")))
        if receivers:
            given = encode(TokensGiven(frontend_id=me, order_id=order_id, taken=taken))
            for worker_id in receivers:
                send(subjects.give(worker_id, me), given)
        if decode_id not in receivers:
            without = msgspec.structs.replace(taken, token_ids=b"")
            given = encode(DecodeGiven(frontend_id=me, order_id=order_id, taken=without))
            send(subjects.give(decode_id, me), given)

    async def _on_take(self, ask: TakeRequest) -> TakeReply:
        """A worker asks for the tokens of an order: it gets those that a conductor named it for."""
        until_ns = time.monotonic_ns() + _PLACED_NS_MAX
        while (request := self._requests.requests.get(ask.request_id)) is not None:
            if order_rank(ask.order_id) <= request.order_rank:
                break
            if time.monotonic_ns() > until_ns:
                raise PeerError(ORDER_UNKNOWN, f"no conductor has placed {ask.order_id} yet")
            await asyncio.sleep(_PLACED_PAUSE_S)
        if request is None or ask.order_id != request.order_id:
            return TakeReply(gone=True)
        named = request.decode_worker if "batch" in ROLES[ask.role].duties else request.prefill_worker
        if ask.worker_id != named:
            raise PeerError("not_placed", f"{ask.order_id} was given to another worker")
        return request.take(ask)

    def on_tokens(self, message: TokensSampled) -> None:
        now_ns = time.monotonic_ns()
        for delivery in message.deliveries:
            request = self._requests.requests.get(delivery.request_id)
            if request is None or (request.order_id, request.decode_worker) != (
                delivery.order_id,
                message.worker_id,
            ):
                continue
            had, last_at_ns = len(request.output_ids), request.last_at_ns
            progress = request.accept(delivery, now_ns)
            if progress is Progress.GAP:
                self.redelivery.ask(request)
            elif progress is Progress.FAILED:
                assert request.failure is not None, request.request_id
                self._requests.fail(request, request.failure, "no answer")
            elif progress is not Progress.NOTHING:
                self._requests.metrics.count(request, had, last_at_ns)
                if progress is not Progress.MORE:
                    self._requests.finish(request, stopped=progress is Progress.STOPPED)
