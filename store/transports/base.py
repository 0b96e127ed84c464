"""The interface of a transport: it moves blocks between the own node's pool and a peer's.

A transport describes itself, so that nothing else knows it by name: its `kind`, the `endpoints` at which peers
reach it, and which endpoints of a peer it can use. The agent opens transports from one list
(`store/agent/open_transports.py`), and the engine chooses among them. A `Slice` is one contiguous run of bytes on
both sides, which makes a few work requests of RDMA.

A transport does not choose the holder: it moves between two pools and reports the result. The agent chooses the next
holder.

Rules of every implementation (`tests/store/test_transport_contract.py`).

- `read` returns when all bytes are in the local slots; `write` returns when all are readable at the peer.
- When a call ends, well or not, cancelled or not, it touches no local slot any more, and no remote slot after
  `deadline_ns`.
- Every call ends by its deadline (plus a scheduling delay), with an error of
  `halfmoon.store.errors.TransferError`.
- `verify` compares with the checksums of the source, so that the bytes read are the committed ones. Over a network it
  is always on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from halfmoon.schemas.events import Endpoint, TransportName
from halfmoon.store.errors import TransferError, TransferTimeout
from halfmoon.store.pool.segment import Geometry, PoolView

T = TypeVar("T")
#: `Endpoint.distance` within a NUMA node, as Linux counts.
NEAR = 10


class Slice(NamedTuple):
    """`layers` layers from `first_layer` on, of one block: one contiguous run of bytes in both pools.

    `fill`: for a block that is filled in part, the bytes that are moved of each layer's keys, and as many of its
    values, which are the two halves of a layer; 0: all. For writes into slots without a key only: others read a block
    with a key, so it is whole.
    """

    local_slot: int
    remote_slot: int
    first_layer: int
    layers: int
    fill: int = 0


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Layers `first_layer .. first_layer + layers - 1` of a slot, as a message to a peer names them; `fill` as of a
    Slice.
    """

    slot: int
    first_layer: int
    layers: int
    fill: int = 0

    def inside(self, geometry: Geometry) -> bool:
        """Within the pool, and within its layers."""
        return is_inside(geometry, self.slot, self.first_layer, self.layers, self.fill)


def is_inside(geometry: Geometry, slot: int, first_layer: int, layers: int, fill: int) -> bool:
    """Whether a run of layers of a slot is within a pool, and within its layers."""
    return (
        0 <= slot < geometry.slots
        and first_layer >= 0
        and 1 <= layers <= geometry.layers - first_layer
        and 0 <= 2 * fill <= geometry.layer_block_bytes
    )


@dataclass(frozen=True, slots=True)
class Peer:
    """Another agent, as its `hello` describes it. A restarted agent is another peer (`incarnation`)."""

    node_id: str
    incarnation: str
    host: str
    segment: str
    geometry: Geometry
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Under which order a move is made, by which party, and until when (`time.monotonic_ns`)."""

    order_id: str
    party: str
    deadline_ns: int
    verify: bool = False

    def remaining_s(self) -> float:
        return max(0.0, (self.deadline_ns - time.monotonic_ns()) / 1e9)


@dataclass(frozen=True, slots=True)
class TransportKind:
    """A kind of transport. `name` is its name in endpoints and metrics."""

    name: TransportName
    #: The transport with the smaller rank is used first.
    rank: int
    #: Bandwidth that is assumed until it was measured, bytes/s.
    assumed_bytes_s: float


class TransportAbsent(Exception):
    """The transport is not available on this node; one line for people."""


class BlockMover(Protocol):
    """Moves slices between the own pool and a peer's, over one transport or over several."""

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        """From the peer's slots into own ones. `call.order_id` leases them there. Raises TransferError."""

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        """From own slots into the peer's, which `(call.order_id, call.party)` has reserved there. Raises
        TransferError.
        """

    def forget(self, node_id: str) -> None:
        """Lets go of connections and mappings of a peer that is gone or restarted."""

    async def close(self) -> None:
        """Ends calls that are under way (with TransferError) and lets go of everything. Idempotent."""


class Transport(BlockMover, Protocol):
    """One way to move blocks. It serves the peers' calls too, where those need an answer."""

    @property
    def kind(self) -> TransportKind: ...

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Where peers reach this node over this transport."""

    def usable_endpoints(self, peer: Peer) -> list[Endpoint]:
        """The peer's endpoints that a call from here can use. Empty: this transport does not lead there."""


class SlotAccess(Protocol):
    """The rights of a request that came over a network: a receiver asks before it touches a slot, from a thread of
    its own.
    """

    def begin_write(
        self, order_id: str, party: str, slots: Sequence[int], *, parts: Sequence[int] = ()
    ) -> str:
        """ "" when the slots are reserved for this party of the order, and none of `parts`, which are written in part,
        has a key; otherwise why not. Until `end_write` they stay this order's, released or not."""

    def end_write(self, order_id: str, party: str) -> None: ...

    def begin_read(self, order_id: str, slots: Sequence[int]) -> str:
        """ "" when the order leases the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """The pool of an agent as a transport serves it: its memory, its guard, and the counters of calls."""

    view: PoolView
    access: SlotAccess
    #: Of the agent: peers write to no other.
    incarnation: str
    counters: Counter[str]


class Cancellation:
    """Ends a copying thread early: the thread asks `check` between two copies."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def check(self) -> None:
        if self._cancelled:
            raise TransferError("stopped")
        if time.monotonic_ns() >= self._call.deadline_ns:
            raise TransferTimeout("the deadline passed")


def check_items(local: Geometry, remote: Geometry, items: Sequence[Slice]) -> None:
    """Raises TransferError for a slice that is outside of a pool, or pools of different shapes."""
    if (local.layers, local.layer_block_bytes) != (remote.layers, remote.layer_block_bytes):
        raise TransferError(f"pools differ: {local} here, {remote} there")
    for item in items:
        local_slot, remote_slot, first_layer, layers, fill = item
        here = is_inside(local, local_slot, first_layer, layers, fill)
        if not here or not 0 <= remote_slot < remote.slots:
            raise TransferError(f"{item} is outside of a pool")


def slots_of(runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """The slots of all, and of those that are filled in part."""
    return [run.slot for run in runs], [run.slot for run in runs if run.fill]


def moved_bytes(items: Sequence[Slice | Run], layer_block_bytes: int) -> int:
    return sum(item.layers * layer_bytes(item, layer_block_bytes) for item in items)


def layer_bytes(item: Slice | Run, layer_block_bytes: int) -> int:
    """Bytes that are moved of each of its layers."""
    return 2 * item.fill or layer_block_bytes


def joined(items: Sequence[Slice]) -> list[Slice]:
    """The same layers, those of a block that follow each other as one run."""
    # Numbers, and no tuple made anew for each layer: a transfer of 64 blocks has some two thousand.
    runs: list[Slice] = []
    local = remote = first = end = fill = -1
    for local_slot, remote_slot, first_layer, layers, filled in sorted(items):
        if local_slot == local and remote_slot == remote and first_layer == end and filled == fill:
            end += layers
            continue
        if end > 0:
            runs.append(Slice(local, remote, first, end - first, fill))
        local, remote, first, end, fill = local_slot, remote_slot, first_layer, first_layer + layers, filled
    if end > 0:
        runs.append(Slice(local, remote, first, end - first, fill))
    return runs


async def in_thread(executor: Executor, work: Callable[[], T], cancellation: Cancellation) -> T:
    """Runs `work` in `executor`. When cancelled, stops it and waits for its end: nothing is touched afterwards."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancellation.cancel()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError, TransferError):
                await asyncio.shield(future)
        if not future.cancelled():
            # Retrieved, so that asyncio does not log it: the cancellation is the cause.
            future.exception()
        raise
