"""The agent's answers, one function a verb. Errors of the store leave as ProcessErrors of their code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from nats.aio.subscription import Subscription

from halfmoon.bus.errors import PeerError
from halfmoon.schemas import replicas as copies
from halfmoon.schemas import store as messages
from halfmoon.schemas import subjects
from halfmoon.schemas.keys import join_keys, split_keys
from halfmoon.schemas.types import Message
from halfmoon.store.agent import replicas
from halfmoon.store.agent import serve_clients as clients
from halfmoon.store.agent import serve_peers as peers
from halfmoon.store.agent.fetch import fetch_blocks
from halfmoon.store.agent.push import Push
from halfmoon.store.agent.spans import traced
from halfmoon.store.agent.ssd_load import load_own
from halfmoon.store.errors import OrderUnknown, StoreError, TransferError
from halfmoon.store.pool.guard import WORKER
from halfmoon.store.pool.slots import Hold, Owner, tenant_mark

if TYPE_CHECKING:
    from halfmoon.store.agent.agent import StoreAgent


async def serve_all(agent: StoreAgent) -> list[Subscription]:
    """Subscribes every verb."""
    verbs: list[tuple[str, type[Message], Callable[[StoreAgent, Any], Awaitable[Message]]]] = [
        ("attach", messages.Attach, attach),
        ("open_put", messages.OpenPut, open_put),
        ("fetch", messages.FetchBlocks, fetch),
        ("commit", messages.CommitBlocks, commit),
        ("open_push", messages.OpenPush, open_push),
        ("close_push", messages.ClosePush, close_push),
        ("release", messages.ReleaseBlocks, release),
        ("status", messages.StoreStatusRequest, status),
        ("replicate", copies.Replicate, replicas.replicate),
        ("drain", copies.DrainStore, replicas.drain),
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
    node_id = agent.config.node_id
    subscriptions = [
        await agent.bus.serve(
            subjects.store(node_id, "push"), messages.PushLayers, functools.partial(push, agent)
        ),
        await agent.bus.subscribe(
            subjects.store(node_id, "keep"), messages.KeepOrders, functools.partial(keep, agent)
        ),
    ]
    for verb, kind, answer in verbs:
        handler = functools.partial(_answer, agent, answer)
        subscriptions.append(await agent.bus.serve(subjects.store(node_id, verb), kind, handler))
    return subscriptions


async def _answer(
    agent: StoreAgent, answer: Callable[[StoreAgent, Any], Awaitable[Message]], request: Message
) -> Message:
    try:
        if (
            agent.tracing is not None
            and isinstance(request, messages.FetchBlocks | messages.ClosePush)
            and request.traceparent
        ):
            return await traced(agent, agent.tracing, answer, request)
        return await answer(agent, request)
    except StoreError as problem:
        agent.counters[f"answered_{problem.code}"] += 1
        raise PeerError(problem.code, str(problem)[:500]) from None
    except ValueError as problem:
        raise PeerError("invalid_request", str(problem)[:500]) from None


# --- the node's workers -------------------------------------------------------------------------------------


async def attach(agent: StoreAgent, request: messages.Attach) -> messages.Attached:
    me = agent.hello()
    await agent.know_process(request.worker_id, request.process)
    if request.mapped == agent.incarnation:
        agent.attached.add(request.worker_id)
    return messages.Attached(
        node_id=me.node_id,
        incarnation=me.incarnation,
        segment=me.segment,
        slots=me.slots,
        layout=me.layout,
        lease_ttl_ns=agent.config.lease_ttl_ns,
        transfer_ns_max=agent.config.transfer_ns_max,
    )


async def open_put(agent: StoreAgent, request: messages.OpenPut) -> messages.PutOpened:
    keys = split_keys(request.block_keys)
    if request.blocks < len(keys):
        raise ValueError(f"blocks: {request.blocks} is less than the number of keys, {len(keys)}")
    agent.require_attached(request.worker_id)
    owner = Owner(request.order_id, request.worker_id)
    heads = split_keys(request.head_keys)
    clients.require_size(agent, request.block_bytes)
    tenant = tenant_mark(request.tenant)
    hold = agent.guard.open_put(owner, keys, request.blocks, writer=WORKER, heads=heads, tenant=tenant)
    return messages.PutOpened(
        slots=hold.slots,
        present=hold.present,
        incarnation=agent.incarnation,
        lease_ttl_ns=agent.config.lease_ttl_ns,
    )


async def commit(agent: StoreAgent, request: messages.CommitBlocks) -> messages.Done:
    owner = Owner(request.order_id, request.worker_id)
    _in_range(agent.guard.hold(owner), request.first_block, request.blocks)
    await agent.commit(owner, request.first_block, request.blocks)
    return messages.Done()


async def fetch(agent: StoreAgent, request: messages.FetchBlocks) -> messages.Fetched:
    owner = Owner(request.order_id, request.worker_id)
    hold = agent.guard.hold(owner)
    _in_range(hold, request.first_block, request.blocks)
    if not all(hold.keys[request.first_block : request.first_block + request.blocks]):
        raise ValueError("a block without a key cannot be fetched")
    if request.source_node_id == agent.config.node_id and agent.tier is not None:
        return await agent.run_for(owner, load_own(agent, owner, request))
    return await agent.run_for(owner, fetch_blocks(agent, owner, request))


async def open_push(agent: StoreAgent, request: messages.OpenPush) -> messages.Done:
    owner = Owner(request.order_id, request.worker_id)
    if agent.push_of(owner) is not None:
        raise ValueError(f"order {request.order_id} pushes already")
    return await agent.run_for(owner, _open_push(agent, owner, request))


async def _open_push(agent: StoreAgent, owner: Owner, request: messages.OpenPush) -> messages.Done:
    """Reserves at the target. When this is cancelled after the request left, the target is told to drop."""
    hold = agent.guard.hold(owner)
    config = agent.config
    peer = reserved = transport = None
    if request.target_node_id == config.node_id:
        agent.require_attached(request.decode_worker_id)
        agent.guard.share(owner, Owner(request.order_id, request.decode_worker_id))
    else:
        reserve = messages.ReserveBlocks(
            order_id=request.order_id,
            decode_worker_id=request.decode_worker_id,
            writer_node_id=config.node_id,
            block_keys=join_keys([key for key in hold.keys if key]),
            blocks=len(hold.slots),
            tenant=hold.tenant,
        )
        drop = messages.DropBlocks(
            order_id=request.order_id,
            decode_worker_id=request.decode_worker_id,
            writer_node_id=config.node_id,
        )
        try:
            peer = await agent.peers.get(request.target_node_id)
            reserved = await agent.peers.ask(peer.node_id, "reserve", reserve, messages.Reserved)
            peer = await agent.peers.get(peer.node_id, incarnation=reserved.incarnation)
            transport = agent.transport_to(peer)
        except BaseException as problem:
            if isinstance(problem, StoreError):
                agent.failed(request.target_node_id, problem)
            if peer is not None and (
                isinstance(problem, TransferError) or not isinstance(problem, StoreError)
            ):
                # No answer, or nobody to hear it any more: the reservation may be there all the same.
                agent.spawn(agent.peers.tell(peer.node_id, "drop", drop))
            raise

    def failed(problem: StoreError) -> None:
        agent.failed(request.target_node_id, problem)
        agent.spawn(running.end(str(problem)))

    running = Push(
        agent.bus,
        agent.peers,
        request,
        hold,
        node_id=config.node_id,
        layer_block_bytes=config.layout.layer_block_bytes,
        transfer_ns_max=config.transfer_ns_max,
        peer=peer,
        reserved=reserved,
        transport=transport,
        on_failure=failed,
    )
    agent.work(owner).push = running
    await running.start()
    return messages.Done()


def push(agent: StoreAgent, request: messages.PushLayers) -> messages.Done:
    """Answered as soon as it is heard; `close_push` says how it went, and finds out when one was lost."""
    for layer in request.pushes:
        owner = Owner(layer.order_id, request.worker_id)
        running = agent.push_of(owner)
        if running is None:
            agent.counters["pushes_unknown"] += 1
            continue
        try:
            agent.guard.hold(owner)
        except OrderUnknown as problem:
            running.fail(problem)
            continue
        running.push(layer)
    return messages.Done()


def keep(agent: StoreAgent, request: messages.KeepOrders) -> None:
    """No answer: an order that is gone says so at its next request."""
    for order_id in request.order_ids:
        with contextlib.suppress(OrderUnknown):
            agent.guard.hold(Owner(order_id, request.worker_id))


async def close_push(agent: StoreAgent, request: messages.ClosePush) -> messages.Pushed:
    owner = Owner(request.order_id, request.worker_id)
    running = agent.push_of(owner)
    if running is None:
        raise OrderUnknown(f"order {request.order_id} has no push here")
    agent.guard.hold(owner)
    pushed = await running.close(request.pushes)
    if running.opened.target_node_id == agent.config.node_id:
        await agent.commit(owner, 0, len(agent.guard.hold(owner).slots))
    agent.counters["pushed_bytes"] += pushed.bytes
    return pushed


async def release(agent: StoreAgent, request: messages.ReleaseBlocks) -> messages.Done:
    await agent.release(Owner(request.order_id, request.worker_id))
    return messages.Done()


async def status(agent: StoreAgent, _: messages.StoreStatusRequest) -> messages.StoreStatus:
    counts = agent.guard.counts()
    return messages.StoreStatus(
        node_id=agent.config.node_id,
        incarnation=agent.incarnation,
        slots=counts.slots,
        slots_free=counts.free,
        slots_reserved=counts.reserved,
        slots_committed=counts.committed,
        slots_condemned=counts.condemned,
        slots_leased=counts.leased,
        leases=counts.leases,
        holds=counts.holds,
        pushes_open=agent.pushes_open(),
        counters=dict(agent.counters),
        absent=dict(agent.absent),
    )


def _in_range(hold: Hold, first_block: int, blocks: int) -> None:
    if first_block + blocks > len(hold.slots):
        raise ValueError(f"blocks {first_block}..{first_block + blocks - 1}: the order has {len(hold.slots)}")
