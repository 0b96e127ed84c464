"""Subscribes the agent's verbs. Errors of the store leave as ProcessErrors of their code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.subscription import Subscription

from halfmoon.bus.errors import PeerError
from halfmoon.schemas import replicas as copies
from halfmoon.schemas import store as messages
from halfmoon.schemas import subjects
from halfmoon.schemas.types import Message
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.processes import KnownProcesses
from halfmoon.store.agent.replicas import Replicator
from halfmoon.store.agent.serve_clients import ClientService
from halfmoon.store.agent.serve_peers import PeerService
from halfmoon.store.agent.serve_workers import WorkerService
from halfmoon.store.agent.spans import traced
from halfmoon.store.errors import StoreError

Answer = Callable[[Any], Awaitable[Message]]


async def serve_all(
    context: AgentContext, processes: KnownProcesses, replicator: Replicator
) -> list[Subscription]:
    """Subscribes every verb."""
    workers, peers = WorkerService(context, processes), PeerService(context, processes)
    clients = ClientService(context)
    verbs: list[tuple[str, type[Message], Answer]] = [
        ("attach", messages.Attach, workers.attach),
        ("open_put", messages.OpenPut, workers.open_put),
        ("fetch", messages.FetchBlocks, workers.fetch),
        ("commit", messages.CommitBlocks, workers.commit),
        ("open_push", messages.OpenPush, workers.open_push),
        ("close_push", messages.ClosePush, workers.close_push),
        ("release", messages.ReleaseBlocks, workers.release),
        ("status", messages.StoreStatusRequest, workers.status),
        ("replicate", copies.Replicate, replicator.replicate),
        ("drain", copies.DrainStore, replicator.drain),
        ("probe", messages.ProbeBlocks, clients.probe),
        ("take", messages.TakeBlocks, clients.take),
        ("remove", messages.RemoveBlocks, clients.remove),
        ("pin", messages.PinBlocks, clients.pin),
        ("hello", messages.Hello, peers.hello),
        ("lease", messages.LeaseBlocks, peers.lease),
        ("end_lease", messages.EndLease, peers.end_lease),
        ("reserve", messages.ReserveBlocks, peers.reserve),
        ("renew", messages.RenewBlocks, peers.renew),
        ("settle", messages.SettleBlocks, peers.settle),
        ("drop", messages.DropBlocks, peers.drop),
        ("pair", messages.QueuePair, peers.pair),
    ]
    bus, node_id = context.bus, context.config.node_id
    # A push is answered as soon as it is heard, and nothing is answered to `keep`: neither waits for the store.
    subscriptions = [
        await bus.serve(subjects.store(node_id, "push"), messages.PushLayers, workers.push),
        await bus.subscribe(subjects.store(node_id, "keep"), messages.KeepOrders, workers.keep),
    ]
    for verb, kind, answer in verbs:
        subscriptions.append(
            await bus.serve(subjects.store(node_id, verb), kind, _answering(context, answer))
        )
    return subscriptions


def _answering(context: AgentContext, answer: Answer) -> Answer:
    """`answer`, traced where the request asks for it, with the store's errors as those of the bus."""

    async def answered(request: Message) -> Message:
        try:
            if (
                context.tracing is not None
                and isinstance(request, messages.FetchBlocks | messages.ClosePush)
                and request.traceparent
            ):
                return await traced(context, context.tracing, answer, request)
            return await answer(request)
        except StoreError as problem:
            context.counters[f"answered_{problem.code}"] += 1
            raise PeerError(problem.code, str(problem)[:500]) from None
        except ValueError as problem:
            raise PeerError("invalid_request", str(problem)[:500]) from None

    return answered
