"""One answer over HTTP: all choices of one body, each of which is a request of its own to the cluster.

Choices of one prompt share its KVCache as any two requests do, by the blocks of its prefix. So that these are computed
once, the further ones of a prompt that has a whole block are opened when the first has its first token: then the
blocks are in a pool.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator

import msgspec
from aiohttp import web

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.frontend.openai.answers import ChoicePlace, OpenAiFormatter
from halfmoon.workers.frontend.registry import RequestRegistry

#: What may wait in memory for a client that does not read its stream.
UNREAD_BYTES_MAX = 1 << 20
#: A comment of server-sent events: clients pass over it, and proxies see that the connection lives.
COMMENT = b": still here\n\n"
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def prompts_of(ask: ApiRequest) -> Iterator[ApiRequest]:
    """Each prompt of a request as one; its own name is the first one's."""
    yield dataclasses.replace(ask, more_prompts=()) if ask.more_prompts else ask
    for prompt in ask.more_prompts:
        yield dataclasses.replace(ask, prompt=prompt, more_prompts=(), request_id="")


def choice_of(ask: ApiRequest, number: int) -> ApiRequest:
    """Choice `number` of one prompt: another seed, as in vLLM."""
    if not number:
        return ask
    sampling = ask.sampling.reseeded(number)
    if not ask.answer.stream:  # those of the prompt come with its first choice
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
    return dataclasses.replace(ask, sampling=sampling, request_id="")


class EventStream(web.StreamResponse):
    """Server-sent events. Its head leaves with the first event, and its end with what `write_eof` is given: a stream
    of one event is one send.
    """

    #: As of aiohttp's `Response`: `prepare` alone sends nothing.
    _send_headers_immediately = False

    def __init__(self, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={**_STREAM_HEADERS, **(headers or {})})


class UnreadEvents(abc.ABC):
    """Events for one client, from the registry's callbacks to the handler that writes them: `wait_to_begin` or `wait`,
    then `drain`, until it has `ended`. A client that reads too little loses its connection.
    """

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._waiter: asyncio.Future[bool] | None = None
        self._waiting_bytes = 0
        self.events: list[bytes] = []
        self.ended = False
        self.error: ApiError | None = None

    def drain(self, *, heard: bool) -> bytes:
        """The events that are to be written, or a comment where the wait was for nothing (not `heard`)."""
        events = b"".join(self.events)
        self.events.clear()
        self._waiting_bytes = 0
        return events or (b"" if heard else COMMENT)

    async def wait(self, pause_s: float = 0.0) -> bool:
        """Until there is something to write, or the end; False: `pause_s` (0: any time) went by without."""
        if self.events or self.ended:
            return True
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiter = waiter
        if not pause_s:
            return await waiter
        timer = self._loop.call_later(pause_s, _resolve, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()

    async def wait_to_begin(self, pause_s: float) -> bool:
        """As `wait`, for the first time: a pause counts only once a worker has the request.

        The first thing said takes the status with it. While a request waits for a worker (`--worker-wait-s`) it may
        still be refused, which is a status that clients try again at.
        """
        while not await self.wait(pause_s):
            if self.placed:
                return False
        return True

    @property
    @abc.abstractmethod
    def placed(self) -> bool:
        """Whether a worker has it."""

    def _send(self, event: bytes) -> None:
        if event:
            self.events.append(event)
            self._waiting_bytes += len(event)
            if self._waiting_bytes > UNREAD_BYTES_MAX and self._transport is not None:
                self._transport.abort()  # which cancels the handler, and so the request

    def _wake(self) -> None:
        if (self.events or self.ended) and self._waiter is not None:
            _resolve(self._waiter, True)


def _resolve(waiter: asyncio.Future[bool], heard: bool) -> None:
    if not waiter.done():
        waiter.set_result(heard)


async def send_events(
    request: web.BaseRequest,
    unread: UnreadEvents,
    headers: dict[str, str],
    pause_s: float,
    *,
    refused: Callable[[ApiError], web.Response],
    error_event: Callable[[ApiError], bytes],
) -> web.StreamResponse:
    """Answers with events until they have ended, and with a comment after each `pause_s` (0: never) without one. An
    error before the first of them is `refused`, a later one is an `error_event`.
    """
    heard = await unread.wait_to_begin(pause_s)
    if unread.error is not None and not unread.events:
        return refused(unread.error)
    response = EventStream(headers)
    await response.prepare(request)
    while True:
        written = unread.drain(heard=heard)
        if unread.error is not None:
            written += error_event(unread.error)
        if unread.ended:
            await response.write_eof(written)
            return response
        if written:
            await response.write(written)
        heard = await unread.wait(pause_s)


class HttpAnswer(UnreadEvents):
    """`open`, then `wait` and `drain` until it has `ended`; `cancel` when the client leaves."""

    def __init__(self, registry: RequestRegistry, transport: asyncio.Transport | None) -> None:
        super().__init__(transport)
        self._registry = registry
        self._created_s = int(time.time())
        self._traceparent = ""
        self._max_tokens_default: int | None = None
        self._forms: dict[int, OpenAiFormatter] = {}
        self._left = 0
        #: Choices that wait for the first token of the one that they stand under.
        self._later: dict[int, list[tuple[int, ApiRequest]]] = {}
        self._gone = False
        self._alone = True

    @property
    def request_id(self) -> str:
        return self._forms[0].request.request_id

    @property
    def placed(self) -> bool:
        return any(form.request.order_id for form in self._forms.values())

    async def open(self, ask: ApiRequest, *, traceparent: str, max_tokens_default: int | None) -> None:
        """Raises ApiError; then nothing is open."""
        self._traceparent, self._max_tokens_default = traceparent, max_tokens_default
        prompts = list(prompts_of(ask))
        self._left = len(prompts) * ask.n
        self._alone = self._left == 1
        try:
            for place, prompt in enumerate(prompts):
                first = place * ask.n
                if place:
                    await self._registry.admit()
                opened = await self._open(first, prompt)
                others = [(first + number, choice_of(prompt, number)) for number in range(1, ask.n)]
                if (
                    others
                    and opened.arrived.prompt_tokens > self._registry.block_tokens
                    and not opened.output_ids
                ):
                    self._later[first] = others
                else:
                    await self._open_all(others)
        except (ApiError, asyncio.CancelledError):
            self.cancel()
            raise

    async def _open_all(self, choices: list[tuple[int, ApiRequest]]) -> None:
        for index, ask in choices:
            await self._registry.admit()
            await self._open(index, ask)

    async def _open(self, index: int, ask: ApiRequest) -> OpenRequest:
        registry = self._registry
        opened = await registry.open(
            ask,
            _Choice(self, index),
            traceparent=self._traceparent,
            max_tokens_default=self._max_tokens_default,
        )
        first = self._forms.get(index - index % ask.n)
        self._forms[index] = OpenAiFormatter(
            opened,
            registry.tokenizer,
            registry.config.model,
            self._created_s,
            ChoicePlace(index, self._forms[0].request.request_id if index else "", self._alone),
            scored=first.request if first is not None and not ask.answer.stream else None,
        )
        if self._gone:
            registry.cancel(opened)
        return opened

    async def _open_later(self, choices: list[tuple[int, ApiRequest]]) -> None:
        try:
            await self._open_all([each for each in choices if not self._gone])
        except ApiError as error:
            self.fail(error)

    # --- from the registry ----------------------------------------------------------------------------------

    def on_piece(self, index: int, request: OpenRequest, piece: Piece) -> None:
        if self.error is not None:
            return
        if later := self._later.pop(index, None):
            self._registry.spawn(self._open_later(later))
        form = self._forms[index]
        if request.ask.answer.stream:
            event = form.event(piece)
            if not piece.first:
                event = form.first_event() + event
            self._send(event)
        if piece.finish_reason:
            self._left -= 1
            self.ended = not self._left
            if self.ended and request.ask.answer.stream:
                self._send(form.last_events([each.request for _, each in sorted(self._forms.items())]))
        self._wake()

    def fail(self, error: ApiError) -> None:
        """One choice failed: the answer has failed."""
        if self.error is None:
            self.error = error
            self.ended = True
            self.cancel()
            self._wake()

    # --- for the edge ---------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._gone = True
        self._later.clear()
        for form in self._forms.values():
            self._registry.cancel(form.request)

    def body(self) -> bytes:
        forms = [form for _, form in sorted(self._forms.items())]
        return forms[0].body(forms)


class _Choice:
    """The listener of one choice's request."""

    __slots__ = ("_answer", "_index")

    def __init__(self, answer: HttpAnswer, index: int) -> None:
        self._answer, self._index = answer, index

    def on_piece(self, request: OpenRequest, piece: Piece) -> None:
        self._answer.on_piece(self._index, request, piece)

    def on_error(self, request: OpenRequest, error: ApiError) -> None:
        self._answer.fail(error)
