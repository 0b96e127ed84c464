"""Blocks of the SSD come back: into the slots of an order of this node (the conductor told its worker to load
them), or into the pool for a reader from elsewhere. Loading is never started by a guess: whoever asks was
told that it pays.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfmoon.schemas.store import FetchBlocks, Fetched
from halfmoon.store.agent.fetch import GROUP_BYTES, copy_local, tell_loaded
from halfmoon.store.errors import BlockMissing, BytesCorrupted, StoreError
from halfmoon.store.pool.slots import Hold, Owner
from halfmoon.store.tiers.ssd import Lent, SsdTier
from halfmoon.store.tiers.ssd_file import Move
from halfmoon.store.transports.base import Call

if TYPE_CHECKING:
    from halfmoon.store.agent.agent import StoreAgent

_numbers = itertools.count(1)


def make_tier(agent: StoreAgent) -> SsdTier:
    """The agent's."""
    config = agent.config

    def lost(why: str) -> None:
        print(f"store agent {config.node_id}: the SSD tier is out of use: {why}", file=sys.stderr, flush=True)
        agent.announcer.tier_lost(why)

    return SsdTier(
        config,
        agent.guard,
        view=lambda: agent.view,
        announce=agent.announcer.add,
        counters=agent.counters,
        lost=lost,
    )


async def load_own(agent: StoreAgent, owner: Owner, request: FetchBlocks) -> Fetched:
    """A fetch whose source is this node: from its SSD, layer by layer. A miss is an answer.

    Raises OrderUnknown, TransferError.
    """
    started_ns = time.monotonic_ns()
    hold = agent.guard.hold(owner)
    writer = f"ssd-{next(_numbers)}"
    deadline_ns = started_ns + agent.config.transfer_ns_max
    agent.guard.open_writer(owner, writer, deadline_ns + agent.config.writer_grace_ns)
    moved = 0
    try:
        wanted = await copy_local(agent, owner, hold, request)
        if wanted:
            assert agent.tier is not None
            try:
                lent = agent.tier.lend([hold.keys[i] for i in wanted])
            except BlockMissing as problem:
                agent.counters["ssd_misses"] += 1
                held = wanted[problem.held] - request.first_block  # what lies between is in the pool by now
                elapsed_ns = time.monotonic_ns() - started_ns
                return Fetched(bytes=0, elapsed_ns=elapsed_ns, blocks=0, missing=True, held=held)
            try:
                await _read_layers(
                    agent, hold, request, wanted, lent, Call(owner.order_id, owner.party, deadline_ns)
                )
                await _commit(agent, owner, hold, wanted, lent, request.first_block, request.blocks)
            finally:
                agent.tier.give_back(lent)
            moved = len(wanted) * agent.config.layout.block_bytes
        else:
            await tell_loaded(agent, request, agent.config.layout.layers - 1)
    finally:
        agent.guard.close_writer(owner, writer)
    return Fetched(bytes=moved, elapsed_ns=time.monotonic_ns() - started_ns, blocks=request.blocks)


async def promote(agent: StoreAgent, keys: Sequence[bytes], deadline_ns: int) -> None:
    """Brings those of `keys` that are only on the SSD into the pool. What fails stays where it is, or is
    forgotten.
    """
    tier = agent.tier
    if tier is None:
        return
    missing = [key for key in keys if agent.guard.find(key) is None and tier.find(key) is not None]
    by_tenant: dict[bytes, list[bytes]] = {}
    for key in missing:
        entry = tier.find(key)
        assert entry is not None
        by_tenant.setdefault(entry.tenant, []).append(key)
    for tenant, some in by_tenant.items():
        owner = Owner(f"promote-{next(_numbers)}", agent.config.node_id)
        try:
            hold = agent.guard.open_put(
                owner, some, len(some), writer="ssd", tenant=tenant.hex() if any(tenant) else ""
            )
        except StoreError as problem:
            agent.counters[f"promotion_{problem.code}"] += 1
            continue
        try:
            indices = [i for i in range(len(some)) if i not in hold.present]
            lent = tier.lend([some[i] for i in indices])
            try:
                layers = agent.config.layout.layers
                moves = [
                    Move(at.record, hold.slots[i], 0, layers) for i, at in zip(indices, lent, strict=True)
                ]
                await tier.read(moves, Call(owner.order_id, owner.party, deadline_ns))
                await _commit(agent, owner, hold, indices, lent, 0, len(some))
            finally:
                tier.give_back(lent)
        except StoreError as problem:
            agent.counters[f"promotion_{problem.code}"] += 1
        finally:
            agent.guard.release(owner, writers=["ssd"])


async def _read_layers(
    agent: StoreAgent,
    hold: Hold,
    request: FetchBlocks,
    wanted: Sequence[int],
    lent: Sequence[Lent],
    call: Call,
) -> None:
    """Groups of layers of all blocks, one after another, so that the worker can compute over the first ones."""
    assert agent.tier is not None
    layout = agent.config.layout
    step = max(1, GROUP_BYTES // (len(wanted) * layout.layer_block_bytes))
    for first in range(0, layout.layers, step):
        layers = min(step, layout.layers - first)
        moves = [Move(at.record, hold.slots[i], first, layers) for i, at in zip(wanted, lent, strict=True)]
        await agent.tier.read(moves, call)
        await tell_loaded(agent, request, first + layers - 1)


async def _commit(
    agent: StoreAgent,
    owner: Owner,
    hold: Hold,
    indices: Sequence[int],
    lent: Sequence[Lent],
    first: int,
    blocks: int,
) -> None:
    """Shows the blocks if they are what was put; raises BytesCorrupted, with the others of them forgotten, if
    not.
    """

    def check(sums: dict[int, int]) -> None:
        assert agent.tier is not None
        bad = [
            hold.keys[i]
            for i, at in zip(indices, lent, strict=True)
            if i in sums and sums[i] != at.entry.checksum
        ]
        if bad:
            agent.counters["ssd_corrupted"] += len(bad)
            agent.tier.forget(bad)
            raise BytesCorrupted(f"{len(bad)} blocks on the SSD are not what was put")

    await agent.commit(owner, first, blocks, check=check)
    for i, at in zip(indices, lent, strict=True):
        agent.guard.credit(hold.keys[i], at.entry.hits + 1)
