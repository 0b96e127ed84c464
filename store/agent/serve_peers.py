"""The agent's answers to other agents: leases for readers, reservations for writers."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from halfmoon.schemas import store as messages
from halfmoon.schemas.keys import split_keys
from halfmoon.store.agent.ssd_load import promote
from halfmoon.store.errors import BlockMissing, OrderUnknown, StoreError, TransferRefused
from halfmoon.store.pool.guard import peer_writer
from halfmoon.store.pool.slots import Owner

if TYPE_CHECKING:
    from halfmoon.store.agent.agent import StoreAgent


async def hello(agent: StoreAgent, request: messages.Hello) -> messages.Hello:
    try:
        agent.peers.accept(request)
    except TransferRefused:
        agent.counters["refused_hello"] += 1
        raise
    await agent.know_agent(request.node_id, request.incarnation)
    return agent.hello()


async def lease(agent: StoreAgent, request: messages.LeaseBlocks) -> messages.Leased:
    owner = Owner(request.order_id, request.party)
    keys = split_keys(request.block_keys)
    if agent.tier is not None:
        # The reader waits no longer than it does for any answer; what is not here by then is a miss.
        await promote(agent, keys[request.first_block :], time.monotonic_ns() + agent.promotion_ns_max)
    try:
        hold, checksums = agent.guard.lease(owner, keys, request.first_block)
    except BlockMissing as problem:
        return messages.Leased(incarnation=agent.incarnation, missing=True, held=problem.held)
    return messages.Leased(incarnation=agent.incarnation, slots=hold.slots, checksums=checksums)


async def end_lease(agent: StoreAgent, request: messages.EndLease) -> messages.LeaseEnded:
    return messages.LeaseEnded(
        held=agent.guard.release(Owner(request.order_id, request.party), remember=True)
    )


async def reserve(agent: StoreAgent, request: messages.ReserveBlocks) -> messages.Reserved:
    keys = split_keys(request.block_keys)
    if request.blocks < len(keys):
        raise ValueError(f"blocks: {request.blocks} is less than the number of keys, {len(keys)}")
    agent.require_attached(request.decode_worker_id)
    writer = _writer(request.order_id, request.writer_node_id)
    hold = agent.guard.open_put(writer, keys, request.blocks, writer=writer.party, tenant=request.tenant)
    try:
        agent.guard.share(writer, Owner(request.order_id, request.decode_worker_id))
    except StoreError:
        agent.guard.release(writer, writers=[writer.party])
        raise
    return messages.Reserved(
        incarnation=agent.incarnation,
        slots=hold.slots,
        present=hold.present,
        lease_ttl_ns=agent.config.lease_ttl_ns,
    )


async def renew(agent: StoreAgent, request: messages.RenewBlocks) -> messages.Done:
    writer = _writer(request.order_id, request.writer_node_id)
    agent.guard.renew(writer, writer.party)
    with contextlib.suppress(OrderUnknown):  # the reader has all it wants
        agent.guard.hold(Owner(request.order_id, request.decode_worker_id))
    return messages.Done()


async def settle(agent: StoreAgent, request: messages.SettleBlocks) -> messages.Done:
    writer = _writer(request.order_id, request.writer_node_id)
    agent.guard.close_writer(writer, writer.party)
    hold = agent.guard.hold(writer)
    await agent.commit(writer, 0, len(hold.slots))
    agent.guard.release(writer)
    return messages.Done()


async def drop(agent: StoreAgent, request: messages.DropBlocks) -> messages.Done:
    """The reader of the reservation is told by the writer (`TransferFailed`)."""
    writer = _writer(request.order_id, request.writer_node_id)
    agent.guard.release(writer, writers=[writer.party], remember=True)
    agent.guard.release(Owner(request.order_id, request.decode_worker_id), remember=True)
    return messages.Done()


async def pair(agent: StoreAgent, request: messages.QueuePair) -> messages.QueuePair:
    if agent.rdma is None:
        raise TransferRefused(
            f"{agent.config.node_id} has no RDMA: {agent.absent.get('rdma', 'not started')}"
        )
    return agent.rdma.accept(request)


def _writer(order_id: str, node_id: str) -> Owner:
    """The writing node holds the reservation beside the decode worker, which may have read all and released
    it before the last block is committed."""
    return Owner(order_id, peer_writer(node_id))
