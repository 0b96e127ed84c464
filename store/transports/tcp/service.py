"""The receiving end of TCP: obeys a message, whatever link it came over.

Its caller has proved that it knows the cluster's secret (`server`). Every write is checked against the pool
before a byte of it reaches a slot: right order, reserved slots, exact sizes. A refusal is answered with a reason and
counted (`refused_…`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from halfmoon.store.pool.checksums import filled, sums_of
from halfmoon.store.pool.segment import PoolView
from halfmoon.store.transports.base import Run, SlotAccess, slots_of
from halfmoon.store.transports.tcp import wire
from halfmoon.store.transports.tcp.channel import FrameMissing, Frames

#: An answer to nonsense is shorter than the nonsense.
REASON_CHARS_MAX = 300
Reply = Callable[[Sequence[bytes | memoryview]], None]


class RequestRefused(Exception):
    """`name` counts it, the text is the answer."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class TcpService:
    """Serves reads and writes of the pool to authenticated peers; from any thread."""

    def __init__(
        self, view: PoolView, access: SlotAccess, *, incarnation: str, counters: Counter[str]
    ) -> None:
        self._view = view
        self._access = access
        self._incarnation = incarnation
        self._counters = counters
        self._counting = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        with self._counting:
            self._counters[name] += number

    def welcome(self, session: wire.Session) -> Sequence[bytes]:
        """The first message of a connection."""
        return session.seal(wire.Welcome(incarnation=self._incarnation))

    def receive(self, frames: Frames, session: wire.Session, reply: Reply) -> bool:
        """Obeys one message, or answers with a reason. Frames may be left over. False: it was not of this protocol, and
        the connection ends with the answer. Raises ConnectionBroken when the connection ends.
        """
        name = ""
        try:
            mac, raw = frames.small(), frames.small()
            header = session.open(mac, raw)
            match header:
                case wire.Read():
                    self._read(session, header, reply)
                case wire.Write():
                    self._write(header, frames)
                    reply(session.seal(wire.Ack()))
                case _:
                    raise RequestRefused("malformed", f"{type(header).__name__} is no request")
        except (RequestRefused, FrameMissing, wire.FrameInvalid) as problem:
            name = problem.name if isinstance(problem, RequestRefused) else "malformed"
            self.count(f"refused_{name}")
            refusal = wire.RefusalFrame(
                reason=str(problem)[:REASON_CHARS_MAX], kind="corrupted" if name == "corrupted" else "refused"
            )
            reply(session.seal(refusal))
        return name != "malformed"

    def _read(self, session: wire.Session, header: wire.Read, reply: Reply) -> None:
        self._check_runs(header.runs)
        if any(run.fill for run in header.runs):
            raise RequestRefused("malformed", "what is read is whole blocks")
        at = self._view.geometry
        size = sum(run.layers for run in header.runs) * at.layer_block_bytes
        if size > max(wire.STREAM_BYTES, at.layer_block_bytes):
            raise RequestRefused("too_large", f"{size} bytes asked for at once")
        sums: list[int] = []
        for run in header.runs:
            sums += self._view.sums[run.slot, run.first_layer : run.first_layer + run.layers].tolist()
        # Asked after the sums were read: they are those of the leased blocks, and bytes that change under the answer,
        # when the lease ends while it is sent, do not fit them.
        if reason := self._access.begin_read(header.order_id, [run.slot for run in header.runs]):
            raise RequestRefused("no_lease", reason)
        payload = [self._view.run(run.slot, run.first_layer, run.layers) for run in header.runs]
        self.count("tcp_read_bytes", sum(map(len, payload)))
        reply([*session.seal(wire.Chunk(sums=sums)), *payload])

    def _write(self, header: wire.Write, frames: Frames) -> None:
        self._check_runs(header.runs)
        if len(header.sums) != sum(run.layers for run in header.runs):
            raise RequestRefused(
                "malformed_write",
                f"{len(header.sums)} checksums for {sum(run.layers for run in header.runs)} layers",
            )
        slots, parts = slots_of(header.runs)
        if reason := self._access.begin_write(header.order_id, header.party, slots, parts=parts):
            raise RequestRefused("no_reservation", reason)
        try:
            sums = iter(header.sums)
            for run in header.runs:
                into = self._room_for(run)
                size = frames.into(into)
                if size < 0:
                    raise RequestRefused("wrong_size", "payload is missing")
                if size != len(into):
                    raise RequestRefused("wrong_size", f"a frame of {size} bytes where {len(into)} were due")
                self.count("tcp_written_bytes", size)
                if sums_of(into, run.layers) != [next(sums) for _ in range(run.layers)]:
                    raise RequestRefused("corrupted", f"slot {run.slot} is not what was sent")
                if run.fill:
                    layers = self._view.blocks[run.slot, run.first_layer : run.first_layer + run.layers]
                    came = np.frombuffer(into, np.uint8).reshape(run.layers, 2, run.fill)
                    np.copyto(filled(layers, run.fill), came)
            if frames.more():
                raise RequestRefused("wrong_size", "more payload than was announced")
        finally:
            self._access.end_write(header.order_id, header.party)

    def _room_for(self, run: Run) -> memoryview:
        """Where its bytes go: the slot's own memory, or room for what is packed."""
        if not run.fill:
            return self._view.run(run.slot, run.first_layer, run.layers)
        return memoryview(bytearray(2 * run.fill * run.layers))

    def _check_runs(self, runs: Sequence[Run]) -> None:
        if len(runs) > wire.RUNS_PER_MESSAGE:
            raise RequestRefused("too_large", f"{len(runs)} runs in one message")
        at = self._view.geometry
        for run in runs:
            if not run.inside(at):
                raise RequestRefused(
                    "outside", f"slot {run.slot}, layers {run.first_layer}+{run.layers} outside of the pool"
                )
