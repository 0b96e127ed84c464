"""Load indexes: one row per worker that takes orders, with the inputs of a choice.

In a large pool most of a decision's time would go into reading the workers themselves. A row is a tuple, made again
when its worker's load or cost changes. Rows are also kept in the order of load, so that a choice looks at the least
loaded first and passes over all that cannot be better. They follow from the state and are in no snapshot: they are made
when first needed, and again when a process joins, drains or leaves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from operator import le
from typing import Generic, NamedTuple, TypeVar

import msgspec

from halfmoon.conductor.core.state.cost import LINK_STALE_NS, Link
from halfmoon.conductor.core.state.records import StoreRecord, WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.types import Blocks

#: KV blocks that are free where there is no KV.
NO_KV_BLOCKS = 2**62


class PrefillRow(NamedTuple):
    """A prefill worker's queue: at a time t it is `free_ns` - t, and at least `behind_ns`."""

    free_ns: int
    #: Reserved time behind the first order.
    behind_ns: int
    orders: int


class DecodeRow(NamedTuple):
    """A decode worker's next step, and its room."""

    #: A step with one more sequence, without that one's context.
    step_ns: int
    #: KV blocks for one more request; -1: the batch is full.
    blocks_free: int


class MixedRow(NamedTuple):
    """The queue and the room of a worker that does both. As `PrefillRow`; and `orders` are of both halves."""

    free_ns: int
    behind_ns: int
    orders: int
    blocks_free: int


Row = TypeVar("Row", PrefillRow, DecodeRow, MixedRow)


class LoadIndex(Generic[Row]):
    """Workers that do the same, in the order of their ids, and their rows at the same places."""

    __slots__ = (
        "_changes",
        "_places",
        "_prompts",
        "_row",
        "block_tokens",
        "busy",
        "by_load",
        "least",
        "most",
        "on_node",
        "prompts",
        "rows",
        "tokens_max",
        "workers",
    )

    def __init__(
        self,
        workers: list[WorkerRecord],
        row: Callable[[WorkerRecord], Row],
        pool_tokens: Callable[[WorkerRecord], int],
    ) -> None:
        self._row: Callable[[WorkerRecord], Row] = row
        self._places = {worker.worker_id: place for place, worker in enumerate(workers)}
        self.workers = workers
        self.rows: list[Row] = [row(worker) for worker in workers]
        self._prompts = [_prompts(worker) for worker in workers]
        #: Prompts that the workers have accepted and not computed.
        self.prompts = sum(self._prompts)
        #: Workers that have any.
        self.busy = sum(count > 0 for count in self._prompts)
        #: (load, place), least loaded first; the load is the first part of a row.
        self.by_load = sorted((one[0], place) for place, one in enumerate(self.rows))
        #: Places by node.
        self.on_node: dict[str, list[int]] = {}
        for place, worker in enumerate(workers):
            self.on_node.setdefault(worker.node_id, []).append(place)
        #: Tokens of a request that every worker takes; -1: the workers are not alike.
        self.tokens_max = min(
            (min(tokens_max(worker), pool_tokens(worker)) for worker in workers), default=-1
        )
        # Where KV lies elsewhere, that there is room is to be seen elsewhere.
        if any(worker.layout != workers[0].layout or worker.cache_elsewhere for worker in workers):
            self.tokens_max = -1
        #: Tokens of a block that may be cached; 0: there is no KV.
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
        if place is None:
            return
        before, prompts = self._prompts[place], _prompts(worker)
        if prompts != before:
            self.prompts += prompts - before
            self.busy += (prompts > 0) - (before > 0)
            self._prompts[place] = prompts
        load, row = self.rows[place][0], self._row(worker)
        self.rows[place] = row
        if row[0] != load:
            del self.by_load[bisect_left(self.by_load, (load, place))]
            insort(self.by_load, (row[0], place))

    def places(self, worker_ids: Iterable[str]) -> list[int]:
        """Places of those of the workers that are here."""
        return [self._places[worker_id] for worker_id in worker_ids if worker_id in self._places]

    def up_to(self, load: int) -> list[tuple[int, int]]:
        """The part of `by_load` whose load is at most `load`."""
        return self.by_load[: bisect_right(self.by_load, (load, len(self.rows)))]

    def refitted(self, worker: WorkerRecord) -> None:
        self.changed(worker)
        self._include(worker.cost)
        self._changes += 1
        # Including a cost only widens the bounds: computed again now and then, they stay close.
        if self._changes > len(self.workers):
            self._bound_costs()


class LoadIndexes:
    """The load indexes of a cluster, by duty, of the `workers` that take orders (in the order of ids)."""

    __slots__ = (
        "_links",
        "attention",
        "decode",
        "lenders",
        "mixed",
        "on_host",
        "pool_blocks",
        "prefill",
        "prefills_answer",
        "priced",
        "suspected_until_ns",
    )

    def __init__(
        self,
        workers: Iterable[WorkerRecord],
        stores: Iterable[StoreRecord],
        links: Mapping[str, Mapping[str, Link]],
        pool_tokens: Callable[[WorkerRecord], int],
    ) -> None:
        prefill: list[WorkerRecord] = []
        decode: list[WorkerRecord] = []
        mixed: list[WorkerRecord] = []
        attention: list[WorkerRecord] = []
        for worker in workers:
            if worker.prompts is not None:
                (prefill if worker.batch is None else mixed).append(worker)
            elif worker.batch is not None:
                decode.append(worker)
            elif worker.holds is not None:
                attention.append(worker)
        #: Workers that only compute prompts, only decode, do both, or hold KV for others and do neither.
        self.prefill = LoadIndex[PrefillRow](prefill, prefill_row, pool_tokens)
        self.decode = LoadIndex[DecodeRow](decode, decode_row, pool_tokens)
        self.mixed = LoadIndex[MixedRow](mixed, mixed_row, pool_tokens)
        self.attention = LoadIndex[DecodeRow](attention, decode_row, pool_tokens)
        stores = list(stores)
        #: Of all nodes' pools.
        self.pool_blocks: Blocks = sum(store.slots for store in stores)
        #: No store agent is suspected at or after this time.
        self.suspected_until_ns = max((store.suspected_until_ns for store in stores), default=0)
        #: How many decode workers lend.
        self.lenders = sum(one.lends and one.layout.segment_tokens > 0 for one in self.decode.workers)
        #: Each prefill worker answers requests of one token, and there is one.
        self.prefills_answer = bool(prefill) and all(one.prompts and one.prompts.answers for one in prefill)
        #: Some decode worker's step may wait for attention elsewhere, by its price.
        self.priced = any(one.priced for one in self.decode.workers)

        #: All workers of a host, those too that take no orders.
        self.on_host: dict[str, list[WorkerRecord]] = {}
        #: By destination and source; the one measured longest ago first.
        self._links = {
            destination: dict(sorted(sources.items(), key=lambda one: one[1].measured_ns))
            for destination, sources in links.items()
        }

    def prompts_permille(self) -> int:
        """Prompts in hand of a worker that computes some, in the mean, times a thousand."""
        return (
            1_000
            * (self.prefill.prompts + self.mixed.prompts)
            // max(1, len(self.prefill.workers) + len(self.mixed.workers))
        )

    def link_measured(self, destination: str, source: str, link: Link) -> None:
        links = self._links.setdefault(destination, {})
        links.pop(source, None)
        links[source] = link

    def links_measured(self, destination: str, now_ns: int) -> Mapping[str, Link]:
        """Links to `destination` whose measurement still counts, by source. `now_ns` never goes back."""
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
        """Call after the worker's load has changed."""
        self._index_of(worker).changed(worker)

    def refitted(self, worker: WorkerRecord) -> None:
        """Call after the worker's cost has changed."""
        self._index_of(worker).refitted(worker)

    def _index_of(
        self, worker: WorkerRecord
    ) -> LoadIndex[PrefillRow] | LoadIndex[DecodeRow] | LoadIndex[MixedRow]:
        if worker.prompts is not None:
            return self.prefill if worker.batch is None else self.mixed
        return self.decode if worker.batch is not None else self.attention


def _prompts(worker: WorkerRecord) -> int:
    return len(worker.prompts.orders) if worker.prompts is not None else 0


def queue_ns(worker: WorkerRecord, now_ns: int) -> int:
    """Predicted remaining time of all prompts that a worker has accepted."""
    duty = worker.prompts
    if duty is None or not duty.orders:
        return 0
    # The first order is the one that runs.
    head_ns = duty.orders[next(iter(duty.orders))]
    return duty.reserved_ns - min(head_ns, max(0, now_ns - duty.head_since_ns))


def prefill_row(worker: WorkerRecord) -> PrefillRow:
    duty = worker.prompts
    if duty is None or not duty.orders:
        return PrefillRow(0, 0, 0)
    head_ns = duty.orders[next(iter(duty.orders))]
    return PrefillRow(duty.head_since_ns + duty.reserved_ns, duty.reserved_ns - head_ns, len(duty.orders))


def decode_row(worker: WorkerRecord) -> DecodeRow:
    step_ns = worker.cost.step_ns(len(worker.orders) + 1, worker.context_tokens)
    return DecodeRow(step_ns, blocks_free(worker))


def mixed_row(worker: WorkerRecord) -> MixedRow:
    free_ns, behind_ns, _ = prefill_row(worker)
    return MixedRow(free_ns, behind_ns, len(worker.orders), blocks_free(worker))


def blocks_free(worker: WorkerRecord) -> int:
    """KV blocks for one more request; -1: the batch is full."""
    free = worker.kv_blocks - worker.reserved_blocks if len(worker.orders) < worker.batch_max else -1
    return free if worker.block_bytes else NO_KV_BLOCKS


def tokens_max(worker: WorkerRecord) -> int:
    """Tokens of the longest request (prefill: prompt) that the worker itself could take, were it empty."""
    if not worker.block_bytes or worker.cache_elsewhere:
        return worker.context_tokens_max
    if worker.prompts is not None and worker.prompts.tokens_max:
        # The rest of the prompt is in the pool of its node.
        return min(worker.context_tokens_max, worker.prompts.tokens_max)
    return min(worker.context_tokens_max, worker.kv_blocks * worker.block_tokens)
