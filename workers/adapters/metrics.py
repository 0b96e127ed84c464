"""Metrics that only an adapter has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from halfmoon.bus.telemetry.metrics import counter, gauge
from halfmoon.workers.adapters.mirror import EngineMirror
from halfmoon.workers.adapters.state import AdapterState


class AdapterMetrics(Collector):
    """Counts of an engine's KV events, of our blocks in them, and of prompts that another engine computed."""

    def __init__(self, mirror: EngineMirror, state: AdapterState) -> None:
        self._mirror, self._state = mirror, state

    def collect(self) -> Iterable[Metric]:
        counts, passed = self._mirror.reader.counts, self._mirror.blocks.passed_over
        told: dict[Any, float] = {(what,): count for what, count in sorted(counts.items())}
        yield counter("halfmoon_engine_events", "Batches of the engine's KV events.", ("what",), told)
        over: dict[Any, float] = {(why,): count for why, count in sorted(passed.items())}
        yield counter(
            "halfmoon_engine_blocks_passed_over", "Its blocks that are not told of.", ("why",), over
        )
        blocks = len(self._mirror.keys())
        yield gauge(
            "halfmoon_engine_blocks", "Blocks of the cluster's in the engine's cache.", (), {(): blocks}
        )
        yield counter(
            "halfmoon_engine_prompts_recomputed",
            "Prompts that it computed because it could not have their KV from the engine that had.",
            (),
            {(): self._state.prompts_recomputed},
        )
        yield counter(
            "halfmoon_engine_prompts_overlapped",
            "Prompts whose KV it was asked to get while another engine computed them.",
            (),
            {(): self._state.prompts_overlapped},
        )
