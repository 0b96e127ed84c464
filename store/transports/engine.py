"""The transfer engine: moves a batch of slices to or from a peer over the best of the paths to it.

A *path* is one way to one peer: a transport, and one of the peer's endpoints that it can use (of TCP one for
each NIC). Paths of the transport with the smaller rank come first; among those of one transport the score
decides, measured:

    (bytes in flight + bytes of the slice) / bandwidth (EWMA) * NUMA distance of memory and NIC

A batch is cut into slices, as many under way at once as there are stripes. A slice that fails goes over
another path of its transport, then over another transport; when no path is left the caller hears of it, and
asks a replica. A path that failed rests, longer each time, and is then probed with one slice before it is
trusted again.

It is a `BlockMover` as each transport is, and keeps to the same contract: deadline, cancellation, nothing
touched afterwards.

Source: Mooncake (FAST'25), section 5.2 (topology-aware path selection, endpoint pooling, resubmission on
another path).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from halfmoon.bus.telemetry.metrics import LATENCY_S, Times
from halfmoon.store.errors import BytesCorrupted, HolderUnreachable, TransferError, TransferTimeout
from halfmoon.store.transports.base import NEAR, Call, Peer, Slice, Transport, moved_bytes

SLICE_BYTES = 8 * 1024 * 1024
#: Slices under way at once in all; more wait their turn.
UNDER_WAY_MAX = 32
#: A smaller move measures latency, not bandwidth.
MEASURED_BYTES_MIN = 256 * 1024
EWMA_WEIGHT = 0.2
REST_NS = 100_000_000
REST_NS_MAX = 10_000_000_000


class TransferStats:
    """Counts of one transport in one direction since the start. `descriptors`: contiguous runs, one a
    block.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.descriptors = 0
        self.times = Times(LATENCY_S)
        #: By the code of the error.
        self.failures: Counter[str] = Counter()


class Path:
    """One way to one incarnation of a peer, and how it has been doing."""

    def __init__(self, transport: Transport, peer: Peer, distance: int) -> None:
        self.kind = transport.kind.name
        self.transport = transport
        #: The peer, with the one endpoint that this path uses.
        self.peer = peer
        self.distance = distance
        self.bytes_s = transport.kind.assumed_bytes_s
        self.in_flight_bytes = 0
        self.moves = 0
        self.failures = 0
        self.backoff_until_ns = 0

    def usable(self, now_ns: int) -> bool:
        """Not resting; after a failure one move at a time, until one went well."""
        return now_ns >= self.backoff_until_ns and (not self.failures or not self.moves)

    def score(self, size: int) -> float:
        """Expected time, in seconds; lower is better."""
        return (self.in_flight_bytes + size) / self.bytes_s * self.distance / NEAR

    def succeeded(self, size: int, elapsed_ns: int, at_once: int) -> None:
        self.failures = 0
        if size >= MEASURED_BYTES_MIN:
            measured = size * at_once * 1e9 / max(1, elapsed_ns)
            # A moving average, so that one slow slice on a busy machine does not move all traffic elsewhere.
            self.bytes_s += (measured - self.bytes_s) * EWMA_WEIGHT

    def failed(self, now_ns: int) -> None:
        self.backoff_until_ns = now_ns + min(REST_NS_MAX, REST_NS << min(self.failures, 16))
        self.failures += 1


class TransferEngine:
    """See the module. `transports`: those that this node calls over, in any order."""

    def __init__(self, transports: Sequence[Transport], *, stripes: int, counters: Counter[str]) -> None:
        self._transports = sorted(transports, key=lambda transport: transport.kind.rank)
        self._stripes = stripes
        self._counters = counters
        self._room = asyncio.Semaphore(UNDER_WAY_MAX)
        self._paths: dict[tuple[str, str], list[Path]] = {}
        #: By transport, and "read" or "write".
        self.stats: defaultdict[tuple[str, str], TransferStats] = defaultdict(TransferStats)

    def paths(self, peer: Peer) -> list[Path]:
        """Best transport first. Raises HolderUnreachable when there is none."""
        known = self._paths.get((peer.node_id, peer.incarnation))
        if known is None:
            # A restarted agent is another process with other ports: the record of the old paths does not hold for it.
            for old in [key for key in self._paths if key[0] == peer.node_id]:
                del self._paths[old]
            known = self._paths[peer.node_id, peer.incarnation] = self._find(peer)
        if not known:
            raise HolderUnreachable(
                f"{peer.node_id} is on another host, and no transport leads to it from here"
            )
        return known

    def _find(self, peer: Peer) -> list[Path]:
        return [
            Path(transport, dataclasses.replace(peer, endpoints=(at,)), at.distance)
            for transport in self._transports
            for at in transport.usable_endpoints(peer)
        ]

    async def read(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, reading=True)

    async def write(self, peer: Peer, items: Sequence[Slice], call: Call) -> None:
        await self._move(peer, items, call, reading=False)

    def forget(self, node_id: str) -> None:
        """Connections and mappings; how its paths did is remembered until it restarts."""
        for transport in self._transports:
            transport.forget(node_id)

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()

    # --- inside ---------------------------------------------------------------------------------------------

    async def _move(self, peer: Peer, items: Sequence[Slice], call: Call, *, reading: bool) -> None:
        paths = self.paths(peer)
        # At least one slice for each path of the best transport, or a second NIC would never be used.
        stripes = max(self._stripes, sum(path.kind == paths[0].kind for path in paths))
        pieces = cut(items, peer.geometry.layer_block_bytes, stripes)
        if len(pieces) == 1:
            await self._piece(paths, pieces[0], call, reading)
            return
        todo = iter(pieces)

        async def stripe() -> None:
            for piece in todo:
                await self._piece(paths, piece, call, reading)

        tasks = [asyncio.create_task(stripe()) for _ in range(min(stripes, len(pieces)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _piece(self, paths: Sequence[Path], items: Sequence[Slice], call: Call, reading: bool) -> None:
        """One slice, over one path after the other. Raises the error of the last one."""
        try:
            async with asyncio.timeout(call.remaining_s() + 1.0):
                await self._room.acquire()
        except TimeoutError:
            raise TransferTimeout("the deadline passed before it was this transfer's turn") from None
        try:
            tried: list[Path] = []
            problem: TransferError | None = None
            size = moved_bytes(items, paths[0].peer.geometry.layer_block_bytes)
            while (path := choose(paths, size, tried)) is not None:
                tried.append(path)
                try:
                    await self._over(path, items, size, call, reading)
                    return
                except TransferError as failure:
                    problem = failure
                    if call.remaining_s() <= 0:
                        break
                    self._counters[f"retried_{path.kind}"] += 1
            raise problem or HolderUnreachable(f"every path to {paths[0].peer.node_id} rests after a failure")
        finally:
            self._room.release()

    async def _over(self, path: Path, items: Sequence[Slice], size: int, call: Call, reading: bool) -> None:
        started_ns = time.monotonic_ns()
        path.in_flight_bytes += size
        path.moves += 1
        # Moves on the same path share its bandwidth; each one measures its share.
        at_once = path.moves
        move = path.transport.read if reading else path.transport.write
        moved = self.stats[path.kind, "read" if reading else "write"]
        try:
            await move(path.peer, items, call)
            elapsed_ns = time.monotonic_ns() - started_ns
            path.succeeded(size, elapsed_ns, at_once)
            moved.bytes += size
            moved.descriptors += len(items)
            moved.times.observe(elapsed_ns)
        except TransferError as problem:
            moved.failures[problem.code] += 1
            # A deadline that was too short is not the path's fault, nor is a refusal: the peer lives and gave a reason.
            if (
                isinstance(problem, HolderUnreachable | TransferTimeout | BytesCorrupted)
                and call.remaining_s() > 0
            ):
                path.failed(time.monotonic_ns())
            raise
        finally:
            path.in_flight_bytes -= size
            path.moves -= 1


def choose(paths: Sequence[Path], size: int, tried: Sequence[Path]) -> Path | None:
    """The next path for `size` bytes: of the first transport that has a usable one, the best score."""
    now_ns = time.monotonic_ns()
    usable = [path for path in paths if path not in tried and path.usable(now_ns)]
    if not usable:
        return None
    # Scores compare paths of one transport only: a better transport is taken even when it is busy.
    return min((path for path in usable if path.kind == usable[0].kind), key=lambda path: path.score(size))


def cut(items: Sequence[Slice], layer_block_bytes: int, stripes: int) -> list[list[Slice]]:
    """In pieces of SLICE_BYTES (one layer at least), or in one when there is nothing to gain."""
    if stripes < 2 or moved_bytes(items, layer_block_bytes) <= SLICE_BYTES:
        return [list(items)]
    layers_max = max(1, SLICE_BYTES // layer_block_bytes)
    pieces: list[list[Slice]] = []
    room = 0
    for item in items:
        first, end = item.first_layer, item.first_layer + item.layers
        while first < end:
            if not room:
                pieces.append([])
                room = layers_max
            layers = min(room, end - first)
            pieces[-1].append(item._replace(first_layer=first, layers=layers))
            first, room = first + layers, room - layers
    return pieces
