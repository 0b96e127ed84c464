"""Both pools as rows: of every worker that takes orders, what a choice looks at. Part of the core.

In a large pool most of a decision's time would go into reading the workers themselves. A row is a tuple, made
anew when its worker's load or cost changes, and the order of rows by load is kept, so that a choice looks at
the least loaded first and passes over all that cannot be better. Rows follow from the state and are in no
snapshot: they are made when first needed, and again when somebody joins, drains or leaves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from operator import le
from typing import Generic, NamedTuple, TypeVar

import msgspec

from halfmoon.conductor.core.cost import LINK_STALE_NS, Link
from halfmoon.conductor.core.records import StoreRecord, WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile

#: KV blocks that are free where there is no KV.
NO_KV_BLOCKS = 2**62


class PrefillRow(NamedTuple):
    """Its queue at a time is `free_ns` less that time, and at least `behind_ns`: what waits behind the oldest
    order.
    """

    free_ns: int
    behind_ns: int
    orders: int


class DecodeRow(NamedTuple):
    """`step_ns`: of a step with one sequence more, but not its context."""

    step_ns: int
    #: For one request more; -1: the batch is full.
    blocks_free: int


Row = TypeVar("Row", PrefillRow, DecodeRow)


class LoadIndex(Generic[Row]):
    """Workers of one role in the order of their ids, and at the same places their rows."""

    __slots__ = (
        "_changes",
        "_places",
        "_row",
        "block_tokens",
        "by_load",
        "least",
        "most",
        "on_node",
        "rows",
        "tokens_max",
        "workers",
    )

    def __init__(self, workers: list[WorkerRecord], row: Callable[[WorkerRecord], Row]) -> None:
        self._row: Callable[[WorkerRecord], Row] = row
        self._places = {worker.worker_id: place for place, worker in enumerate(workers)}
        self.workers = workers
        self.rows: list[Row] = [row(worker) for worker in workers]
        #: First part of every row with its place, in order.
        self.by_load = sorted((one[0], place) for place, one in enumerate(self.rows))
        #: Places by node.
        self.on_node: dict[str, list[int]] = {}
        for place, worker in enumerate(workers):
            self.on_node.setdefault(worker.node_id, []).append(place)
        #: All take a request of so many tokens; -1: they are not alike.
        self.tokens_max = min((_tokens_max(worker) for worker in workers), default=-1)
        if any(worker.layout != workers[0].layout for worker in workers):
            self.tokens_max = -1
        #: Of a block that may be cached; 0: there is no KV.
        self.block_tokens = workers[0].block_tokens if workers and workers[0].block_bytes else 0
        self._bound_costs()

    def _bound_costs(self) -> None:
        """No worker's cost is below `least` or above `most` in any of its parts."""
        self.least = self.most = self.workers[0].cost if self.workers else CostProfile()
        self._changes = 0
        for worker in self.workers:
            self._include(worker.cost)

    def _include(self, cost: CostProfile) -> None:
        least, own, most = map(msgspec.structs.astuple, (self.least, cost, self.most))
        if not all(map(le, least, own)):
            self.least = CostProfile(*map(min, least, own))
        if not all(map(le, own, most)):
            self.most = CostProfile(*map(max, most, own))

    def changed(self, worker: WorkerRecord) -> None:
        place = self._places.get(worker.worker_id)
        if place is not None:
            load, self.rows[place] = self.rows[place][0], self._row(worker)
            if self.rows[place][0] != load:
                del self.by_load[bisect_left(self.by_load, (load, place))]
                insort(self.by_load, (self.rows[place][0], place))

    def up_to(self, load: int) -> list[tuple[int, int]]:
        """Of `by_load`, those up to `load`."""
        return self.by_load[: bisect_right(self.by_load, (load, len(self.rows)))]

    def refitted(self, worker: WorkerRecord) -> None:
        self.changed(worker)
        self._include(worker.cost)
        self._changes += 1
        if self._changes > len(self.workers):  # the bounds only widen; so that they stay close
            self._bound_costs()


class LoadIndexes:
    """Of one cluster. `workers`: those that take orders, by id."""

    __slots__ = ("_links", "decode", "prefill", "suspected_until_ns")

    def __init__(
        self,
        workers: Iterable[WorkerRecord],
        stores: Iterable[StoreRecord],
        links: Mapping[str, Mapping[str, Link]],
    ) -> None:
        every = list(workers)
        self.prefill = LoadIndex[PrefillRow](
            [worker for worker in every if worker.role == "prefill"], prefill_row
        )
        self.decode = LoadIndex[DecodeRow](
            [worker for worker in every if worker.role == "decode"], decode_row
        )
        #: From then on no store agent is suspected.
        self.suspected_until_ns = max((store.suspected_until_ns for store in stores), default=0)

        #: Destination, source; the longest not measured first.
        self._links = {
            destination: dict(sorted(sources.items(), key=lambda one: one[1].measured_ns))
            for destination, sources in links.items()
        }

    def link_measured(self, destination: str, source: str, link: Link) -> None:
        links = self._links.setdefault(destination, {})
        links.pop(source, None)
        links[source] = link

    def links_measured(self, destination: str, now_ns: int) -> Mapping[str, Link]:
        """By source: what was measured so lately that it counts. `now_ns` never goes back."""
        links = self._links.get(destination)
        if links is None:
            return {}
        while links:
            source, link = next(iter(links.items()))
            if now_ns - link.measured_ns <= LINK_STALE_NS:
                break
            del links[source]
        return links

    def changed(self, worker: WorkerRecord) -> None:
        """Its load is another."""
        if worker.role == "prefill":
            self.prefill.changed(worker)
        else:
            self.decode.changed(worker)

    def refitted(self, worker: WorkerRecord) -> None:
        """Its cost is another."""
        if worker.role == "prefill":
            self.prefill.refitted(worker)
        else:
            self.decode.refitted(worker)


def queue_ns(worker: WorkerRecord, now_ns: int) -> int:
    """Predicted remaining time of all that a prefill worker has accepted."""
    if not worker.orders:
        return 0
    # The oldest order is the one that runs.
    head_ns = worker.orders[next(iter(worker.orders))]
    return worker.reserved_ns - min(head_ns, max(0, now_ns - worker.head_since_ns))


def prefill_row(worker: WorkerRecord) -> PrefillRow:
    free_ns = behind_ns = 0
    if worker.orders:
        free_ns = worker.head_since_ns + worker.reserved_ns
        behind_ns = worker.reserved_ns - worker.orders[next(iter(worker.orders))]
    return PrefillRow(free_ns, behind_ns, len(worker.orders))


def decode_row(worker: WorkerRecord) -> DecodeRow:
    sequences = len(worker.orders)
    blocks_free = NO_KV_BLOCKS
    if worker.block_bytes:
        blocks_free = worker.kv_blocks - worker.reserved_blocks if sequences < worker.batch_max else -1
    return DecodeRow(worker.cost.step_ns(sequences + 1, worker.context_tokens), blocks_free)


def _tokens_max(worker: WorkerRecord) -> int:
    if not worker.block_bytes:
        return worker.context_tokens_max
    return min(worker.context_tokens_max, worker.kv_blocks * worker.block_tokens)
