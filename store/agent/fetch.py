"""Reads an order's blocks from another node into its reserved slots, layer-major, and announces layers as they become
readable.

Layer-major, because the worker can compute over layer 0 while layer 1 is under way; in groups of layers of a few MiB,
two under way at once, so that the link is not idle between them. A layer is announced only within half of the time for
which its block is leased at the source. A block counts as fetched only when its checksum is that of the source: a
worker that computes over layers before that must throw away the result when the fetch fails (`_Retracted`).

Source: Mooncake (FAST'25), section 5.2 (layer-wise loading); Mooncake's transfer engine.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from halfmoon.schemas import subjects
from halfmoon.schemas.keys import join_keys
from halfmoon.schemas.kv import KvLoaded
from halfmoon.schemas.store import EndLease, FetchBlocks, Fetched, Hello, LeaseBlocks, Leased
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.peers import Peers
from halfmoon.store.errors import (
    BytesCorrupted,
    LeaseLost,
    OrderUnknown,
    StoreError,
    TransferRefused,
    TransferTimeout,
)
from halfmoon.store.pool.slots import Hold, Owner
from halfmoon.store.transports.base import BlockMover, Call, Cancellation, Peer, Slice, in_thread

GROUP_BYTES = 4 * 1024 * 1024
UNDER_WAY = 2
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Source:
    """Blocks of an order leased at a peer: `slots[i]` and `checksums[i]` are of its block `first_block + i`."""

    peer: Peer
    party: str
    first_block: int
    slots: list[int]
    checksums: list[int]


class _Retracted(BytesCorrupted):
    """Announced layers differ from the committed ones. A replica is of no help: the worker has read them already."""


class _Slow(Exception):
    """The holder has not answered in time (it may be loading from its SSD), and there is another one."""


async def lease_at(
    peers: Peers, node_id: str, wanted: FetchBlocks, hold: Hold, *, party: str
) -> Source | int:
    """Leases the blocks at a holder. An int is a miss: the number of blocks, from the first, that it has. Raises
    StoreError.
    """
    peer = await peers.get(node_id)
    keys = join_keys(hold.keys[: wanted.first_block + wanted.blocks])
    request = LeaseBlocks(
        order_id=wanted.order_id, party=party, block_keys=keys, first_block=wanted.first_block
    )
    leased = await peers.ask(node_id, "lease", request, Leased)
    if leased.missing:
        return leased.held
    if not len(leased.slots) == len(leased.checksums) == wanted.blocks:
        raise TransferRefused(
            f"{node_id} leases {len(leased.slots)} blocks where {wanted.blocks} were asked for"
        )
    peer = await peers.get(node_id, incarnation=leased.incarnation)
    return Source(peer, party, wanted.first_block, leased.slots, leased.checksums)


async def read_layers(
    transport: BlockMover,
    source: Source,
    hold: Hold,
    indices: Sequence[int],
    call: Call,
    loaded: Callable[[int], Awaitable[None]],
) -> int:
    """Moves blocks `indices`; calls `loaded(layer)` in order, before the call's deadline. Returns the bytes moved.
    Raises TransferError.
    """
    geometry = source.peer.geometry
    per_layer = max(1, len(indices) * geometry.layer_block_bytes)
    step = max(1, GROUP_BYTES // per_layer)
    groups = [(first, min(step, geometry.layers - first)) for first in range(0, geometry.layers, step)]
    reads: list[asyncio.Task[None]] = []
    try:
        for number, (first, layers) in enumerate(groups):
            for ahead in groups[len(reads) : number + UNDER_WAY]:
                items = [Slice(hold.slots[i], source.slots[i - source.first_block], *ahead) for i in indices]
                reads.append(asyncio.create_task(transport.read(source.peer, items, call)))
            await reads[number]
            if time.monotonic_ns() >= call.deadline_ns:
                # It stood still in the middle of the last copy: the lease may have ended before that.
                raise TransferTimeout("the deadline passed")
            await loaded(first + layers - 1)
    finally:
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
    return len(indices) * geometry.block_bytes


async def fetch_blocks(context: AgentContext, owner: Owner, request: FetchBlocks) -> Fetched:
    """Brings the blocks from the source, or else from the first replica that can give them. Whatever happens,
    leases elsewhere end and no slot is written afterwards.

    Raises OrderUnknown, or the last TransferError; a miss is an answer. Then it is for the caller to compute.
    """
    held = 0
    problem: StoreError | None = None
    holders = list(dict.fromkeys([request.source_node_id, *request.replica_node_ids]))
    for place, node_id in enumerate(holders):
        if place:
            context.counters["fetches_from_replicas"] += 1
        started_ns = time.monotonic_ns()
        try:
            found = await _fetch_from(context, owner, node_id, request, more=place + 1 < len(holders))
        except OrderUnknown:
            raise
        except _Slow:
            context.spawn(_look_after(context, node_id))
            continue
        except _Retracted as failure:
            context.peer_failed(node_id, failure)
            raise
        except StoreError as failure:
            context.peer_failed(node_id, failure)
            problem = failure
            continue
        if isinstance(found, Fetched):
            return msgspec.structs.replace(found, elapsed_ns=time.monotonic_ns() - started_ns)
        context.counters["fetch_misses"] += 1
        held = max(held, found)
    if problem is not None:
        raise problem
    return Fetched(bytes=0, elapsed_ns=time.monotonic_ns() - started_ns, blocks=0, missing=True, held=held)


async def _fetch_from(
    context: AgentContext, owner: Owner, node_id: str, request: FetchBlocks, *, more: bool
) -> Fetched | int:
    """Leases, reads, verifies, commits. An int is a miss: the number of blocks that the holder has.

    `more`: there is another holder to turn to, so that this one is not waited for as long.
    """
    hold = context.guard.hold(owner)
    number = next(_numbers)
    writer = f"fetch-{number}"
    end = EndLease(
        order_id=request.order_id, party=f"{context.config.node_id}-{context.incarnation}-{number}"
    )
    context.guard.open_writer(owner, writer, time.monotonic_ns() + context.config.lease_ttl_ns)
    asked = False
    moved = 0
    try:
        wanted = await copy_local(context, owner, hold, request)
        if wanted:
            asked = True
            asked_ns = time.monotonic_ns()
            try:
                async with asyncio.timeout(context.config.replica_after_s if more else None):
                    source = await lease_at(context.peers, node_id, request, hold, party=end.party)
            except TimeoutError:
                raise _Slow from None
            if isinstance(source, int):
                asked = False
                return source
            moved = await _read(context, hold, request, source, wanted, asked_ns)
            await context.commit(
                owner,
                request.first_block,
                request.blocks,
                check=lambda sums: check_sums(source, sums, wanted, request),
            )
        else:
            await tell_loaded(context, request, context.config.layout.layers - 1)
    finally:
        context.guard.close_writer(owner, writer)
        if asked:  # answered or not: a lease whose answer is still on the way must end too
            context.spawn(context.peers.tell(node_id, "end_lease", end))
    context.counters["fetched_bytes"] += moved
    return Fetched(bytes=moved, elapsed_ns=0, blocks=request.blocks, source_node_id=node_id)


async def _look_after(context: AgentContext, node_id: str) -> None:
    """Asks a slow holder whether it lives, and suspects it when it does not answer."""
    try:
        await context.peers.ask(node_id, "hello", context.hello(), Hello)
    except StoreError as problem:
        context.peer_failed(node_id, problem)


async def _read(
    context: AgentContext,
    hold: Hold,
    request: FetchBlocks,
    source: Source,
    wanted: Sequence[int],
    asked_ns: int,
) -> int:
    """`asked_ns`: when the lease was asked for, which is before it began."""
    deadline_ns = asked_ns + context.config.transfer_ns_max
    call = Call(request.order_id, source.party, deadline_ns, verify=context.config.verify_shm)

    async def loaded(layer: int) -> None:
        await tell_loaded(context, request, layer)

    return await read_layers(context.transports.engine_for(source.peer), source, hold, wanted, call, loaded)


async def copy_local(context: AgentContext, owner: Owner, hold: Hold, request: FetchBlocks) -> list[int]:
    """The blocks that must be moved. Those that another order committed here meanwhile are copied within the pool.
    Raises LeaseLost.
    """
    missing = context.guard.to_commit(owner, request.first_block, request.blocks)
    here = [i for i in missing if context.guard.find(hold.keys[i]) is not None]
    if here:
        lender = Owner(owner.order_id, f"copy-{next(_numbers)}")
        lent, _ = context.guard.lease(lender, [hold.keys[i] for i in here], 0)
        blocks = context.view.blocks
        try:
            for i, slot in zip(here, lent.slots, strict=True):
                copy = functools.partial(np.copyto, blocks[hold.slots[i]], blocks[slot])
                call = Call(owner.order_id, owner.party, time.monotonic_ns() + context.config.transfer_ns_max)
                await in_thread(context.executor, copy, Cancellation(call))
                # The thread may have waited for its turn, or stood still, for longer than the lease.
                try:
                    context.guard.hold(lender)
                except OrderUnknown:
                    raise LeaseLost(f"slot {slot} was given away while it was copied") from None
        finally:
            context.guard.release(lender)
    return [i for i in missing if i not in here]


async def tell_loaded(context: AgentContext, request: FetchBlocks, layer: int) -> None:
    loaded = KvLoaded(
        order_id=request.order_id, layer=layer, first_block=request.first_block, blocks=request.blocks
    )
    subject = subjects.kv(request.worker_id, "KvLoaded", context.config.node_id)
    await context.bus.publish(subject, loaded)


def check_sums(source: Source, sums: dict[int, int], wanted: Sequence[int], request: FetchBlocks) -> None:
    """Raises _Retracted when a moved block (index to checksum) differs from the source's committed one."""
    for i in wanted:
        if i in sums and source.checksums[i - source.first_block] != sums[i]:
            raise _Retracted(
                f"block {i} of order {request.order_id} from {source.peer.node_id} is not what was committed"
            )
