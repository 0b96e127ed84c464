"""The agent's answers to its own node's workers, one method a verb."""

from __future__ import annotations

import contextlib

from halfmoon.schemas import store as messages
from halfmoon.schemas.keys import split_keys
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.fetch import fetch_blocks
from halfmoon.store.agent.open_push import open_push
from halfmoon.store.agent.processes import KnownProcesses
from halfmoon.store.agent.release import release
from halfmoon.store.agent.serving.serve_clients import require_size
from halfmoon.store.agent.tier_load import load_own
from halfmoon.store.errors import OrderUnknown
from halfmoon.store.pool.guard import WORKER
from halfmoon.store.pool.slots import Hold, Owner, tenant_mark


class WorkerService:
    """One method a verb. Raises StoreErrors, which `serve` answers as ProcessErrors of their code."""

    def __init__(self, context: AgentContext, processes: KnownProcesses) -> None:
        self._context = context
        self._guard = context.guard
        self._processes = processes

    async def attach(self, request: messages.Attach) -> messages.Attached:
        me = self._context.hello()
        await self._processes.worker_seen(request.worker_id, request.process)
        if request.mapped == self._context.incarnation:
            self._processes.attach(request.worker_id, hears_runs=request.hears_runs)
        return messages.Attached(
            node_id=me.node_id,
            incarnation=me.incarnation,
            segment=me.segment,
            slots=me.slots,
            layout=me.layout,
            lease_ttl_ns=self._context.config.lease_ttl_ns,
            transfer_ns_max=self._context.config.transfer_ns_max,
            wants_tokens=self._context.kv_events.wants_tokens,
            hears_pushes=True,
        )

    async def open_put(self, request: messages.OpenPut) -> messages.PutOpened:
        keys = split_keys(request.block_keys)
        if request.blocks < len(keys):
            raise ValueError(f"blocks: {request.blocks} is less than the number of keys, {len(keys)}")
        self._processes.require_attached(request.worker_id)
        owner = Owner(request.order_id, request.worker_id)
        heads = split_keys(request.head_keys)
        require_size(self._context.config.layout, request.block_bytes)
        tenant = tenant_mark(request.tenant)
        self._context.kv_events.learn(request.block_keys, request.token_ids, head_keys=request.head_keys)
        hold = self._guard.open_put(owner, keys, request.blocks, writer=WORKER, heads=heads, tenant=tenant)
        return messages.PutOpened(
            slots=hold.slots,
            epochs=hold.epochs,
            present=hold.present,
            incarnation=self._context.incarnation,
            lease_ttl_ns=self._context.config.lease_ttl_ns,
        )

    async def commit(self, request: messages.CommitBlocks) -> messages.Done:
        owner = Owner(request.order_id, request.worker_id)
        _in_range(self._guard.hold(owner), request.first_block, request.blocks)
        await self._context.commit(owner, request.first_block, request.blocks)
        return messages.Done()

    async def fetch(self, request: messages.FetchBlocks) -> messages.Fetched:
        owner = Owner(request.order_id, request.worker_id)
        hold = self._guard.hold(owner)
        _in_range(hold, request.first_block, request.blocks)
        if not all(hold.keys[request.first_block : request.first_block + request.blocks]):
            raise ValueError("a block without a key cannot be fetched")
        tier = self._context.tier
        if request.source_node_id == self._context.config.node_id and tier is not None:
            return await self._context.orders.run(owner, load_own(self._context, tier, owner, request))
        return await self._context.orders.run(owner, fetch_blocks(self._context, owner, request))

    async def open_push(self, request: messages.OpenPush) -> messages.Done:
        owner = Owner(request.order_id, request.worker_id)
        if self._context.orders.push_of(owner) is not None:
            raise ValueError(f"order {request.order_id} pushes already")
        if request.target_node_id == self._context.config.node_id:
            self._processes.require_attached(request.decode_worker_id)
        hears_runs = request.decode_worker_id in self._processes.hear_runs
        await self._context.orders.run(owner, open_push(self._context, owner, request, hears_runs=hears_runs))
        return messages.Done()

    def push(self, request: messages.PushLayers) -> messages.Done:
        """The answer is for a worker that asks. `close_push` has the result, and detects a lost message."""
        for layer in request.pushes:
            owner = Owner(layer.order_id, request.worker_id)
            running = self._context.orders.push_of(owner)
            if running is None:
                self._context.counters["pushes_unknown"] += 1
                continue
            try:
                self._guard.hold(owner)
            except OrderUnknown as problem:
                running.fail(problem)
                continue
            running.push(layer)
        return messages.Done()

    def keep(self, request: messages.KeepOrders) -> None:
        """Renew holds without an answer: a request for an order that is gone fails by itself."""
        for order_id in request.order_ids:
            with contextlib.suppress(OrderUnknown):
                self._guard.hold(Owner(order_id, request.worker_id))

    async def close_push(self, request: messages.ClosePush) -> messages.Pushed:
        owner = Owner(request.order_id, request.worker_id)
        running = self._context.orders.push_of(owner)
        if running is None:
            raise OrderUnknown(f"order {request.order_id} has no push here")
        self._guard.hold(owner)
        if request.published and (lost := running.lost(request.pushes)):
            self._context.counters["pushes_lost"] += lost
            return messages.Pushed(bytes=0, elapsed_ns=0, lost=lost)
        pushed = await running.close(request.pushes)
        if running.opened.target_node_id == self._context.config.node_id:
            await self._context.commit(owner, 0, len(self._guard.hold(owner).slots))
        self._context.counters["pushed_bytes"] += pushed.bytes
        return pushed

    async def release(self, request: messages.ReleaseBlocks) -> messages.Done:
        await release(self._context, Owner(request.order_id, request.worker_id))
        return messages.Done()

    async def status(self, _: messages.StoreStatusRequest) -> messages.StoreStatus:
        counts = self._guard.counts()
        return messages.StoreStatus(
            node_id=self._context.config.node_id,
            incarnation=self._context.incarnation,
            slots=counts.slots,
            slots_free=counts.free,
            slots_reserved=counts.reserved,
            slots_committed=counts.committed,
            slots_condemned=counts.condemned,
            slots_leased=counts.leased,
            leases=counts.leases,
            holds=counts.holds,
            pushes_open=self._context.orders.pushes_open(),
            counters=dict(self._context.counters),
            absent=dict(self._context.transports.absent),
        )


def _in_range(hold: Hold, first_block: int, blocks: int) -> None:
    if first_block + blocks > len(hold.slots):
        raise ValueError(f"blocks {first_block}..{first_block + blocks - 1}: the order has {len(hold.slots)}")
