"""The agent's answers to other agents: leases for readers, reservations for writers."""

from __future__ import annotations

import contextlib
import time

from halfmoon.schemas import store as messages
from halfmoon.schemas.keys import split_keys
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.processes import KnownProcesses
from halfmoon.store.agent.tier_load import promote
from halfmoon.store.errors import BlockMissing, OrderUnknown, StoreError, TransferRefused
from halfmoon.store.pool.guard import peer_writer
from halfmoon.store.pool.slots import Owner

#: Loading from a slower tier may take this share of the time that the reader waits for its lease.
PROMOTION_SHARE = 0.6


class PeerService:
    """One method a verb. Raises StoreErrors, which `serve` answers as ProcessErrors of their code."""

    def __init__(self, context: AgentContext, processes: KnownProcesses) -> None:
        self._context = context
        self._guard = context.guard
        self._processes = processes

    async def hello(self, request: messages.Hello) -> messages.Hello:
        try:
            self._context.peers.accept(request)
        except TransferRefused:
            self._context.counters["refused_hello"] += 1
            raise
        await self._processes.agent_seen(request.node_id, request.incarnation)
        return self._context.hello()

    async def lease(self, request: messages.LeaseBlocks) -> messages.Leased:
        owner = Owner(request.order_id, request.party)
        keys = split_keys(request.block_keys)
        if self._context.tier is not None:
            # The reader waits no longer than for any other answer; a block that is not here by then is a miss.
            patience_ns = int(self._context.config.control_timeout_s * PROMOTION_SHARE * 1e9)
            wanted = keys[request.first_block :]
            await promote(self._context, self._context.tier, wanted, time.monotonic_ns() + patience_ns)
        try:
            hold, checksums = self._guard.lease(owner, keys, request.first_block)
        except BlockMissing as problem:
            return messages.Leased(incarnation=self._context.incarnation, missing=True, held=problem.held)
        return messages.Leased(incarnation=self._context.incarnation, slots=hold.slots, checksums=checksums)

    async def end_lease(self, request: messages.EndLease) -> messages.LeaseEnded:
        return messages.LeaseEnded(
            held=self._guard.release(Owner(request.order_id, request.party), remember=True)
        )

    async def reserve(self, request: messages.ReserveBlocks) -> messages.Reserved:
        keys = split_keys(request.block_keys)
        if request.blocks < len(keys):
            raise ValueError(f"blocks: {request.blocks} is less than the number of keys, {len(keys)}")
        self._processes.require_attached(request.decode_worker_id)
        self._context.kv_events.learn(request.block_keys, request.token_ids)
        writer = _writer(request.order_id, request.writer_node_id)
        hold = self._guard.open_put(writer, keys, request.blocks, writer=writer.party, tenant=request.tenant)
        try:
            self._guard.share(writer, Owner(request.order_id, request.decode_worker_id))
        except StoreError:
            self._guard.release(writer, writers=[writer.party])
            raise
        return messages.Reserved(
            incarnation=self._context.incarnation,
            slots=hold.slots,
            epochs=hold.epochs,
            present=hold.present,
            lease_ttl_ns=self._context.config.lease_ttl_ns,
            takes_part=True,
            hears_runs=request.decode_worker_id in self._processes.hear_runs,
        )

    async def renew(self, request: messages.RenewBlocks) -> messages.Done:
        writer = _writer(request.order_id, request.writer_node_id)
        self._guard.renew(writer, writer.party)
        with contextlib.suppress(OrderUnknown):  # the reader has all it wants
            self._guard.hold(Owner(request.order_id, request.decode_worker_id))
        return messages.Done()

    async def settle(self, request: messages.SettleBlocks) -> messages.Done:
        writer = _writer(request.order_id, request.writer_node_id)
        self._guard.close_writer(writer, writer.party)
        hold = self._guard.hold(writer)
        await self._context.commit(writer, 0, len(hold.slots))
        self._guard.release(writer)
        return messages.Done()

    async def drop(self, request: messages.DropBlocks) -> messages.Done:
        """The writer's part of the reservation ends. The reader's does not: the decode worker may be copying from
        these slots, and hears of the failure by another way (`TransferFailed`), perhaps later, perhaps never. Its
        own release ends it, or the conductor's, or its lease.
        """
        writer = _writer(request.order_id, request.writer_node_id)
        self._guard.release(writer, writers=[writer.party], remember=True)
        return messages.Done()

    async def pair(self, request: messages.QueuePair) -> messages.QueuePair:
        return self._context.transports.accept_pair(request, self._context.config.node_id)


def _writer(order_id: str, node_id: str) -> Owner:
    """The writing node holds the reservation beside the decode worker, which may have read all and released
    it before the last block is committed."""
    return Owner(order_id, peer_writer(node_id))
