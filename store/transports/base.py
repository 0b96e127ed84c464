"""How bytes of blocks get from one node's pool to another's: one interface, several implementations.

`shm` (same host), `rdma` and `tcp` exist. A `Slice` is one contiguous run on both sides: a few work requests of RDMA.
The interface is cut so that these fit without a change:

- *An SSD tier* is a peer that is this node itself: `read` from a file into slots, `write` out of them; it
  needs no lease.
- *Replicas*: choosing a source is not done here. A transport moves between two pools and says how that went;
  who is asked next is for the agent.

Rules of every implementation (`tests/store/test_transport_contract.py`).

- `read` returns when all bytes are in the local slots; `write` returns when all are readable at the peer.
- When a call ends, well or not, cancelled or not, it touches no local slot any more, and no remote slot after
  `deadline_ns`.
- Every call ends by its deadline (plus a scheduling delay), with an error of
  `halfmoon.store.errors.TransferError`.
- `verify` compares with the checksums of the source, so that what is read is what was committed. Over a
  network it is always on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from halfmoon.schemas.events import Endpoint
from halfmoon.store.errors import TransferError, TransferTimeout
from halfmoon.store.pool.segment import Geometry

T = TypeVar("T")


class Slice(NamedTuple):
    """`layers` layers from `first_layer` on, of one block: one contiguous run of bytes in both pools."""

    local_slot: int
    remote_slot: int
    first_layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known of another agent, from its `hello`. A restarted agent is another peer (`incarnation`)."""

    node_id: str
    incarnation: str
    host: str
    segment: str
    geometry: Geometry
    endpoints: tuple[Endpoint, ...]

    def endpoint(self, transport: Literal["shm", "tcp", "rdma"]) -> Endpoint | None:
        return next((at for at in self.endpoints if at.transport == transport), None)


@dataclass(frozen=True, slots=True)
class Call:
    """Under which order a move is made, by which party, and until when (`time.monotonic_ns`)."""

    order_id: str
    party: str
    deadline_ns: int
    verify: bool = False

    def remaining_s(self) -> float:
        return max(0.0, (self.deadline_ns - time.monotonic_ns()) / 1e9)


class Transport(Protocol):
    """Moves slices between the own pool and a peer's."""

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        """From the peer's slots into own ones. `call.order_id` leases them there. Raises TransferError."""

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        """From own slots into the peer's, which `(call.order_id, call.party)` has reserved there. Raises
        TransferError.
        """

    def forget(self, node_id: str) -> None:
        """Lets go of connections and mappings of a peer that is gone or restarted."""

    async def close(self) -> None:
        """Ends what is under way (with TransferError) and lets go of everything. Idempotent."""


class SlotAccess(Protocol):
    """What a receiver asks its agent about a request that came over a network. Called from a transport's
    thread.
    """

    def begin_write(self, order_id: str, party: str, slots: Sequence[int]) -> str:
        """ "" when the slots are reserved for this party of the order; otherwise why not. Until `end_write`
        they stay this order's, released or not."""

    def end_write(self, order_id: str, party: str) -> None: ...

    def begin_read(self, order_id: str, slots: Sequence[int]) -> str:
        """ "" when the order leases the slots."""


class Cancellation:
    """Ends a copying thread early: the thread asks `check` between two copies."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._told = threading.Event()

    def cancel(self) -> None:
        self._told.set()

    def check(self) -> None:
        if self._told.is_set():
            raise TransferError("stopped")
        if time.monotonic_ns() >= self._call.deadline_ns:
            raise TransferTimeout("the deadline passed")


def check_items(local: Geometry, remote: Geometry, items: Sequence[Slice]) -> None:
    """Raises TransferError for a slice that is outside of a pool, or pools of different shapes."""
    if (local.layers, local.layer_block_bytes) != (remote.layers, remote.layer_block_bytes):
        raise TransferError(f"pools differ: {local} here, {remote} there")
    for item in items:
        inside = 0 <= item.local_slot < local.slots and 0 <= item.remote_slot < remote.slots
        if (
            not inside
            or item.first_layer < 0
            or item.layers < 1
            or item.first_layer + item.layers > local.layers
        ):
            raise TransferError(f"{item} is outside of a pool")


def moved_bytes(geometry: Geometry, items: Sequence[Slice]) -> int:
    return sum(item.layers for item in items) * geometry.layer_block_bytes


def joined(items: Sequence[Slice]) -> list[Slice]:
    """The same layers, those of a block that follow each other as one run."""
    runs: list[Slice] = []
    local = remote = first = end = -1
    for local_slot, remote_slot, first_layer, layers in sorted(items):
        if local_slot == local and remote_slot == remote and first_layer == end:
            end += layers
            continue
        if end > 0:
            runs.append(Slice(local, remote, first, end - first))
        local, remote, first, end = local_slot, remote_slot, first_layer, first_layer + layers
    if end > 0:
        runs.append(Slice(local, remote, first, end - first))
    return runs


async def in_thread(executor: Executor, work: Callable[[], T], cancellation: Cancellation) -> T:
    """Runs `work` in `executor`. When cancelled, tells it to stop and waits until it has, so that nothing is
    touched afterwards.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancellation.cancel()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError, TransferError):
                await asyncio.shield(future)
        if not future.cancelled():
            future.exception()  # looked at: the cancellation says more
        raise
