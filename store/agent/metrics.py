"""A store agent's metrics: use of each tier, bytes moved by each transport, failures by their codes.

Read from the agent's own counts at each scrape. Only reads and writes that this agent began are counted
here, so that the sum over all agents counts each transfer once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from halfmoon.bus.telemetry.metrics import Values, counter, gauge, histogram
from halfmoon.store.agent.context import AgentContext
from halfmoon.store.errors import (
    BytesCorrupted,
    HolderUnreachable,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from halfmoon.store.pool.slots import Change
from halfmoon.store.transports.engine import TransferStats

#: Codes of a failed move; each is shown from the start, or Prometheus would not see its first failure.
FAILURES = (TransferError, HolderUnreachable, TransferRefused, TransferTimeout, BytesCorrupted)

KINDS = ("stored", "evicted")
#: Prefixes of the agent's counters that are families of their own: name, text, label.
FAMILIES = {
    "failed_": ("halfmoon_store_peer_failures", "Peers that could not be read or written.", "code"),
    "answered_": ("halfmoon_store_refusals", "Requests that were answered with an error.", "code"),
    "refused_": (
        "halfmoon_store_connections_refused",
        "What came over the data plane and was not let in.",
        "reason",
    ),
    "retried_": ("halfmoon_transfer_retries", "Slices that failed and went over another path.", "transport"),
}


class StoreMetrics(Collector):
    """The collector of one agent. Call `follow` before the agent starts, so that no change is missed."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        tiers = ("dram", context.tier.name) if context.tier is not None else ("dram",)
        self._changes: Counter[tuple[str, str]] = Counter({(at, kind): 0 for at in tiers for kind in KINDS})

    def follow(self) -> None:
        self._context.announcer.listeners.append(self._count)

    def _count(self, changes: list[Change]) -> None:
        for change in changes:
            self._changes[change.tier, change.kind] += 1

    def collect(self) -> Iterable[Metric]:
        yield from self._cache()
        yield from self._transfers()
        yield from self._events()

    def _cache(self) -> Iterable[Metric]:
        context = self._context
        counts, tier = context.guard.counts(), context.tier
        block_bytes = context.config.layout.block_bytes
        used: dict[tuple[str, ...], float] = {("dram",): counts.slots - counts.free}
        room: dict[tuple[str, ...], float] = {("dram",): counts.slots}
        if tier is not None:
            used[tier.name,], room[tier.name,] = len(tier), tier.records
        yield gauge("halfmoon_cache_blocks", "Blocks in use, by tier.", ("tier",), used)
        yield gauge("halfmoon_cache_blocks_max", "Blocks that there is room for.", ("tier",), room)
        yield gauge("halfmoon_cache_block_bytes", "Size of a block.", (), {(): block_bytes})
        states: Values = {(at,): getattr(counts, at) for at in ("free", "reserved", "committed", "condemned")}
        yield gauge("halfmoon_store_slots", "Slots of the pool by state.", ("state",), states)
        yield gauge(
            "halfmoon_store_slots_leased", "Committed slots that somebody reads.", (), {(): counts.leased}
        )
        yield gauge("halfmoon_store_holds", "Leases and reservations of orders.", (), {(): counts.holds})
        yield gauge("halfmoon_store_pushes_open", "Pushes under way.", (), {(): context.orders.pushes_open()})
        for kind in KINDS:
            changed: Values = {(at,): count for (at, what), count in self._changes.items() if what == kind}
            yield counter(f"halfmoon_cache_{kind}_blocks", f"Blocks that were {kind}.", ("tier",), changed)

    def _transfers(self) -> Iterable[Metric]:
        moved = self._context.transports.stats
        way = ("transport", "direction")

        def each(read: Callable[[TransferStats], float]) -> Values:
            return {key: read(it) for key, it in moved.items()}

        yield counter("halfmoon_transfer_bytes", "Bytes of KVCache moved.", way, each(lambda it: it.bytes))
        count = each(lambda it: it.descriptors)
        yield counter("halfmoon_transfer_descriptors", "Contiguous runs of bytes moved.", way, count)
        times = {key: it.times for key, it in moved.items()}
        yield histogram("halfmoon_transfer_seconds", "One move over one path.", way, times)
        failures = {
            (*key, kind.code): it.failures[kind.code] for key, it in moved.items() for kind in FAILURES
        }
        yield counter(
            "halfmoon_transfer_failures", "Moves over one path that failed.", (*way, "code"), failures
        )
        ssd: Mapping[str, int] = self._context.counters
        file = {("read",): ssd["ssd_read_bytes"], ("write",): ssd["ssd_written_bytes"]}
        yield counter(
            "halfmoon_ssd_bytes", "Bytes of KVCache to and from the SSD tier.", ("direction",), file
        )

    def _events(self) -> Iterable[Metric]:
        found: dict[str, dict[tuple[str, ...], float]] = {prefix: {} for prefix in FAMILIES}
        others: dict[tuple[str, ...], float] = {}
        for name, count in dict(self._context.counters).items():
            prefix = next((each for each in FAMILIES if name.startswith(each)), "")
            if prefix:
                found[prefix][name.removeprefix(prefix),] = count
            elif not name.endswith("_bytes"):
                others[name,] = count
        for prefix, values in found.items():
            name, text, label = FAMILIES[prefix]
            yield counter(name, text, (label,), values)
        yield counter(
            "halfmoon_store_events", "What else happened, by the agent's own names.", ("event",), others
        )
