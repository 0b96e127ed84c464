"""A conductor's metrics: its place in the log, the cluster as it knows it, and how full the streams are.

All conductors know the same of the cluster, so a query takes the maximum of them, not the sum. Counts of requests are
since the log began. The streams are asked about at each scrape; without an answer of NATS their figures are absent.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError, StreamRefused
from halfmoon.bus.tasks import within
from halfmoon.bus.telemetry.metrics import STEP_S, Times, Values, counter, gauge, histogram
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.pool_needs import pool_needs
from halfmoon.conductor.core.state.records import splits_of
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.conductor.view.status import without_attention
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import CacheSplit, Decision, RejectReason
from halfmoon.schemas.events import EVENT_TYPES
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.roles import WORKER_ROLES

REFRESH_S = 1.0


class Tally:
    """Counts of a conductor's shell since it caught up: the past is not counted again."""

    def __init__(self) -> None:
        self.steps = Times(STEP_S)
        #: By kind; each is shown from the start, or Prometheus would not see its first one.
        self.events: Counter[str] = Counter({kind.__name__: 0 for kind in EVENT_TYPES})
        self.decisions: Counter[str] = Counter({kind.__name__: 0 for kind in get_args(Decision)})
        #: Digests of others that are not ours.
        self.digest_mismatches = 0

    def stepped(self, kind: str, step_ns: int, decisions: Sequence[Decision]) -> None:
        self.steps.observe(step_ns)
        self.events[kind] += 1
        for decision in decisions:
            self.decisions[type(decision).__name__] += 1


class _Stream(NamedTuple):
    messages: int
    bytes: int
    bytes_max: int


class ConductorMetrics(Collector):
    """The metrics of one shell. `refresh` before each `collect`."""

    def __init__(self, bus: Bus, core: Core, tally: Tally) -> None:
        self._bus = bus
        self._core = core
        self._tally = tally
        self._streams: dict[str, _Stream] = {}
        self._lag: int | None = None

    async def refresh(self) -> None:
        """Ask about the streams."""
        self._streams, self._lag = {}, None
        with contextlib.suppress(BusError, TimeoutError):
            await within(REFRESH_S, self._ask())

    async def _ask(self) -> None:
        for stream in subjects.STREAMS:
            with contextlib.suppress(StreamRefused):
                answer = await self._bus.jetstream.ask(f"STREAM.INFO.{stream}")
                state = answer["state"]
                self._streams[stream] = _Stream(
                    messages=state["messages"],
                    bytes=state["bytes"],
                    bytes_max=answer["config"]["max_bytes"],
                )
                if stream == subjects.EVENTS_STREAM:
                    self._lag = max(0, state["last_seq"] - self._core.seq)

    def collect(self) -> Iterable[Metric]:
        yield from self._log()
        yield from self._cluster()
        yield from self._requests()

    def _log(self) -> Iterable[Metric]:
        tally = self._tally
        known: Values = {} if self._lag is None else {(): self._lag}
        yield gauge(
            "halfmoon_log_position", "Sequence of the last event stepped over.", (), {(): self._core.seq}
        )
        yield gauge("halfmoon_log_lag_events", "Events in the log that were not stepped over yet.", (), known)
        yield histogram("halfmoon_step_seconds", "Stepping over one event.", (), {(): tally.steps})
        yield _kinds("halfmoon_events", "Events stepped over.", tally.events)
        yield _kinds("halfmoon_decisions", "Decisions made.", tally.decisions)
        differ = {(): tally.digest_mismatches}
        yield counter(
            "halfmoon_digest_mismatches", "Digests that other conductors have and we have not.", (), differ
        )
        for name, text, column in (
            ("halfmoon_stream_bytes", "Bytes in a stream.", "bytes"),
            ("halfmoon_stream_bytes_max", "Its limit; beyond it the oldest go.", "bytes_max"),
            ("halfmoon_stream_messages", "Messages in a stream.", "messages"),
        ):
            yield gauge(
                name, text, ("stream",), {(at,): getattr(it, column) for at, it in self._streams.items()}
            )

    def _cluster(self) -> Iterable[Metric]:
        state = self._core.state
        members: Counter[tuple[str, ...]] = Counter(
            {(role, "ready"): 0 for role in (*WORKER_ROLES, "store", "frontend")}
        )
        for worker in state.workers.values():
            members[worker.role, "draining" if worker.draining else "ready"] += 1
        for store in state.stores.values():
            members["store", "suspected" if store.suspected_until_ns > state.at_ns else "ready"] += 1
        members["frontend", "ready"] += len(state.frontends)
        yield gauge("halfmoon_members", "Processes that have joined.", ("role", "state"), members)
        suspected: Values = {(at,): it.suspected_until_ns > state.at_ns for at, it in state.stores.items()}
        yield gauge(
            "halfmoon_store_suspected", "1 while others cannot reach the node's store.", ("node",), suspected
        )
        yield from _kv_elsewhere(state)
        queues: Values = {
            (at,): queue_ns(it, state.at_ns) / SECOND_NS
            for at, it in state.workers.items()
            if it.prompts is not None
        }
        yield gauge(
            "halfmoon_predicted_queue_seconds",
            "Until a worker has computed all its prompts.",
            ("worker",),
            queues,
        )
        needs = pool_needs(state)
        wanted: Values = {(role,): need.wanted for role, need in needs.items()}
        yield gauge("halfmoon_wanted_workers", "Workers that the load asks for.", ("role",), wanted)
        load: Values = {(role,): need.permille / 1_000 for role, need in needs.items()}
        yield gauge("halfmoon_needed_workers", "The same, not rounded.", ("role",), load)
        changed: Values = {(): state.demand.changes}
        yield counter("halfmoon_role_changes", "Roles that changed by load.", (), changed)
        orders: Values = {(it.role, at): len(it.orders) for at, it in state.workers.items()}
        yield gauge("halfmoon_worker_orders", "Orders reserved on a worker.", ("role", "worker"), orders)
        yield gauge(
            "halfmoon_index_blocks", "Distinct blocks that some node holds.", (), {(): state.index.blocks}
        )
        policy = state.policy
        slo = {("ttft",): policy.ttft_slo_ns / SECOND_NS, ("tbt",): policy.tbt_slo_ns / SECOND_NS}
        yield gauge("halfmoon_policy_slo_seconds", "SLO of requests that name none.", ("slo",), slo)

    def _requests(self) -> Iterable[Metric]:
        state, counts = self._core.state, self._core.state.counters
        yield gauge(
            "halfmoon_requests_in_flight", "Requests accepted and not ended.", (), {(): len(state.requests)}
        )
        yield gauge("halfmoon_requests_parked", "Of these, without a place.", (), {(): len(state.parked)})
        outcomes = ("arrived", "placed", "finished", "failed", "cancelled")
        requests: Values = {(at,): getattr(counts, at) for at in outcomes}
        yield counter("halfmoon_cluster_requests", "What became of requests.", ("outcome",), requests)
        rejected: Values = {(reason,): counts.rejected.get(reason, 0) for reason in get_args(RejectReason)}
        yield counter("halfmoon_cluster_rejections", "Requests refused.", ("reason",), rejected)
        wasted = {(): counts.wasted_prefills}
        yield counter(
            "halfmoon_cluster_wasted_prefills", "Refused by a decode worker after prefill.", (), wasted
        )
        moves: Values = {("done",): counts.moves, ("refused",): counts.moves_refused}
        yield counter("halfmoon_cluster_kv_moves", "Moves of KV between decode workers.", ("result",), moves)
        yield counter("halfmoon_cluster_kv_moved_tokens", "Tokens that moved.", (), {(): counts.moved_tokens})
        yield counter("halfmoon_cluster_kv_moved_bytes", "Of their KV.", (), {(): counts.moved_bytes})
        yield counter("halfmoon_cluster_prompt_tokens", "Tokens of prompts.", (), {(): counts.prompt_tokens})
        cached = {("local",): counts.cached_local_tokens, ("fetched",): counts.cached_fetched_tokens}
        similar = (
            ("requests", "Prompts for part of which KV of a similar one stood in.", counts.similar_requests),
            ("tokens", "Tokens of those parts.", counts.similar_tokens),
            ("computed_tokens", "Computed of these prompts, over layers.", counts.similar_computed_tokens),
        )
        for name, text, value in similar:
            yield counter(f"halfmoon_cluster_similar_{name}", text, (), {(): value})
        yield counter("halfmoon_cluster_cached_tokens", "Of these, not computed.", ("source",), cached)


def _kinds(name: str, text: str, counts: Counter[str]) -> Metric:
    return counter(name, text, ("kind",), {(kind,): count for kind, count in counts.items()})


def _kv_elsewhere(state: State) -> Iterable[Metric]:
    """Workers that hold KV for others, and those whose KV others hold."""
    slow: Values = {
        (at,): slow_mark(state, it) is not None for at, it in state.workers.items() if it.holds is not None
    }
    yield gauge(
        "halfmoon_place_slow", "1 while who holds KV for others is avoided for new.", ("worker",), slow
    )
    groups: Values = {
        (at,): it.batch.groups_seen
        for at, it in state.workers.items()
        if it.batch is not None and it.batch.cache_elsewhere
    }
    yield gauge(
        "halfmoon_decode_groups", "Groups of a step that wait for attention in turn.", ("worker",), groups
    )
    nowhere: Values = {(worker_id,): bool(why) for worker_id, why in without_attention(state).items()}
    yield gauge(
        "halfmoon_no_attention",
        "1 while attention workers can hold no KV for a decode worker that keeps none.",
        ("worker",),
        nowhere,
    )
    splits = splits_of(state.orders.values()) if groups else {}
    yield gauge(
        "halfmoon_cache_splits",
        "Open requests, by how attention workers divide their KV.",
        ("split",),
        {(split,): splits.get(split, 0) for split in get_args(CacheSplit)} if groups else {},
    )
