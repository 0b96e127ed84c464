"""The frontend's NATS edge: the micro service `halfmoon`, JSON in, JSON out (docs/api.md).

A request's answers go to its reply subject. A client that stops listening is noticed like this: each chunk of a
stream is published *with* a reply subject of ours, and the server reports there (status 503) when nobody is
subscribed to the chunk's subject. While there is nothing to send, an empty chunk every 0.4 s keeps asking. A
request that is not a stream may name a subject for the same purpose in its header `Halfmoon-Alive`; and
anything can be ended with `.cancel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from halfmoon.bus.client import header_lines
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.version import VERSION
from halfmoon.bus.wire import reply_subject
from halfmoon.schemas import subjects
from halfmoon.schemas.api.bodies import CancelBody, TokenizeBody
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest, decode_body, parse_chat, parse_completion
from halfmoon.workers.frontend.cluster_status import ClusterStatus
from halfmoon.workers.frontend.edges.nats_request import (
    NatsListener,
    answer_too_large,
    client_traceparent,
    one_choice,
)
from halfmoon.workers.frontend.edges.nats_service import MicroService, ServiceEndpoint, settled
from halfmoon.workers.frontend.last_words import LastWords
from halfmoon.workers.frontend.open_request import OpenRequest
from halfmoon.workers.frontend.prompts import INLINE_CHARACTERS_MAX
from halfmoon.workers.frontend.registry import RequestRegistry
from halfmoon.workers.frontend.tenants import ALL_TENANTS, in_the_name_of, tenant_of_subject

#: Between frontends: who has this request? Only the one that has it answers.
CANCEL_ALL = f"{subjects.ROOT}.cancel"
CANCEL_ANSWER_S = 0.3
ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"

#: Of an error of ours: the log says more.
INTERNAL = ApiError(500, "internal error", code="internal")

Headers = dict[str, str]

log = logging.getLogger(__name__)


class NatsEdge:
    """`start`; then `stop_taking` before and `stop` after the registry stops."""

    def __init__(self, registry: RequestRegistry, status: ClusterStatus) -> None:
        self.registry = registry
        self._nc = registry.bus.nc
        self._status = status
        #: How reply subjects of clients begin.
        self.inboxes = registry.config.inbox_prefixes
        self._service = MicroService(
            self._nc,
            name=subjects.ROOT,
            service_id=registry.config.frontend_id,
            version=VERSION,
            description=f"{registry.config.model}, served from separate prefill and decode pools",
            inboxes=self.inboxes,
        )
        self._probe_prefix = self._nc.new_inbox()
        self._last_words = LastWords(self.send, probe=self._probe_prefix)
        self._listeners: dict[str, NatsListener] = {}
        self._others: list[Subscription] = []
        self.payload_bytes_max = self._nc.max_payload
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())
        self.registry.bus.on_loss.append(self._last_words.lost)
        self.registry.bus.on_reconnect.append(self._last_words.reconnected)
        self._others.append(await self._nc.subscribe(f"{self._probe_prefix}.*", cb=self._on_probe))
        self._others.append(await self._nc.subscribe(CANCEL_ALL, cb=self._cancel_for_another))
        await self._service.add("generate", subjects.api("generate"), self._generate)
        await self._service.add("chat", subjects.api("chat"), self._chat)
        await self._service.add("models", subjects.api("models"), self._models)
        await self._service.add("cancel", subjects.api("cancel"), self._cancel, unanswered=True)
        await self._service.add("status", subjects.api("status"), self._show_status)
        await self._service.add("tokenize", subjects.api("tokenize"), self._tokenize)
        await self._service.start()
        await settled(self._nc)

    async def stop_taking(self) -> None:
        await self._service.stop_taking()

    async def stop(self) -> None:
        await self._service.stop()
        for subscription in self._others:
            if not self._nc.is_closed:
                await subscription.unsubscribe()
        if self._watching is not None:
            await end_tasks([self._watching])

    # --- generating -----------------------------------------------------------------------------------------

    async def _generate(self, endpoint: ServiceEndpoint, msg: Msg) -> None:
        await self._open(endpoint, msg, parse_completion)

    async def _chat(self, endpoint: ServiceEndpoint, msg: Msg) -> None:
        await self._open(endpoint, msg, parse_chat)

    async def _open(self, endpoint: ServiceEndpoint, msg: Msg, read: Callable[[bytes], ApiRequest]) -> None:
        started_ns = time.monotonic_ns()
        try:
            await self.registry.admit()
            ask = in_the_name_of(one_choice(read(msg.data)), tenant_of_subject(msg.subject))
        except ApiError as error:
            chat, traceparent = read is parse_chat, client_traceparent(msg)
            self.registry.intake.refused(error, started_ns, chat=chat, traceparent=traceparent)
            self.refuse(endpoint, started_ns, msg.reply, error)
            return
        listener = NatsListener(self, endpoint, started_ns, msg, ask)
        # Tokenizing, or reading a grammar, may take a while: others go on.
        if len(msg.data) > INLINE_CHARACTERS_MAX or ask.structure is not None:
            self.registry.spawn(self._open_ask(listener, ask))
        else:
            await self._open_ask(listener, ask)

    async def _open_ask(self, listener: NatsListener, ask: ApiRequest) -> None:
        try:
            request = await self.registry.open(ask, listener, traceparent=listener.traceparent)
        except Exception as problem:
            error = problem if isinstance(problem, ApiError) else INTERNAL
            if error is INTERNAL:
                log.exception("a request could not be opened")
            traceparent = listener.traceparent
            self.registry.intake.refused(error, listener.started_ns, chat=ask.chat, traceparent=traceparent)
            self.refuse(listener.endpoint, listener.started_ns, listener.reply, error)
            return
        listener.request = request
        self._listeners[request.request_id] = listener

    def closed(self, request: OpenRequest) -> None:
        self._listeners.pop(request.request_id, None)

    # --- sending --------------------------------------------------------------------------------------------

    def send(self, subject: str, payload: bytes, reply: str = "", headers: Headers | None = None) -> None:
        """In order, soon; lost while the connection is: then the client asks again. "": nobody wants it."""
        if subject:
            self._nc.send(subject, payload, reply, header_lines(headers))

    def send_last(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        """The end of a request: told again where a lost connection may have swallowed it."""
        if subject:
            self._last_words.say(subject, payload, headers)

    def probe(self, request: OpenRequest) -> str:
        """The reply subject that tells us when nobody listens."""
        return f"{self._probe_prefix}.{request.request_id}"

    def refuse(self, endpoint: ServiceEndpoint, started_ns: int, reply: str, error: ApiError) -> None:
        self.registry.metrics.failed(error.status)
        self.answer_error(endpoint, started_ns, reply, error)

    def answer_error(self, endpoint: ServiceEndpoint, started_ns: int, reply: str, error: ApiError) -> None:
        # Any client may ask for it: nobody's words.
        endpoint.finished(started_ns, f"{error.status} {error.code}")
        message = re.sub(r"[^\x20-\x7e]", "?", error.message)[:512]
        headers = {ERROR_CODE_HEADER: str(error.status), ERROR_HEADER: message, **error.retry_headers()}
        self.send_last(reply, error.body(), headers)

    # --- is anybody there? ----------------------------------------------------------------------------------

    async def _on_probe(self, msg: Msg) -> None:
        if (msg.headers or {}).get("Status") != "503":
            return
        name = msg.subject.rpartition(".")[2]
        self._last_words.unheard(name)
        listener = self._listeners.get(name)
        # In the moments after a lost connection a client may not be back yet: it is asked again soon.
        if listener is not None and listener.request is not None and not self._last_words.in_grace:
            self._end(listener, "client gone")

    def _end(self, listener: NatsListener, reason: str) -> bool:
        request = listener.request
        assert request is not None
        self.closed(request)
        listener.endpoint.finished(listener.started_ns, reason)
        return self.registry.cancel(request, reason)

    async def _watch(self) -> None:
        alive_ns = self.registry.config.alive_ns
        while True:
            await asyncio.sleep(alive_ns / 4e9)
            now_ns = time.monotonic_ns()
            for listener in list(self._listeners.values()):
                if now_ns - listener.sent_ns >= alive_ns:
                    listener.sent_ns = now_ns
                    listener.keep_alive()

    # --- the rest -------------------------------------------------------------------------------------------

    async def _cancel(self, endpoint: ServiceEndpoint, msg: Msg) -> None:
        started_ns = time.monotonic_ns()
        try:
            name = decode_body(msg.data, CancelBody).id
            tenant = tenant_of_subject(msg.subject)
        except ApiError as error:
            self.refuse(endpoint, started_ns, msg.reply, error)
            return
        if self._cancel_here(name, tenant):
            self._reply(endpoint, started_ns, msg, {"id": name, "cancelled": True})
        else:
            self.registry.spawn(self._cancel_elsewhere(endpoint, started_ns, msg, name, tenant))

    def _cancel_here(self, name: str, tenant: str) -> bool:
        request = self.registry.find(name, tenant)
        if request is None:
            return False
        listener = self._listeners.get(request.request_id)
        error = ApiError(499, "cancelled", code="cancelled")
        if listener is not None:
            self.closed(request)
        self.registry.fail(request, error, "cancelled")
        return True

    async def _cancel_elsewhere(
        self, endpoint: ServiceEndpoint, started_ns: int, msg: Msg, name: str, tenant: str
    ) -> None:
        """Another frontend may have it. Ours hears the question too, and keeps silent."""
        cancelled = False
        with contextlib.suppress(NatsError):
            wanted = name if tenant == ALL_TENANTS else f"{name} {tenant}"
            await self._nc.request(CANCEL_ALL, wanted.encode(), timeout=CANCEL_ANSWER_S)
            cancelled = True
        self._reply(endpoint, started_ns, msg, {"id": name, "cancelled": cancelled})

    async def _cancel_for_another(self, msg: Msg) -> None:
        name, _, tenant = msg.data.decode(errors="replace").partition(" ")
        if self._cancel_here(name, tenant or ALL_TENANTS):
            self.send(reply_subject(msg.reply), b"")

    async def _models(self, endpoint: ServiceEndpoint, msg: Msg) -> None:
        async def answer() -> None:
            await self._status.read()  # what the cluster can hold now
            self._reply(endpoint, started_ns, msg, self.registry.prompts.models(self.registry.started_at_s))

        started_ns = time.monotonic_ns()
        self.registry.spawn(answer())

    async def _show_status(self, endpoint: ServiceEndpoint, msg: Msg) -> None:
        async def answer() -> None:
            self._reply(endpoint, started_ns, msg, await self._status.read())

        started_ns = time.monotonic_ns()
        self.registry.spawn(answer())

    async def _tokenize(self, endpoint: ServiceEndpoint, msg: Msg) -> None:
        async def answer() -> None:
            try:
                body = decode_body(msg.data, TokenizeBody)
                self._reply(endpoint, started_ns, msg, await self.registry.prompts.tokenize(body))
            except ApiError as error:
                self.refuse(endpoint, started_ns, msg.reply, error)

        started_ns = time.monotonic_ns()
        self.registry.spawn(answer())

    def _reply(self, endpoint: ServiceEndpoint, started_ns: int, msg: Msg, content: dict[str, Any]) -> None:
        answer = orjson.dumps(content)
        if len(answer) > self.payload_bytes_max:
            self.refuse(endpoint, started_ns, msg.reply, answer_too_large(answer, "over HTTP"))
            return
        endpoint.finished(started_ns)
        self.send_last(msg.reply, answer)
