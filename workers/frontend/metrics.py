"""Prometheus metrics of a frontend: requests as their clients see them.

Names that existing dashboards use are kept (`vllm:...`); what has no such name is `halfmoon_...`. Each name
is of one kind of process, so that a sum over a cluster counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from halfmoon.bus.telemetry.metrics import INTERVAL_S, LATENCY_S, Values, gauge
from halfmoon.schemas.decisions import RejectReason
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.log_health import LogHealth
from halfmoon.workers.frontend.slo import ClusterSlo

if TYPE_CHECKING:
    from halfmoon.workers.frontend.open_request import OpenRequest

_TOKENS = tuple(2**power for power in range(0, 18))


class LogDisk(Collector):
    """The disk of the event log, where the frontend sees it."""

    def __init__(self, health: LogHealth, config: FrontendConfig) -> None:
        self._health = health
        self._config = config

    def collect(self) -> Iterable[Metric]:
        free = self._health.free_bytes
        free_values: Values = {} if free is None else {(): free}
        least_values: Values = {} if free is None else {(): self._config.log_free_mib_min << 20}
        yield gauge("halfmoon_log_disk_free_bytes", "Free where the event log is.", (), free_values)
        least = "With less than this new requests are refused."
        yield gauge("halfmoon_log_disk_free_bytes_min", least, (), least_values)


class FrontendMetrics:
    """Metrics of a frontend's requests. Label `model_name` as dashboards expect it."""

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry(auto_describe=True)
        self.slo = ClusterSlo()
        self._model = model
        self.running = self._gauge("vllm:num_requests_running", "Requests that have their first token.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests without a first token.")
        self.ttft = self._seconds("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.interval = self._seconds("vllm:inter_token_latency_seconds", "Between tokens.", INTERVAL_S)
        self.e2e = self._seconds("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = self._seconds("vllm:request_queue_time_seconds", "In the prefill worker's queue.")
        self.prefill = self._seconds("vllm:request_prefill_time_seconds", "Computing prefill.")
        self.decode = self._seconds("vllm:request_decode_time_seconds", "From the first token to the last.")
        self.transfer = self._seconds("halfmoon_request_transfer_seconds", "Fetching KVCache before prefill.")
        self.handover = self._seconds("halfmoon_request_handover_seconds", "What else the first token took.")
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that got a first token."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the KVCache."
        )
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the KVCache.")
        self.prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens a request.", _TOKENS
        )
        self.output_length = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated a request.", _TOKENS
        )
        self._success = Counter(
            "vllm:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused early.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._errors = Counter(
            "halfmoon_request_errors", "Requests answered with an error.", ["status"], registry=self.registry
        )
        self._slo_results = Counter(
            "halfmoon_slo_requests",
            "Accepted requests, by SLO.",
            ["model_name", "result"],
            registry=self.registry,
        )
        # Each is shown from the start, or Prometheus would not see its first one.
        for metric, values in (
            (self._success, ("stop", "length")),
            (self._rejections, get_args(RejectReason)),
            (self._slo_results, ("met", "ttft", "tbt", "failed")),
        ):
            for value in values:
                metric.labels(model, value)
        for status in (400, 404, 413, 422, 429, 499, 500, 503):
            self._errors.labels(str(status))
        self.resumed = self._counter("halfmoon_requests_resumed", "Requests taken by a second decode worker.")
        self.resends = self._counter("halfmoon_token_resends", "Times that missing tokens were asked for.")

    def count(self, request: OpenRequest, had: int, last_at_ns: int) -> None:
        """A delivery was taken in: before it there were `had` tokens, the last at `last_at_ns`."""
        fresh = len(request.output_ids) - had
        if not fresh:
            return
        self.generation_tokens.inc(fresh)
        if had:
            interval_ns = (request.last_at_ns - last_at_ns) // fresh
            for _ in range(fresh):
                self.interval.observe(interval_ns / SECOND_NS)
                request.intervals_ns.append(interval_ns)
            return
        self.ttft.observe((request.first_at_ns - request.arrived_at_ns) / SECOND_NS)
        self.prompt_tokens.inc(request.arrived.prompt_tokens)
        self.prompt_length.observe(request.arrived.prompt_tokens)
        if (timing := request.timing) is not None:
            self.prefix_queries.inc(request.arrived.prompt_tokens)
            self.prefix_hits.inc(timing.cached_tokens)
            self.queue.observe(timing.queue_ns / SECOND_NS)
            self.transfer.observe(timing.transfer_ns / SECOND_NS)
            self.prefill.observe(timing.prefill_ns / SECOND_NS)
            known_ns = timing.queue_ns + timing.prefill_ns  # fetching overlaps both
            self.handover.observe(max(0, request.first_at_ns - request.arrived_at_ns - known_ns) / SECOND_NS)

    def finish(self, request: OpenRequest) -> None:
        """The last piece went out."""
        self._success.labels(self._model, request.finish_reason).inc()
        self.output_length.observe(len(request.output_ids))
        self.e2e.observe((request.last_at_ns - request.arrived_at_ns) / SECOND_NS)
        self.decode.observe((request.last_at_ns - request.first_at_ns) / SECOND_NS)
        result = self.slo.judge(
            request.first_at_ns - request.arrived_at_ns,
            request.intervals_ns,
            ttft_slo_ns=request.arrived.ttft_slo_ns,
            tbt_slo_ns=request.arrived.tbt_slo_ns,
        )
        if result:
            self._slo_results.labels(self._model, result).inc()

    def show_open(self, requests: Iterable[OpenRequest]) -> None:
        running = waiting = 0
        for request in requests:
            if request.first_at_ns:
                running += 1
            else:
                waiting += 1
        self.running.set(running)
        self.waiting.set(waiting)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._model, reason).inc()

    def failed(self, status: int, *, accepted: bool = False) -> None:
        """A request was answered with an error. One of ours, after it was `accepted`, counts against the SLO."""
        self._errors.labels(str(status)).inc()
        if accepted and status >= 500:
            self._slo_results.labels(self._model, "failed").inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_S) -> Histogram:
        return self._histogram(name, text, buckets)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(
            self._model
        )
