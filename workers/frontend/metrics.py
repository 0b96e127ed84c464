"""Prometheus metrics of a frontend: requests as their clients see them.

Names that existing dashboards use are kept (`vllm:...`); what has no such name is `halfmoon_...`. Each name
is of one kind of process, so that a sum over a cluster counts nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from halfmoon.bus.telemetry.metrics import (
    INTERVAL_S,
    LATENCY_S,
    Buckets,
    Times,
    Values,
    counter,
    gauge,
    histogram,
)
from halfmoon.schemas.decisions import RejectReason
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.log_health import LogHealth
from halfmoon.workers.frontend.slo import ClusterSlo

if TYPE_CHECKING:
    from halfmoon.workers.frontend.open_request import OpenRequest

_TOKENS = tuple(2**power for power in range(0, 18))
_MODEL = ("model_name",)


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


class FrontendMetrics(Collector):
    """Metrics of a frontend's requests. Label `model_name` as dashboards expect it."""

    def __init__(
        self, model: str, requests: Mapping[str, OpenRequest], registry: CollectorRegistry | None = None
    ) -> None:
        """`requests`: those that are open, whenever it is asked."""
        self.registry = registry or CollectorRegistry(auto_describe=True)
        self._requests = requests
        self.slo = ClusterSlo()
        self.resumed = self.resends = 0
        self._model = (model,)
        self._prompt_tokens = self._generation_tokens = self._prefix_queries = self._prefix_hits = 0
        self._ttft, self._e2e, self._queue, self._prefill = (Times(LATENCY_S) for _ in range(4))
        self._decode, self._transfer, self._handover = (Times(LATENCY_S) for _ in range(3))
        self._interval = Times(INTERVAL_S)
        self._prompt_length, self._output_length = Buckets(_TOKENS), Buckets(_TOKENS)
        # Each is shown from the start, or Prometheus would not see its first one.
        self._success = Counter(dict.fromkeys(("stop", "length"), 0))
        self._rejections: Counter[str] = Counter(dict.fromkeys(get_args(RejectReason), 0))
        self._errors: Counter[int] = Counter(dict.fromkeys((400, 404, 413, 422, 429, 499, 500, 503), 0))
        self._slo_results = Counter(dict.fromkeys(("met", "ttft", "tbt", "failed"), 0))
        self.registry.register(self)  # which collects

    # --- what happens ---------------------------------------------------------------------------------------

    def count(self, request: OpenRequest, had: int, last_at_ns: int) -> None:
        """A delivery was taken in: before it there were `had` tokens, the last at `last_at_ns`."""
        fresh = len(request.output_ids) - had
        if not fresh:
            return
        self._generation_tokens += fresh
        if had:
            interval_ns = (request.last_at_ns - last_at_ns) // fresh
            self._interval.observe(interval_ns, fresh)
            request.intervals_ns += [interval_ns] * fresh
            return
        ttft_ns, prompt_tokens = request.first_at_ns - request.arrived_at_ns, request.arrived.prompt_tokens
        self._ttft.observe(ttft_ns)
        self._prompt_tokens += prompt_tokens
        self._prompt_length.observe(prompt_tokens)
        if (timing := request.timing) is not None:
            self._prefix_queries += prompt_tokens
            self._prefix_hits += timing.cached_tokens
            self._queue.observe(timing.queue_ns)
            self._transfer.observe(timing.transfer_ns)
            self._prefill.observe(timing.prefill_ns)
            known_ns = timing.queue_ns + timing.prefill_ns  # fetching overlaps both
            self._handover.observe(max(0, ttft_ns - known_ns))

    def finish(self, request: OpenRequest) -> None:
        """The last piece went out."""
        self._success[request.finish_reason] += 1
        self._output_length.observe(len(request.output_ids))
        self._e2e.observe(request.last_at_ns - request.arrived_at_ns)
        self._decode.observe(request.last_at_ns - request.first_at_ns)
        result = self.slo.judge(
            request.first_at_ns - request.arrived_at_ns,
            request.intervals_ns,
            ttft_slo_ns=request.arrived.ttft_slo_ns,
            tbt_slo_ns=request.arrived.tbt_slo_ns,
        )
        if result:
            self._slo_results[result] += 1

    def rejected(self, reason: str) -> None:
        self._rejections[reason] += 1

    def failed(self, status: int, *, accepted: bool = False) -> None:
        """A request was answered with an error. One of ours, after it was `accepted`, counts against the SLO."""
        self._errors[status] += 1
        if accepted and status >= 500:
            self._slo_results["failed"] += 1

    # --- figures --------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        model = self._model
        running = sum(request.first_at_ns > 0 for request in self._requests.values())
        for name, text, number in (
            ("vllm:num_requests_running", "Requests that have their first token.", running),
            ("vllm:num_requests_waiting", "Requests without a first token.", len(self._requests) - running),
        ):
            yield gauge(name, text, _MODEL, {model: number})
        for name, text, number in (
            ("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.", self._prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self._generation_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the KVCache.", self._prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the KVCache.", self._prefix_hits),
            ("halfmoon_requests_resumed", "Requests taken by a second decode worker.", self.resumed),
            ("halfmoon_token_resends", "Times that missing tokens were asked for.", self.resends),
        ):
            yield counter(name, text, _MODEL, {model: number})
        for name, text, buckets in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", self._ttft),
            ("vllm:inter_token_latency_seconds", "Between tokens.", self._interval),
            ("vllm:e2e_request_latency_seconds", "From arrival to the last token.", self._e2e),
            ("vllm:request_queue_time_seconds", "In the prefill worker's queue.", self._queue),
            ("vllm:request_prefill_time_seconds", "Computing prefill.", self._prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", self._decode),
            ("halfmoon_request_transfer_seconds", "Fetching KVCache before prefill.", self._transfer),
            ("halfmoon_request_handover_seconds", "What else the first token took.", self._handover),
            ("vllm:request_prompt_tokens", "Prompt tokens a request.", self._prompt_length),
            ("vllm:request_generation_tokens", "Tokens generated a request.", self._output_length),
        ):
            yield histogram(name, text, _MODEL, {model: buckets})
        for name, text, label, counts in (
            ("vllm:request_success", "Finished requests.", "finished_reason", self._success),
            ("vllm:admission_rejections", "Requests refused early.", "reason", self._rejections),
            ("halfmoon_slo_requests", "Accepted requests, by SLO.", "result", self._slo_results),
        ):
            yield counter(name, text, (*_MODEL, label), {(*model, key): many for key, many in counts.items()})
        errors: Values = {(str(status),): many for status, many in self._errors.items()}
        yield counter("halfmoon_request_errors", "Requests answered with an error.", ("status",), errors)
