"""The calling end of TCP: one connection to a peer, used for one move at a time.

Several requests are under way, so that the peer never waits for us; a move of a few KiB is one exchange without a
thread, over a link that the event loop watches (`TcpLink.watch`, `TcpLink.exchange`). A peer that dies is seen at once
(its connection breaks), one that hangs after `stall_ns_max`. A link that failed is not used again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from halfmoon.store.errors import BytesCorrupted, HolderUnreachable, TransferError, TransferRefused
from halfmoon.store.pool.checksums import run_bytes, sums_of
from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.base import Call, Peer, Run, Slice
from halfmoon.store.transports.tcp import wire
from halfmoon.store.transports.tcp.channel import FrameMissing, StallTimer, TcpChannel

UNDER_WAY = 4
WAKE_S = 0.05


class TcpLink:
    """Raises TransferErrors, and ConnectionBroken."""

    def __init__(
        self, channel: TcpChannel, session: wire.Session, view: PoolView, peer: Peer, address: str
    ) -> None:
        self.peer = peer
        self.address = address
        self._channel = channel
        self._view = view
        self._session = session
        #: What watches this link, and what its exchange waits with for the answer.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came: asyncio.Future[None] | None = None
        self.closed = False

    def close(self) -> None:
        """Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
        self._channel.close()

    def broken(self) -> bool:
        """True: the connection of an idle link has ended meanwhile."""
        # The loop that watches it may not have come to its end yet.
        return self.closed or self._channel.broken()

    def enter(self, timer: StallTimer) -> None:
        """Hears the server's first message. Raises HolderUnreachable: it is another than was meant."""
        welcome = self._answer(timer)
        if not isinstance(welcome, wire.Welcome) or welcome.incarnation != self.peer.incarnation:
            raise HolderUnreachable(f"{self.peer.node_id} was restarted")

    # --- moves, blocking ------------------------------------------------------------------------------------

    def read(self, items: Sequence[Slice], call: Call, timer: StallTimer) -> None:
        messages = wire.split(items, self._view.geometry.layer_block_bytes, wire.STREAM_BYTES)
        waiting: deque[list[Slice]] = deque()
        while True:
            while len(waiting) < UNDER_WAY and (message := next(messages, None)) is not None:
                self._send(_read(message, call), timer)
                waiting.append(message)
            if not waiting:
                return
            self._take(waiting.popleft(), self._answer(timer), timer)

    def write(self, items: Sequence[Slice], call: Call, timer: StallTimer) -> None:
        under_way = 0
        for message in wire.split(items, self._view.geometry.layer_block_bytes):
            timer.check()
            self._send_write(message, call, timer)
            under_way += 1
            if under_way == UNDER_WAY:
                _acknowledged(self.peer, self._answer(timer))
                under_way -= 1
        for _ in range(under_way):
            _acknowledged(self.peer, self._answer(timer))

    # --- a small move, on the event loop --------------------------------------------------------------------

    def watch(self) -> None:
        """From now on the running event loop watches this link, which is for exchanges alone: to watch it only during
        each one takes two system calls more. It is closed when its connection ends.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._readable)

    def _readable(self) -> None:
        if self._came is not None:
            _wake(self._came)
        elif self._channel.broken():
            self.close()

    async def exchange(self, message: list[Slice], call: Call, timer: StallTimer, *, reading: bool) -> None:
        """One message there and its answer back, both of a few KiB: nothing here waits but for the answer."""
        channel = self._channel
        if reading:
            self._send(_read(message, call), timer)
        else:
            self._send_write(message, call, timer)
        channel.during(timer)
        await self._something()
        while not channel.whole():
            timer.check()
            await self._something()
        answer = self._answer(timer)
        if reading:
            self._take(message, answer, timer)
        else:
            _acknowledged(self.peer, answer)

    # --- inside ---------------------------------------------------------------------------------------------

    async def _something(self) -> None:
        """Returns when something came, or after `WAKE_S`."""
        assert self._loop is not None, "watch"
        self._came = came = self._loop.create_future()
        timer = self._loop.call_later(WAKE_S, _wake, came)
        try:
            await came
        finally:
            self._came = None
            timer.cancel()

    def _send_write(self, message: list[Slice], call: Call, timer: StallTimer) -> None:
        payload = [run_bytes(self._view, i.local_slot, i.first_layer, i.layers, i.fill) for i in message]
        sums = [
            one for some, item in zip(payload, message, strict=True) for one in sums_of(some, item.layers)
        ]
        runs = [Run(item.remote_slot, item.first_layer, item.layers, item.fill) for item in message]
        header = wire.Write(order_id=call.order_id, party=call.party, runs=runs, sums=sums)
        self._send(header, timer, payload)

    def _take(self, message: list[Slice], chunk: wire.AnyFrame, timer: StallTimer) -> None:
        """The payload of a chunk, straight into the slots, verified."""
        if not isinstance(chunk, wire.Chunk):
            raise TransferRefused(f"{self.peer.node_id} answers a read with {type(chunk).__name__}")
        sums = iter(chunk.sums)
        for item in message:
            timer.check()
            into = self._view.run(item.local_slot, item.first_layer, item.layers)
            if self._channel.into(into) != len(into):
                raise TransferRefused(f"{self.peer.node_id} sent a truncated frame")
            expected = [next(sums, -1) for _ in range(item.layers)]
            if sums_of(into, item.layers) != expected:
                raise BytesCorrupted(
                    f"slot {item.remote_slot} from {self.peer.node_id} is not what was committed"
                )

    def _send(self, header: wire.AnyFrame, timer: StallTimer, payload: Sequence[memoryview] = ()) -> None:
        self._channel.send([*self._session.seal(header), *payload], timer)

    def _answer(self, timer: StallTimer) -> wire.AnyFrame:
        """The next header; its payload is still to be received."""
        timer.check()
        self._channel.receive(timer)
        try:
            mac, raw = self._channel.small(), self._channel.small()
            header = self._session.open(mac, raw)
        except (FrameMissing, wire.FrameInvalid) as problem:
            raise TransferRefused(f"{self.peer.node_id}: {problem}") from None
        if isinstance(header, wire.RefusalFrame):
            kind: type[TransferError] = BytesCorrupted if header.kind == "corrupted" else TransferRefused
            raise kind(f"{self.peer.node_id}: {header.reason}")
        return header


def _wake(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)


def _read(message: list[Slice], call: Call) -> wire.Read:
    runs = [Run(item.remote_slot, item.first_layer, item.layers) for item in message]
    return wire.Read(order_id=call.order_id, runs=runs)


def _acknowledged(peer: Peer, answer: wire.AnyFrame) -> None:
    if not isinstance(answer, wire.Ack):
        raise TransferRefused(f"{peer.node_id} answers a write with {type(answer).__name__}")
