"""The same-host transport: maps the peer's segment and copies, once. No system call a copy, no message to the
peer.

The peer cannot check a write, so that its rules are kept here: no byte after the deadline, none into a slot that is
not the order's any more, nothing to a peer that is dead (its lock on the segment is gone). A copy of up to 256 KiB
(some 20 µs) is made at once on the event loop, anything longer in a thread; numpy lets go of the interpreter lock while
it copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from halfmoon.schemas.events import Endpoint
from halfmoon.store.errors import BytesCorrupted, HolderUnreachable, TransferError
from halfmoon.store.pool.checksums import filled, run_sums
from halfmoon.store.pool.segment import PoolView, SegmentError
from halfmoon.store.transports.base import (
    Call,
    Cancellation,
    Peer,
    Slice,
    TransportKind,
    check_items,
    in_thread,
    joined,
    moved_bytes,
)

INLINE_BYTES = 256 * 1024
#: One numpy call copies at most this much, so that a stop or a deadline is seen within about a millisecond.
PIECE_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class _Mapped:
    """A peer's segment; let go of when it is forgotten and no move uses it."""

    incarnation: str
    view: PoolView
    users: int = 0
    forgotten: bool = False

    def close_if_unused(self) -> None:
        if self.forgotten and not self.users:
            self.view.close()


class ShmTransport:
    """Implements Transport between segments that this process can map.

    `host`: an id of the machine (`segment.host_id`); segments of other hosts cannot be mapped.
    """

    kind = TransportKind("shm", rank=0, assumed_bytes_s=8e9)

    def __init__(self, view: PoolView, executor: Executor, *, host: str) -> None:
        self._view = view
        self._host = host
        self._executor = executor
        self._mapped: dict[str, _Mapped] = {}
        self._mapping = asyncio.Lock()
        self._running: set[Cancellation] = set()
        self._closed = False

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(transport="shm", address=self._view.name)]

    def usable_endpoints(self, peer: Peer) -> list[Endpoint]:
        if peer.host != self._host:
            return []
        return [at for at in peer.endpoints if at.transport == "shm"]

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, reading=True)

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, reading=False)

    def forget(self, node_id: str) -> None:
        mapped = self._mapped.pop(node_id, None)
        if mapped is not None:
            mapped.forgotten = True
            mapped.close_if_unused()

    async def close(self) -> None:
        self._closed = True
        for cancellation in self._running:
            cancellation.cancel()
        for node_id in list(self._mapped):
            self.forget(node_id)

    async def _move(self, peer: Peer, items: Sequence[Slice], call: Call, *, reading: bool) -> None:
        if self._closed:
            raise TransferError("the transport is closed")
        check_items(self._view.geometry, peer.geometry, items)
        cancellation = Cancellation(call)
        cancellation.check()
        mapped = self._mapped.get(peer.node_id)
        if mapped is None or mapped.incarnation != peer.incarnation:
            mapped = await self._map(peer, cancellation)
        remote = mapped.view
        mapped.users += 1
        self._running.add(cancellation)
        try:
            if not call.verify and moved_bytes(items, peer.geometry.layer_block_bytes) <= INLINE_BYTES:
                self._copy(remote, items, call, cancellation, reading)
            else:
                await in_thread(
                    self._executor,
                    lambda: self._copy(remote, items, call, cancellation, reading),
                    cancellation,
                )
        finally:
            self._running.discard(cancellation)
            mapped.users -= 1
            mapped.close_if_unused()

    async def _map(self, peer: Peer, cancellation: Cancellation) -> _Mapped:
        """Maps a peer once, however many moves ask for it at the same time."""
        async with self._mapping:
            known = self._mapped.get(peer.node_id)
            if known is not None and known.incarnation == peer.incarnation:
                return known
            view = await in_thread(self._executor, lambda: _attach(peer), cancellation)
            self.forget(peer.node_id)
            self._mapped[peer.node_id] = mapped = _Mapped(peer.incarnation, view)
            self._executor.submit(view.touch)
            return mapped

    def _copy(
        self, remote: PoolView, items: Sequence[Slice], call: Call, cancellation: Cancellation, reading: bool
    ) -> None:
        mine, theirs = self._view.blocks, remote.blocks
        step = max(1, PIECE_BYTES // max(1, remote.geometry.layer_block_bytes))
        if not remote.alive():
            raise HolderUnreachable(f"the agent of segment {remote.name} is dead")
        for item in joined(items):
            end = item.first_layer + item.layers
            for first in range(item.first_layer, end, step):
                cancellation.check()
                run = slice(first, min(first + step, end))
                here, there = mine[item.local_slot, run], theirs[item.remote_slot, run]
                if item.fill:
                    here, there = filled(here, item.fill), filled(there, item.fill)
                if reading:
                    np.copyto(here, there)
                else:
                    with remote.writing(item.remote_slot, call.order_id):
                        np.copyto(there, here)
            if call.verify and reading:
                self._verify(remote, item)
        if not remote.alive():
            raise HolderUnreachable(f"the agent of segment {remote.name} died")

    def _verify(self, remote: PoolView, item: Slice) -> None:
        found = run_sums(self._view, item.local_slot, item.first_layer, item.layers)
        for layer, here in enumerate(found, start=item.first_layer):
            if here != int(remote.sums[item.remote_slot, layer]):
                raise BytesCorrupted(
                    f"layer {layer} of slot {item.remote_slot} in {remote.name} is not what was committed"
                )


def _attach(peer: Peer) -> PoolView:
    try:
        view = PoolView.attach(peer.segment, peer.geometry)
    except SegmentError as problem:
        raise HolderUnreachable(str(problem)) from None
    if not view.alive():
        view.close()
        raise HolderUnreachable(f"the agent of segment {peer.segment} is dead")
    return view
