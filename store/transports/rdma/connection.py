"""One connected queue pair on the event loop: messages of block-layers, several under way, the end of each a
future.

A pair has CELLS mailbox cells in each direction. A read's message uses a cell to hold the checksums that it
reads along with the blocks; a write's message ends with a WRITE with immediate into the peer's cell
(`Arrived`: "these are there"), which the peer checks and answers the same way (`WriteVerdict`). Immediates are
`cell << 24 | bytes`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfmoon.schemas.store import QueuePair
from halfmoon.store.errors import (
    BytesCorrupted,
    HolderUnreachable,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from halfmoon.store.pool.checksums import run_sums
from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.base import Call, Cancellation, Peer, Run, Slice, in_thread
from halfmoon.store.transports.rdma import wire
from halfmoon.store.transports.rdma.verbs import RECEIVES, Completion, Memory, QueuePairHandle

#: Messages under way on one pair.
CELLS = 4
CELL_BYTES = 16 * 1024
#: The mailboxes of one pair: messages to it, and messages from it.
MAILBOX_BYTES = 2 * CELLS * CELL_BYTES
#: A work request moves at most this much, unless a layer is so large that it would take more than PIECES of
#: them.
PIECE_BYTES = 1024 * 1024
PIECES = 32
#: `wr_id`s: the pair's own number, a flag for receives, the cell.
RECEIVED = 1 << 15
#: Errors that a new pair would meet too: the memory differs from the peer's description.
_REFUSED = {"REM_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_OP_ERR", "LOC_PROT_ERR", "LOC_LEN_ERR"}
#: Not its own error: another request of the pair failed before it.
FLUSHED = "WR_FLUSH_ERR"


class PairBroken(HolderUnreachable):
    """The device has given the pair up; a new one may do."""


@dataclass(frozen=True, slots=True)
class RdmaContext:
    """The memory that all connections of a transport share, and the threads that hash."""

    view: PoolView
    pool: Memory
    mailboxes: Memory
    mailbox_bytes: npt.NDArray[np.uint8]
    executor: Executor
    stall_ns_max: int


class RdmaConnection:
    """One end. `home`: offset of its cells in the mailboxes. `told` is called with (cell, bytes) for every
    immediate that is no answer.
    """

    def __init__(self, number: int, handle: QueuePairHandle, context: RdmaContext, home: int) -> None:
        self.number = number
        self.handle = handle
        self.home = home
        self.node_id = self.incarnation = ""
        self.their_qpn = 0
        self.problem: TransferError | None = None
        self.told: Callable[[int, int], None] = self._answered
        self._context = context
        self._pool = self._mailbox = (0, 0)
        self._under_way: dict[int, asyncio.Future[None]] = {}
        self._verdicts: dict[int, wire.WriteVerdict] = {}
        for _ in range(RECEIVES):
            self._receive()

    def connect(self, other: QueuePair, mtu: int) -> None:
        """To the other end, as it describes itself. Raises TransferError."""
        self.node_id, self.incarnation, self.their_qpn = other.node_id, other.incarnation, other.qpn
        self._pool = (int(other.region.address), other.region.rkey)
        self._mailbox = (int(other.mailbox.address), other.mailbox.rkey)
        self.handle.connect(
            qpn=other.qpn, psn=other.psn, gid=other.gid, lid=other.lid, mtu=min(mtu, other.mtu)
        )

    # --- completions ----------------------------------------------------------------------------------------

    def complete(self, one: Completion) -> None:
        if one.problem:
            if one.problem == FLUSHED and self.problem is None:
                self.fail(PairBroken(f"the queue pair to {self.node_id} was given up"))
            elif one.problem in _REFUSED:
                self.fail(TransferRefused(f"RDMA to {self.node_id} failed: {one.problem}"))
            elif one.problem != FLUSHED:  # no answer, or the device could not send: a port that went down
                self.fail(PairBroken(f"{self.node_id} cannot be reached over RDMA ({one.problem})"))
        elif one.wr_id & RECEIVED:
            try:
                self._receive()
            except TransferError as problem:
                self.fail(problem)
                return
            self.told(one.immediate >> 24, one.immediate & 0xFFFFFF)
        else:
            cell = one.wr_id & 0xFF
            if cell < CELLS:
                self._end(cell)

    def fail(self, problem: TransferError) -> None:
        """It is not to be used again; whatever is under way ends with `problem`, the first one."""
        if self.problem is None:
            self.problem = problem
        for future in self._under_way.values():
            if not future.done():
                future.set_exception(self.problem)
                future.exception()  # retrieved here, because a cancelled move does not wait for it

    def _end(self, cell: int) -> None:
        future = self._under_way.get(cell)
        if future is not None and not future.done():
            future.set_result(None)

    def _answered(self, cell: int, size: int) -> None:
        try:
            if not (cell < CELLS and size <= CELL_BYTES):
                raise ValueError(f"cell {cell}, {size} bytes")
            self._verdicts[cell] = wire.verdict_decoder.decode(self.heard(cell, size))
            self._end(cell)
        except (ValueError, RecursionError) as problem:  # msgspec's errors among them
            self.fail(TransferRefused(f"{self.node_id} answers what cannot be read: {problem}"))

    def _receive(self) -> None:
        context = self._context
        self.handle.receive(
            self.number << 16 | RECEIVED, context.mailboxes, context.mailboxes.address + self.home
        )

    # --- mailboxes ------------------------------------------------------------------------------------------

    def heard(self, cell: int, size: int) -> bytes:
        start = self.home + cell * CELL_BYTES
        return self._context.mailbox_bytes[start : start + size].tobytes()

    def _out(self, cell: int) -> int:
        """Offset of the cell that this end writes from."""
        return self.home + (CELLS + cell) * CELL_BYTES

    def tell(self, cell: int, raw: bytes, *, answer: bool) -> None:
        """Into the peer's cell, with an immediate. Raises TransferError."""
        if len(raw) > CELL_BYTES:
            raise TransferError(f"a message of {len(raw)} bytes does not fit into a mailbox")
        context, start = self._context, self._out(cell)
        context.mailbox_bytes[start : start + len(raw)] = np.frombuffer(raw, np.uint8)
        # Its completion ends nothing: that of a message is its answer, and an answer has none.
        wr_id = self.number << 16 | 0xFF
        address, rkey = self._mailbox
        remote = (address + cell * CELL_BYTES, rkey)
        at = context.mailboxes.address + start
        self.handle.write(wr_id, context.mailboxes, at, remote, len(raw), immediate=cell << 24 | len(raw))

    # --- moving ---------------------------------------------------------------------------------------------

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call, cancellation: Cancellation) -> None:
        waiting: deque[tuple[int, list[Slice]]] = deque()
        for number, message in enumerate(wire.messages(items, peer.geometry.layer_block_bytes)):
            if len(waiting) == CELLS:
                await self._take(*waiting.popleft(), cancellation)
            cell = number % CELLS
            self._begin(cell)
            self._post_read(cell, message, peer)
            waiting.append((cell, message))
        while waiting:
            await self._take(*waiting.popleft(), cancellation)

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call, cancellation: Cancellation) -> None:
        view, waiting = self._context.view, deque[int]()
        for number, message in enumerate(wire.messages(items, peer.geometry.layer_block_bytes)):
            # Hashed while earlier messages are on their way.
            sums = await self._sums(view, message, cancellation)
            if len(waiting) == CELLS:
                await self._accepted(waiting.popleft())
            cell = number % CELLS
            self._begin(cell)
            for local, theirs, size in self._pieces(message, peer):
                wr_id = self.number << 16 | 0xFF
                self.handle.write(wr_id, self._context.pool, local, (theirs, self._pool[1]), size)
            runs = [Run(item.remote_slot, item.first_layer, item.layers, item.fill) for item in message]
            arrived = wire.Arrived(order_id=call.order_id, party=call.party, runs=runs, sums=sums)
            self.tell(cell, wire.pack(arrived), answer=False)
            waiting.append(cell)
        while waiting:
            await self._accepted(waiting.popleft())

    def _begin(self, cell: int) -> None:
        self._under_way[cell] = asyncio.get_running_loop().create_future()
        if self.problem is not None:
            raise self.problem

    def _post_read(self, cell: int, message: list[Slice], peer: Peer) -> None:
        context, at = self._context, peer.geometry
        scratch = context.mailboxes.address + self._out(cell)
        wr_id = self.number << 16 | cell
        table, rkey = self._pool[0] + at.table_offset, self._pool[1]
        for item in message:
            theirs = table + 8 * (item.remote_slot * at.layers + item.first_layer)
            self.handle.read(wr_id, context.mailboxes, scratch, (theirs, rkey), 8 * item.layers, last=False)
            scratch += 8 * item.layers
        pieces = list(self._pieces(message, peer))
        for number, (local, theirs, size) in enumerate(pieces, 1):
            self.handle.read(wr_id, context.pool, local, (theirs, rkey), size, last=number == len(pieces))

    def _pieces(self, message: list[Slice], peer: Peer) -> Iterator[tuple[int, int, int]]:
        """Local address, remote address, bytes of every work request."""
        layers, layer_bytes = peer.geometry.layers, peer.geometry.layer_block_bytes
        for item in message:
            local = self._context.pool.address + (item.local_slot * layers + item.first_layer) * layer_bytes
            theirs = self._pool[0] + (item.remote_slot * layers + item.first_layer) * layer_bytes
            if item.fill:
                for start in range(0, item.layers * layer_bytes, layer_bytes // 2):
                    yield local + start, theirs + start, item.fill
                continue
            size = item.layers * layer_bytes
            step = max(PIECE_BYTES, -(-size // PIECES))
            for start in range(0, size, step):
                yield local + start, theirs + start, min(step, size - start)

    async def _take(self, cell: int, message: list[Slice], cancellation: Cancellation) -> None:
        await self._wait(cell)
        start = self._out(cell)
        layers = sum(item.layers for item in message)
        expected = self._context.mailbox_bytes[start : start + 8 * layers].view(np.uint64).tolist()
        if await self._sums(self._context.view, message, cancellation) != expected:
            raise BytesCorrupted(f"what came from {self.node_id} over RDMA is not what was committed")

    async def _sums(self, view: PoolView, message: list[Slice], cancellation: Cancellation) -> list[int]:
        def hashed() -> list[int]:
            sums: list[int] = []
            for item in message:
                cancellation.check()
                sums += run_sums(view, item.local_slot, item.first_layer, item.layers, item.fill)
            return sums

        return await in_thread(self._context.executor, hashed, cancellation)

    async def _accepted(self, cell: int) -> None:
        await self._wait(cell)
        verdict = self._verdicts.pop(cell)
        if verdict.name:
            kind = BytesCorrupted if verdict.name == "corrupted" else TransferRefused
            raise kind(f"{self.node_id}: {verdict.refusal}")

    async def _wait(self, cell: int) -> None:
        stall_ns = self._context.stall_ns_max
        try:
            await asyncio.wait_for(self._under_way[cell], stall_ns / 1e9)
        except TimeoutError:
            problem = TransferTimeout(f"nothing from {self.node_id} for {stall_ns // 1_000_000} ms")
            self.fail(problem)
            raise problem from None
        del self._under_way[cell]

    def busy(self) -> bool:
        """True: the device may still touch memory on this pair's behalf."""
        return bool(self._under_way)
