"""Prometheus metrics: the frontend's, and how any process shows its own.

Names that existing dashboards use are kept (`vllm:...`); what has no such name is `halfmoon_...`. A registry belongs to
one process object, not to the module, so that two frontends in one process do not share counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from halfmoon.workers.open_request import OpenRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_INTERVAL_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = tuple(2**power for power in range(0, 18))

SECOND_NS = 1_000_000_000


def exposition(registry: CollectorRegistry) -> bytes:
    """All metrics of `registry` in Prometheus' text form."""
    return generate_latest(registry)


async def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> web.AppRunner:
    """`/metrics` of a process that has no HTTP server of its own; `await runner.cleanup()` ends it. Raises OSError."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=exposition(registry), headers={"content-type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", show)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


class FrontendMetrics:
    """What a frontend sees of its requests. Label `model_name` as dashboards expect it."""

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry(auto_describe=True)
        self._model = model
        self.running = self._gauge("vllm:num_requests_running", "Requests that have their first token.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests without a first token.")
        self.ttft = self._seconds("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.interval = self._seconds("vllm:inter_token_latency_seconds", "Between tokens.", _INTERVAL_S)
        self.e2e = self._seconds("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = self._seconds("vllm:request_queue_time_seconds", "In the prefill worker's queue.")
        self.prefill = self._seconds("vllm:request_prefill_time_seconds", "Computing prefill.")
        self.decode = self._seconds("vllm:request_decode_time_seconds", "From the first token to the last.")
        self.transfer = self._seconds("halfmoon_request_transfer_seconds", "Fetching KVCache before prefill.")
        self.decode_wait = self._seconds("halfmoon_request_decode_wait_seconds", "From prefill to decode.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the KVCache.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the KVCache.")
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self.output_length = self._histogram("vllm:request_generation_tokens", "Tokens generated a request.", _TOKENS)
        self._success = Counter(
            "vllm:request_success", "Finished requests.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused early.", ["model_name", "reason"], registry=self.registry
        )
        self._errors = Counter(
            "halfmoon_request_errors", "Requests answered with an error.", ["status"], registry=self.registry
        )
        self.resumed = self._counter("halfmoon_requests_resumed", "Requests taken by a second decode worker.")
        self.resends = self._counter("halfmoon_token_resends", "Times that missing tokens were asked for.")

    def count(self, request: OpenRequest, had: int, last_at_ns: int) -> None:
        """A delivery was taken in: before it there were `had` tokens, the last at `last_at_ns`."""
        fresh = len(request.output_ids) - had
        if not fresh:
            return
        self.generation_tokens.inc(fresh)
        if had:
            self.interval.observe((request.last_at_ns - last_at_ns) / fresh / SECOND_NS)
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
            self.decode_wait.observe(timing.decode_wait_ns / SECOND_NS)

    def finish(self, request: OpenRequest) -> None:
        """The last piece went out."""
        self._success.labels(self._model, request.finish_reason).inc()
        self.output_length.observe(len(request.output_ids))
        self.e2e.observe((request.last_at_ns - request.arrived_at_ns) / SECOND_NS)
        self.decode.observe((request.last_at_ns - request.first_at_ns) / SECOND_NS)

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

    def failed(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
        return self._histogram(name, text, buckets)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(self._model)
