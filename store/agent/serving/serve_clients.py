"""The agent's answers to programs that use the store through `halfmoon.store.client`."""

from __future__ import annotations

import time

from halfmoon.schemas import store as messages
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.policy import Layout
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.tier_load import promote
from halfmoon.store.errors import WrongSize
from halfmoon.store.pool.slots import Owner, tenant_mark


def require_size(layout: Layout, block_bytes: int) -> None:
    """Raises WrongSize when the caller's blocks are not those of this store. 0: the caller has asked for the size."""
    if block_bytes not in (0, layout.block_bytes):
        raise WrongSize(f"{block_bytes} bytes given, a block has {layout.block_bytes}")


class ClientService:
    """One method a verb. Raises StoreErrors, which `serve` answers as ProcessErrors of their code."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._guard = context.guard

    async def probe(self, request: messages.ProbeBlocks) -> messages.Probed:
        keys, tenant = split_keys(request.block_keys), request.mark or tenant_mark(request.tenant)
        here = self._guard.probe(keys, tenant)
        ssd = [i for i, key in enumerate(keys) if self._in_tier(key, tenant)]
        return messages.Probed(dram=[i for i, yes in enumerate(here) if yes], ssd=ssd)

    async def take(self, request: messages.TakeBlocks) -> messages.Taken:
        require_size(self._context.config.layout, request.block_bytes)
        owner = Owner(request.order_id, request.party)
        keys, tenant = split_keys(request.block_keys), tenant_mark(request.tenant)
        if self._context.tier is not None:
            some = [key for key in keys if self._in_tier(key, tenant)]
            deadline_ns = time.monotonic_ns() + self._context.config.transfer_ns_max
            await promote(self._context, self._context.tier, some, deadline_ns)
        present, hold, checksums = self._guard.take(owner, keys, tenant)
        return messages.Taken(
            incarnation=self._context.incarnation,
            present=present,
            slots=hold.slots,
            epochs=hold.epochs,
            checksums=checksums,
        )

    async def remove(self, request: messages.RemoveBlocks) -> messages.Removed:
        keys, tenant = split_keys(request.block_keys), request.mark or tenant_mark(request.tenant)
        removed = self._guard.remove(keys, tenant)
        if self._context.tier is not None:
            held = {i for i, here in enumerate(self._guard.probe(keys, tenant)) if here}
            idle = {key: i for i, key in enumerate(keys) if i not in held and self._in_tier(key, tenant)}
            gone = self._context.tier.remove(list(idle))
            removed = sorted({*removed, *(idle[key] for key in gone)})
        return messages.Removed(removed=removed)

    async def pin(self, request: messages.PinBlocks) -> messages.Done:
        keys = split_keys(request.block_keys)
        tenant = tenant_mark(request.tenant)
        self._guard.pin(request.party, keys, tenant, hard=request.hard, ttl_ns=request.ttl_ns)
        return messages.Done()

    def _in_tier(self, key: bytes, tenant: str) -> bool:
        """True: a slower tier has the block, for this tenant or for all."""
        entry = self._context.tier.find(key) if self._context.tier is not None else None
        return entry is not None and (not any(entry.tenant) or entry.tenant.hex() == tenant)
