"""Copies of blocks on other nodes: made by order of the conductor (a hot prefix), by a program, or because
their node leaves.

`replicate` pulls: the new holder asks the source, as for any fetch, so that leases, checksums and the paths are the
same. With `move` the source forgets its copy afterwards, if it is not leased. A copy that was made ahead of
need (`spare`) goes before anything else when room is needed, until it is read.

`drain` hands the blocks that no other node holds to the others, those that would have been evicted last first, until
there is no more room. The node then leaves; a reader that still counts on it turns to the others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from halfmoon.schemas import store as messages
from halfmoon.schemas.decisions import ReplicateBlocks
from halfmoon.schemas.keys import join_keys, split_keys
from halfmoon.schemas.store import Drained, DrainStore, Replicate, Replicated
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.fetch import fetch_blocks
from halfmoon.store.errors import StoreError
from halfmoon.store.locate import find_holders
from halfmoon.store.pool.slots import Owner, tenant_mark

#: Blocks that are copied under one order, and how long a whole such request may take.
BLOCKS_AT_ONCE = 32
REPLICATE_S = 60.0
LEAVE_S = 0.2
_numbers = itertools.count(1)


class Replicator:
    """Makes copies here, and hands copies over."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._guard = context.guard
        #: Copies that a conductor ordered are made one after the other.
        self._one_at_a_time = asyncio.Lock()

    async def replicate(self, request: Replicate) -> Replicated:
        """Brings missing blocks here. A block that the source lacks is skipped; one that does not fit ends it.

        Raises TransferError.
        """
        keys = [key for key in split_keys(request.block_keys) if self._guard.find(key) is None]
        copied = 0
        full = False
        while keys and not full:
            some, keys = keys[:BLOCKS_AT_ONCE], keys[BLOCKS_AT_ONCE:]
            while some and not full:
                done, full = await self._copy(some, request)
                copied += done
                some = some[done + 1 :]  # the one that stopped it is not at the source
        self._context.counters["replicated_blocks"] += copied
        if request.move:
            here = [key for key in split_keys(request.block_keys) if self._guard.find(key) is not None]
            forget = messages.RemoveBlocks(block_keys=join_keys(here), mark=request.mark)
            await self._context.peers.ask(request.source_node_id, "remove", forget, messages.Removed)
        return Replicated(blocks=copied, full=full)

    async def _copy(self, keys: Sequence[bytes], request: Replicate) -> tuple[int, bool]:
        """Copies `keys`. Returns how many of them, from the first, are here now, and whether the pool is full."""
        me = self._context.config.node_id
        owner = Owner(f"replica-{me}-{self._context.incarnation}-{next(_numbers)}", me)
        try:
            self._guard.open_put(owner, keys, len(keys), writer=me, tenant=request.mark)
        except StoreError:
            return 0, True
        try:
            if request.spare:
                self._guard.mark_spare(owner)
            wanted = messages.FetchBlocks(
                order_id=owner.order_id,
                worker_id=me,
                source_node_id=request.source_node_id,
                first_block=0,
                blocks=len(keys),
            )
            fetched = await self._context.orders.run(owner, fetch_blocks(self._context, owner, wanted))
            if fetched.missing and fetched.held:
                wanted = messages.FetchBlocks(
                    order_id=owner.order_id,
                    worker_id=me,
                    source_node_id=request.source_node_id,
                    first_block=0,
                    blocks=fetched.held,
                )
                fetched = await self._context.orders.run(owner, fetch_blocks(self._context, owner, wanted))
            return fetched.blocks, False
        finally:
            self._guard.release(owner, writers=[me])

    async def drain(self, request: DrainStore) -> Drained:
        """Hands over blocks that no other node holds, until nothing more fits. The agent leaves after the answer."""
        others = [node_id for node_id in request.target_node_ids if node_id != self._context.config.node_id]
        by_mark: dict[str, list[bytes]] = {}
        for key, mark in self._guard.hottest():
            by_mark.setdefault(mark, []).append(key)
        total = sum(map(len, by_mark.values()))
        room = {node_id: free for node_id in others if (free := await self._free(node_id)) > 0}
        elsewhere = moved = 0
        for mark, keys in by_mark.items():
            held, _ = await find_holders(self._context.bus, others, join_keys(keys), mark=mark)
            elsewhere += len(held)
            lonely = [key for i, key in enumerate(keys) if i not in held]
            moved += await self._hand_over(lonely, mark, room)
        asyncio.get_running_loop().call_later(LEAVE_S, self._context.drained.set)  # after this is answered
        return Drained(moved=moved, elsewhere=elsewhere, left=total - moved - elsewhere)

    async def _hand_over(self, keys: Sequence[bytes], mark: str, room: dict[str, int]) -> int:
        """Each batch to the node with the most room. How many blocks were taken."""
        todo = list(keys)
        taken = 0
        while todo and room:
            target = max(sorted(room), key=lambda node_id: room[node_id])
            some, todo = todo[: min(BLOCKS_AT_ONCE, room[target])], todo[min(BLOCKS_AT_ONCE, room[target]) :]
            order = Replicate(
                block_keys=join_keys(some), source_node_id=self._context.config.node_id, mark=mark
            )
            try:
                answer = await self._context.peers.ask(
                    target, "replicate", order, Replicated, timeout_s=REPLICATE_S
                )
            except StoreError:
                self._context.counters["drain_failures"] += 1
                del room[target]
                todo = some + todo
                continue
            taken += answer.blocks
            room[target] -= len(some)
            if answer.full or room[target] <= 0:
                del room[target]
                todo = some[answer.blocks :] + todo if answer.full else todo
        return taken

    async def _free(self, node_id: str) -> int:
        """Slots that the node can give to blocks from here: free ones, and half of the evictable ones."""
        try:
            status = await self._context.peers.ask(
                node_id, "status", messages.StoreStatusRequest(), messages.StoreStatus
            )
        except StoreError:
            return 0
        return status.slots_free + (status.slots_committed - status.slots_leased) // 2

    async def obey(self, order: ReplicateBlocks) -> None:
        """A conductor's order; it has no answer: the log hears of every block."""
        wanted = Replicate(
            block_keys=order.block_keys,
            source_node_id=order.source_node_id,
            mark=tenant_mark(order.tenant),
            spare=True,
        )
        async with self._one_at_a_time:
            try:
                async with asyncio.timeout(REPLICATE_S):
                    await self.replicate(wanted)
            except (StoreError, TimeoutError):
                self._context.counters["replications_failed"] += 1
