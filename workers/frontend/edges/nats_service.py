"""A NATS micro service: `$SRV.PING/INFO/STATS` and endpoints in a queue group.

nats-py's own measures an endpoint by how long its callback runs and counts only what it raises; our requests
are answered much later, by other callbacks, so the counting is done here. The messages are nats-py's.

A request is answered at its reply subject if that is a client's inbox. Any other is dropped and counted: nobody would
hear the answer, or the client would have us publish where it may not.

Source: NATS ADR-32 (service API).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.service import EndpointInfo, EndpointStats, ServiceInfo, ServicePing, ServiceStats

from halfmoon.bus.wire import CLIENT_INBOXES, reply_subject
from halfmoon.schemas import subjects
from halfmoon.workers.frontend.tenants import inboxes_of

QUEUE_GROUP = "q"


async def settled(nc: Client) -> None:
    """The server has taken in everything that was sent before.

    nats-py's `flush` alone does not say so: its PING overtakes commands that are still in the client's
    buffer. After the first flush the buffer was written, so the second PING is behind it.
    """
    await nc.flush()
    await nc.flush()


class ServiceEndpoint:
    """One subject. `finished` is to be called once for each request, when its last answer is out."""

    def __init__(self, name: str, subject: str) -> None:
        self.name = name
        self.subject = subject
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.processing_ns = 0
        self.subscriptions: list[Subscription] = []

    def finished(self, started_ns: int, error: str = "") -> None:
        """`started_ns`: of the monotonic clock."""
        self.requests += 1
        self.processing_ns += time.monotonic_ns() - started_ns
        if error:
            self.errors += 1
            self.last_error = error

    def stats(self) -> EndpointStats:
        return EndpointStats(
            name=self.name,
            subject=self.subject,
            queue_group=QUEUE_GROUP,
            num_requests=self.requests,
            num_errors=self.errors,
            processing_time=self.processing_ns,
            average_processing_time=self.processing_ns // max(1, self.requests),
            last_error=self.last_error,
        )


class MicroService:
    """See the module. `inboxes`: how the inboxes of clients begin."""

    def __init__(
        self,
        nc: Client,
        *,
        name: str,
        service_id: str,
        version: str,
        description: str,
        inboxes: tuple[str, ...] = CLIENT_INBOXES,
    ) -> None:
        self._nc = nc
        self._inboxes = inboxes
        self._name = name
        self._id = service_id
        self._version = version
        self._description = description
        self._started = datetime.now(UTC)
        self._subscriptions: list[Subscription] = []
        self.endpoints: list[ServiceEndpoint] = []

    async def start(self) -> None:
        for verb, answer in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            for subject in (
                f"$SRV.{verb}",
                f"$SRV.{verb}.{self._name}",
                f"$SRV.{verb}.{self._name}.{self._id}",
            ):
                self._subscriptions.append(await self._nc.subscribe(subject, cb=self._answering(answer)))

    async def add(
        self,
        name: str,
        subject: str,
        handler: Callable[[ServiceEndpoint, Msg], Awaitable[None]],
        *,
        unanswered: bool = False,
    ) -> ServiceEndpoint:
        """`handler` is awaited for one message after another: it must return soon. It also gets the tenants' requests
        (`subjects.tenant_of`).

        `unanswered`: it also gets what comes without a reply subject.
        """
        endpoint = ServiceEndpoint(name, subject)

        async def receive(msg: Msg) -> None:
            inboxes = inboxes_of(subjects.tenant_of(msg.subject), self._inboxes)
            if reply_subject(msg.reply, inboxes) or (unanswered and not msg.reply):
                await handler(endpoint, msg)
            else:
                reason = "no inbox" if msg.reply else "missing"
                endpoint.finished(time.monotonic_ns(), f"reply subject: {reason}")

        endpoint.subscriptions = [
            await self._nc.subscribe(each, queue=QUEUE_GROUP, cb=receive)
            for each in (subject, f"{subject}.*")  # and of each tenant
        ]
        self.endpoints.append(endpoint)
        return endpoint

    async def stop_taking(self) -> None:
        """No new requests; those that arrived already are still given to their handlers."""
        if self._nc.is_closed:
            return
        for endpoint in self.endpoints:
            for subscription in endpoint.subscriptions:
                await self._nc._send_unsubscribe(subscription._id)
        await settled(self._nc)
        for endpoint in self.endpoints:
            for subscription in endpoint.subscriptions:
                await subscription.drain()  # type: ignore[no-untyped-call]
            endpoint.subscriptions.clear()

    async def stop(self) -> None:
        if self._nc.is_closed:
            return
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    def _answering(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Msg], Awaitable[None]]:
        async def receive(msg: Msg) -> None:
            if reply_subject(msg.reply, self._inboxes):
                await self._nc.publish(msg.reply, orjson.dumps(answer()))

        return receive

    def _ping(self) -> dict[str, Any]:
        return ServicePing(id=self._id, name=self._name, version=self._version).to_dict()

    def _info(self) -> dict[str, Any]:
        return ServiceInfo(
            id=self._id,
            name=self._name,
            version=self._version,
            description=self._description,
            endpoints=[EndpointInfo(each.name, each.subject, QUEUE_GROUP) for each in self.endpoints],
        ).to_dict()

    def _stats(self) -> dict[str, Any]:
        return ServiceStats(
            id=self._id,
            name=self._name,
            version=self._version,
            started=self._started,
            endpoints=[each.stats() for each in self.endpoints],
        ).to_dict()
