"""The agent's answers to programs that use the store through `halfmoon.store.client`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from halfmoon.schemas import store as messages
from halfmoon.schemas.keys import split_keys
from halfmoon.store.agent.ssd_load import promote
from halfmoon.store.errors import WrongSize
from halfmoon.store.pool.slots import Owner, tenant_mark

if TYPE_CHECKING:
    from halfmoon.store.agent.agent import StoreAgent


def require_size(agent: StoreAgent, block_bytes: int) -> None:
    """Raises WrongSize when the caller's blocks are not those of this store."""
    have = agent.config.layout.block_bytes
    if block_bytes not in (0, have):
        raise WrongSize(f"{block_bytes} bytes given, a block has {have}")


async def probe(agent: StoreAgent, request: messages.ProbeBlocks) -> messages.Probed:
    keys, tenant = split_keys(request.block_keys), request.mark or tenant_mark(request.tenant)
    here = agent.guard.probe(keys, tenant)
    ssd = [i for i, key in enumerate(keys) if _on_ssd(agent, key, tenant)]
    return messages.Probed(dram=[i for i, yes in enumerate(here) if yes], ssd=ssd)


async def take(agent: StoreAgent, request: messages.TakeBlocks) -> messages.Taken:
    require_size(agent, request.block_bytes)
    owner = Owner(request.order_id, request.party)
    keys, tenant = split_keys(request.block_keys), tenant_mark(request.tenant)
    if agent.tier is not None:
        some = [key for key in keys if _on_ssd(agent, key, tenant)]
        await promote(agent, some, time.monotonic_ns() + agent.config.transfer_ns_max)
    present, hold, checksums = agent.guard.take(owner, keys, tenant)
    return messages.Taken(
        incarnation=agent.incarnation, present=present, slots=hold.slots, checksums=checksums
    )


async def remove(agent: StoreAgent, request: messages.RemoveBlocks) -> messages.Removed:
    keys, tenant = split_keys(request.block_keys), request.mark or tenant_mark(request.tenant)
    removed = agent.guard.remove(keys, tenant)
    if agent.tier is not None:
        held = {i for i, here in enumerate(agent.guard.probe(keys, tenant)) if here}
        idle = {key: i for i, key in enumerate(keys) if i not in held and _on_ssd(agent, key, tenant)}
        gone = agent.tier.remove(list(idle))
        removed = sorted({*removed, *(idle[key] for key in gone)})
    return messages.Removed(removed=removed)


async def pin(agent: StoreAgent, request: messages.PinBlocks) -> messages.Done:
    keys = split_keys(request.block_keys)
    tenant = tenant_mark(request.tenant)
    agent.guard.pin(request.party, keys, tenant, hard=request.hard, ttl_ns=request.ttl_ns)
    return messages.Done()


def _on_ssd(agent: StoreAgent, key: bytes, tenant: str) -> bool:
    """Whether it is there, and for this tenant."""
    entry = agent.tier.find(key) if agent.tier is not None else None
    return entry is not None and (not any(entry.tenant) or entry.tenant.hex() == tenant)
