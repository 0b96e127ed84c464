"""The network between nodes: transfers share the bandwidth out of a node, and the bandwidth into one.

At each end a transfer has an equal share of the bandwidth, and goes at the lesser of the two. Rates are set anew when a
transfer starts or ends there. That is a little less than max-min fairness would give.
"""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.conductor.simulation.clock import Clock
from halfmoon.schemas.numbers import SECOND_NS


class Transfer:
    """Bytes on their way. `stages` are done one after another, each a number of bytes, then a call."""

    __slots__ = ("bytes_left", "bytes_s", "destination", "ended", "epoch", "since_ns", "source", "stages")

    def __init__(
        self, source: str, destination: str, stages: list[tuple[int, Callable[[], None]]], now_ns: int
    ) -> None:
        self.source, self.destination = source, destination
        self.stages = stages
        self.bytes_left = stages[0][0]
        self.bytes_s = 0
        self.since_ns = now_ns
        self.epoch = 0
        self.ended = False


class Network:
    """All nodes with the same bandwidth, full duplex."""

    def __init__(self, clock: Clock, bytes_s: int, latency_ns: int) -> None:
        self.clock = clock
        self.bytes_s = bytes_s
        self.latency_ns = latency_ns
        self.bytes_moved = 0
        # Insertion order is kept: rates are set in the order in which transfers began.
        self._out: dict[str, dict[Transfer, None]] = {}
        self._in: dict[str, dict[Transfer, None]] = {}

    def send(self, source: str, destination: str, *stages: tuple[int, Callable[[], None]]) -> Transfer:
        """Begin, after the latency. Each stage's call is made when its bytes are there."""
        transfer = Transfer(source, destination, list(stages), self.clock.now_ns)
        self.clock.after(self.latency_ns, self._start, transfer)
        return transfer

    def stop(self, transfer: Transfer) -> None:
        """No more of it, and no call; one that has ended stays so."""
        if transfer.ended:
            return
        transfer.ended = True
        if transfer in self._out.get(transfer.source, ()):
            self._leave(transfer)

    def _start(self, transfer: Transfer) -> None:
        if transfer.ended:
            return
        transfer.since_ns = self.clock.now_ns
        self._out.setdefault(transfer.source, {})[transfer] = None
        self._in.setdefault(transfer.destination, {})[transfer] = None
        self._share(transfer.source, transfer.destination)

    def _leave(self, transfer: Transfer) -> None:
        del self._out[transfer.source][transfer]
        del self._in[transfer.destination][transfer]
        self._share(transfer.source, transfer.destination)

    def _share(self, source: str, destination: str) -> None:
        """Set the rates of all that leave `source` or enter `destination`."""
        leaving, entering = self._out.get(source, {}), self._in.get(destination, {})
        for transfer in leaving:
            self._set_rate(transfer)
        for transfer in entering:
            if transfer not in leaving:
                self._set_rate(transfer)

    def _set_rate(self, transfer: Transfer) -> None:
        sharing = max(len(self._out[transfer.source]), len(self._in[transfer.destination]))
        bytes_s = max(1, self.bytes_s // sharing)
        if bytes_s == transfer.bytes_s:
            return
        self._count_moved(transfer)
        transfer.bytes_s = bytes_s
        self._book(transfer)

    def _count_moved(self, transfer: Transfer) -> None:
        now_ns = self.clock.now_ns
        moved = min(transfer.bytes_left, transfer.bytes_s * (now_ns - transfer.since_ns) // SECOND_NS)
        transfer.bytes_left -= moved
        transfer.since_ns = now_ns

    def _book(self, transfer: Transfer) -> None:
        transfer.epoch += 1
        needed_ns = -(-transfer.bytes_left * SECOND_NS // transfer.bytes_s)
        self.clock.after(needed_ns, self._stage_done, transfer, transfer.epoch)

    def _stage_done(self, transfer: Transfer, epoch: int) -> None:
        if transfer.ended or transfer.epoch != epoch:
            return
        stage_bytes, call = transfer.stages.pop(0)
        self.bytes_moved += stage_bytes
        transfer.since_ns = self.clock.now_ns
        if transfer.stages:
            transfer.bytes_left = transfer.stages[0][0]
            self._book(transfer)
        else:
            transfer.ended = True
            self._leave(transfer)
        call()
