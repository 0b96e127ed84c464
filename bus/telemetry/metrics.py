"""A process's metrics for Prometheus, and those that all processes have: identity, CPU, memory, bus.

Own names are `halfmoon_...`. A registry belongs to one process object, not to the module. Figures that change often are
plain integers (`Times`, counters of the parts themselves), read when Prometheus asks, so that they cost the hot path
next to nothing.
"""

from __future__ import annotations

import importlib.metadata
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from halfmoon.bus.connection import Bus
from halfmoon.schemas.numbers import SECOND_NS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Bounds of histograms, in seconds: of a request's stages; of tokens and steps; of the control plane's work.
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
INTERVAL_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
STEP_S = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1,
)

#: By the values of the labels, a tuple.
Values = Mapping[Any, float]


class Buckets:
    """A histogram of whole numbers for one thread, without a lock."""

    __slots__ = ("_bounds", "_names", "_sum", "_unit", "counts")

    def __init__(self, bounds: Sequence[float], *, unit: int = 1) -> None:
        """`bounds`: in Prometheus' unit, of which one is `unit` of what is observed."""
        self._unit = unit
        self._names = [str(float(bound)) for bound in bounds]
        self._bounds = [int(bound * unit) for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self._sum = 0

    def observe(self, number: int, times: int = 1) -> None:
        """`times`: so often."""
        self.counts[bisect_left(self._bounds, number)] += times
        self._sum += number * times

    @property
    def sum(self) -> float:
        """In Prometheus' unit."""
        return self._sum / self._unit

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each bound with how many were at most that."""
        return list(zip((*self._names, "+Inf"), accumulate(self.counts), strict=True))


class Times(Buckets):
    """A histogram of durations: ns are observed, and shown in seconds."""

    __slots__ = ()

    def __init__(self, bounds_s: Sequence[float]) -> None:
        super().__init__(bounds_s, unit=SECOND_NS)


def counter(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    """A family of counters; Prometheus' `_total` is added to the name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, text: str, labels: Sequence[str], values: Mapping[Any, Buckets]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, buckets in values.items():
        family.add_metric(key, buckets.buckets(), buckets.sum)
    return family


class ProcessMetrics(Collector):
    """The metrics of every process."""

    def __init__(self, bus: Bus, *, role: str, process_id: str, node_id: str = "") -> None:
        self._bus = bus
        self._me = (role, process_id, node_id, importlib.metadata.version("halfmoon"))

    def collect(self) -> Iterable[Metric]:
        bus = self._bus
        yield gauge("halfmoon_process_info", "Who this is.", ("role", "id", "node", "version"), {self._me: 1})
        stats = bus.nc.stats
        yield gauge("halfmoon_bus_connected", "1 while NATS is there.", (), {(): bus.nc.is_connected})
        yield gauge("halfmoon_bus_unacknowledged", "Messages not stored yet.", (), {(): bus.unacknowledged})
        waits = {(): bus.unstored_s}
        yield gauge("halfmoon_bus_unstored_seconds", "How long the oldest of them waits.", (), waits)
        yield counter(
            "halfmoon_bus_reconnects", "Times that NATS was lost and found.", (), {(): stats["reconnects"]}
        )
        yield counter(
            "halfmoon_bus_invalid_messages", "Messages that were dropped unread.", (), {(): bus.invalid}
        )
        moved = {("in",): stats["in_bytes"], ("out",): stats["out_bytes"]}
        yield counter("halfmoon_bus_bytes", "Payload over NATS.", ("direction",), moved)


def process_registry(bus: Bus, *, role: str, process_id: str, node_id: str = "") -> CollectorRegistry:
    """A registry with the metrics of every process."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    registry.register(ProcessMetrics(bus, role=role, process_id=process_id, node_id=node_id))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """All metrics of `registry` in Prometheus' text form."""
    return generate_latest(registry)
