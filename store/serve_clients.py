"""The agent's answers to programs that use the store through `halfmoon.store.client`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfmoon.schemas import store as say
from halfmoon.schemas.keys import split_keys
from halfmoon.store.errors import WrongSize
from halfmoon.store.slots import Owner

if TYPE_CHECKING:
    from halfmoon.store.agent import StoreAgent


def require_size(agent: StoreAgent, block_bytes: int) -> None:
    """Raises WrongSize when the caller's blocks are not those of this store."""
    have = agent.config.layout.block_bytes
    if block_bytes not in (0, have):
        raise WrongSize(f"{block_bytes} bytes given, a block has {have}")


async def probe(agent: StoreAgent, request: say.ProbeBlocks) -> say.Probed:
    here = agent.book.probe(split_keys(request.block_keys), request.tenant)
    return say.Probed(dram=[i for i, yes in enumerate(here) if yes])


async def take(agent: StoreAgent, request: say.TakeBlocks) -> say.Taken:
    require_size(agent, request.block_bytes)
    owner = Owner(request.order_id, request.party)
    present, hold, checksums = agent.book.take(owner, split_keys(request.block_keys), request.tenant)
    return say.Taken(incarnation=agent.incarnation, present=present, slots=hold.slots, checksums=checksums)


async def remove(agent: StoreAgent, request: say.RemoveBlocks) -> say.Removed:
    return say.Removed(removed=agent.book.remove(split_keys(request.block_keys), request.tenant))


async def pin(agent: StoreAgent, request: say.PinBlocks) -> say.Done:
    keys = split_keys(request.block_keys)
    agent.book.pin(request.party, keys, request.tenant, hard=request.hard, ttl_ns=request.ttl_ns)
    return say.Done()
