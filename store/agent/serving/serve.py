"""Subscribes the agent's verbs. Errors of the store leave as ProcessErrors of their code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nats.aio.subscription import Subscription

from halfmoon.bus.errors import PeerError
from halfmoon.schemas import store as messages
from halfmoon.schemas import subjects
from halfmoon.schemas.events import StoreJoined
from halfmoon.schemas.types import Message
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.processes import KnownProcesses
from halfmoon.store.agent.replicas import Replicator
from halfmoon.store.agent.serving.serve_clients import ClientService
from halfmoon.store.agent.serving.serve_peers import PeerService
from halfmoon.store.agent.serving.serve_workers import WorkerService
from halfmoon.store.agent.spans import traced
from halfmoon.store.errors import StoreError

Answer = Callable[[Any], Any]


#: Every verb, and the message that asks it.
VERBS: Mapping[str, type[Message]] = {
    "attach": messages.Attach,
    "open_put": messages.OpenPut,
    "fetch": messages.FetchBlocks,
    "commit": messages.CommitBlocks,
    "open_push": messages.OpenPush,
    "close_push": messages.ClosePush,
    "release": messages.ReleaseBlocks,
    "status": messages.StoreStatusRequest,
    "replicate": messages.Replicate,
    "drain": messages.DrainStore,
    "probe": messages.ProbeBlocks,
    "take": messages.TakeBlocks,
    "remove": messages.RemoveBlocks,
    "pin": messages.PinBlocks,
    "hello": messages.Hello,
    "lease": messages.LeaseBlocks,
    "end_lease": messages.EndLease,
    "reserve": messages.ReserveBlocks,
    "renew": messages.RenewBlocks,
    "settle": messages.SettleBlocks,
    "drop": messages.DropBlocks,
    "pair": messages.QueuePair,
    "push": messages.PushLayers,
    "keep": messages.KeepOrders,
}


def answers(context: AgentContext, processes: KnownProcesses, replicator: Replicator) -> dict[str, Answer]:
    """By verb. A push that is published is not answered, nor is a `keep`: neither waits for a slot."""
    workers, peers = WorkerService(context, processes), PeerService(context, processes)
    clients = ClientService(context)
    waiting: dict[str, Answer] = {
        "attach": workers.attach,
        "open_put": workers.open_put,
        "fetch": workers.fetch,
        "commit": workers.commit,
        "open_push": workers.open_push,
        "close_push": workers.close_push,
        "release": workers.release,
        "status": workers.status,
        "replicate": replicator.replicate,
        "drain": replicator.drain,
        "probe": clients.probe,
        "take": clients.take,
        "remove": clients.remove,
        "pin": clients.pin,
        "hello": peers.hello,
        "lease": peers.lease,
        "end_lease": peers.end_lease,
        "reserve": peers.reserve,
        "renew": peers.renew,
        "settle": peers.settle,
        "drop": peers.drop,
        "pair": peers.pair,
    }
    return {
        **{verb: _answering(context, answer) for verb, answer in waiting.items()},
        "push": workers.push,
        "keep": workers.keep,
    }


async def serve_all(
    context: AgentContext, processes: KnownProcesses, replicator: Replicator
) -> list[Subscription]:
    """Subscribes every verb, and hears of the other agents that join."""
    bus, node_id = context.bus, context.config.node_id
    answer_of = answers(context, processes, replicator)

    async def agent_joined(event: StoreJoined) -> None:
        await processes.agent_seen(event.node_id, event.incarnation)

    joined = subjects.events_of_kind(StoreJoined.__name__)
    return [
        await bus.subscribe(joined, StoreJoined, agent_joined),
        *[
            await bus.serve(subjects.store(node_id, verb), kind, answer_of[verb], published=verb == "push")
            for verb, kind in VERBS.items()
            if verb != "keep"
        ],
        await bus.subscribe(subjects.store(node_id, "keep"), messages.KeepOrders, answer_of["keep"]),
    ]


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
            answered: Message = await answer(request)
            return answered
        except StoreError as problem:
            context.counters[f"answered_{problem.code}"] += 1
            raise PeerError(problem.code, str(problem)[:500]) from None
        except ValueError as problem:
            raise PeerError("invalid_request", str(problem)[:500]) from None

    return answered
