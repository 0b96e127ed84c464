"""Loads blocks from a tier: into the slots of an order of this node (by the conductor's order to its worker), or into
the pool for a reader from elsewhere. Loading is never started by a guess: the conductor has found that it pays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.schemas.store import FetchBlocks, Fetched
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.fetch import GROUP_BYTES, copy_local, tell_loaded
from halfmoon.store.errors import BlockMissing, BytesCorrupted, StoreError
from halfmoon.store.pool.slots import Hold, Owner
from halfmoon.store.tiers.base import Lent, Move, Tier
from halfmoon.store.transports.base import Call

_numbers = itertools.count(1)


class LentBlocks(NamedTuple):
    """Blocks of an order that a tier lends: `lent[i]` is for block `indices[i]` of `hold`."""

    tier: Tier
    hold: Hold
    indices: Sequence[int]
    lent: Sequence[Lent]

    async def read(self, layers: range, call: Call) -> None:
        """Into their slots. Raises TransferError."""
        moves = [
            Move(at.record, self.hold.slots[i], layers.start, len(layers))
            for i, at in zip(self.indices, self.lent, strict=True)
        ]
        await self.tier.read(moves, call)


async def load_own(context: AgentContext, tier: Tier, owner: Owner, request: FetchBlocks) -> Fetched:
    """A fetch whose source is this node: from its SSD, layer by layer. A miss is an answer.

    Raises OrderUnknown, TransferError.
    """
    started_ns = time.monotonic_ns()
    hold = context.guard.hold(owner)
    writer = f"ssd-{next(_numbers)}"
    deadline_ns = started_ns + context.config.transfer_ns_max
    context.guard.open_writer(owner, writer, deadline_ns + context.config.writer_grace_ns)
    moved = 0
    try:
        wanted = await copy_local(context, owner, hold, request)
        if wanted:
            try:
                lent = tier.lend([hold.keys[i] for i in wanted])
            except BlockMissing as problem:
                context.counters["ssd_misses"] += 1
                held = wanted[problem.held] - request.first_block  # what lies between is in the pool by now
                elapsed_ns = time.monotonic_ns() - started_ns
                return Fetched(bytes=0, elapsed_ns=elapsed_ns, blocks=0, missing=True, held=held)
            try:
                blocks = LentBlocks(tier, hold, wanted, lent)
                await _read_layers(context, request, blocks, Call(owner.order_id, owner.party, deadline_ns))
                await _commit(context, owner, blocks, request.first_block, request.blocks)
            finally:
                tier.give_back(lent)
            moved = len(wanted) * context.config.layout.block_bytes
        else:
            await tell_loaded(context, request, context.config.layout.layers - 1)
    finally:
        context.guard.close_writer(owner, writer)
    return Fetched(bytes=moved, elapsed_ns=time.monotonic_ns() - started_ns, blocks=request.blocks)


async def promote(context: AgentContext, tier: Tier, keys: Sequence[bytes], deadline_ns: int) -> None:
    """Brings those of `keys` that are only on the SSD into the pool. One that fails stays there, or is forgotten."""
    missing = [key for key in keys if context.guard.find(key) is None and tier.find(key) is not None]
    by_tenant: dict[bytes, list[bytes]] = {}
    for key in missing:
        entry = tier.find(key)
        assert entry is not None
        by_tenant.setdefault(entry.tenant, []).append(key)
    for tenant, some in by_tenant.items():
        owner = Owner(f"promote-{next(_numbers)}", context.config.node_id)
        try:
            hold = context.guard.open_put(
                owner, some, len(some), writer="ssd", tenant=tenant.hex() if any(tenant) else ""
            )
        except StoreError as problem:
            context.counters[f"promotion_{problem.code}"] += 1
            continue
        try:
            indices = [i for i in range(len(some)) if i not in hold.present]
            lent = tier.lend([some[i] for i in indices])
            try:
                blocks = LentBlocks(tier, hold, indices, lent)
                layers = range(context.config.layout.layers)
                await blocks.read(layers, Call(owner.order_id, owner.party, deadline_ns))
                await _commit(context, owner, blocks, 0, len(some))
            finally:
                tier.give_back(lent)
        except StoreError as problem:
            context.counters[f"promotion_{problem.code}"] += 1
        finally:
            context.guard.release(owner, writers=["ssd"])


async def _read_layers(context: AgentContext, request: FetchBlocks, blocks: LentBlocks, call: Call) -> None:
    """Groups of layers of all blocks, one after another, so that the worker can compute over the first ones."""
    layout = context.config.layout
    step = max(1, GROUP_BYTES // (len(blocks.indices) * layout.layer_block_bytes))
    for first in range(0, layout.layers, step):
        layers = range(first, min(first + step, layout.layers))
        await blocks.read(layers, call)
        await tell_loaded(context, request, layers[-1])


async def _commit(context: AgentContext, owner: Owner, loaded: LentBlocks, first: int, blocks: int) -> None:
    """Commits `blocks` blocks of the order from its `first` on if they have their checksums; raises BytesCorrupted,
    with the wrong ones forgotten, if not.
    """
    tier, hold, indices, lent = loaded

    def check(sums: dict[int, int]) -> None:
        bad = [
            hold.keys[i]
            for i, at in zip(indices, lent, strict=True)
            if i in sums and sums[i] != at.entry.checksum
        ]
        if bad:
            context.counters["ssd_corrupted"] += len(bad)
            tier.forget(bad)
            raise BytesCorrupted(f"{len(bad)} blocks on the SSD are not what was put")

    await context.commit(owner, first, blocks, check=check)
    for i, at in zip(indices, lent, strict=True):
        context.guard.credit(hold.keys[i], at.entry.hits + 1)
