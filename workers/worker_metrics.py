"""Metrics of a worker: its answers to orders, its steps, its own cache.

Each worker measures the parts of a request that it sees. The prefill worker: queue, fetch, compute and push. The
decode worker: waiting for KV, waiting for room in the batch, and the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, Protocol, assert_never

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from halfmoon.bus.telemetry.metrics import INTERVAL_S, LATENCY_S, Times, Values, counter, gauge, histogram
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    PrefillFailed,
    PrefillFinished,
    RequestFinished,
)
from halfmoon.schemas.roles import ROLES, WorkerRole

#: Where cached tokens of a prompt come from. A worker's own paged cache keeps nothing for the next request:
#: of "device" there are none.
SOURCES = ("device", "host", "p2p", "disk")


class MeasuredWorker(Protocol):
    """The part of a worker that is read when metrics are shown."""

    role: WorkerRole

    def orders_open(self) -> int:
        """Orders not yet answered."""

    def kv_blocks_used(self) -> int:
        """Blocks of its own paged cache in use."""


class WorkerMetrics(Collector):
    """Counts of one worker. Every event that the worker reports goes to `saw`."""

    def __init__(self, worker: MeasuredWorker, *, node_id: str, model: str, kv_blocks: int) -> None:
        self._worker = worker
        self._node_id, self._model, self._kv_blocks = node_id, model, kv_blocks
        #: A request's end is its order's; else the end of the prompt is, though a first token may be a whole answer.
        self._answers = "batch" in ROLES[worker.role].duties
        self._ends: Counter[str] = Counter({"finished": 0, "failed": 0, "refused": 0})
        self._cached: Counter[str] = Counter(dict.fromkeys(SOURCES, 0))
        self._preemptions = 0
        # Prefill.
        self._queue, self._fetch, self._compute, self._push = (Times(LATENCY_S) for _ in range(4))
        # Decode.
        self._kv_wait, self._room_wait, self._first_step = (Times(LATENCY_S) for _ in range(3))
        self._steps = Times(INTERVAL_S)
        self._step_sequences = self._step_context_tokens = 0

    # --- events ---------------------------------------------------------------------------------------------

    def saw(self, event: Any) -> None:
        """An answer to an order goes out."""
        match event:
            case PrefillFinished():
                self._ends["finished"] += not self._answers
                self._queue.observe(event.queue_ns)
                self._compute.observe(event.compute_ns)
                self._push.observe(event.push_ns)
                self._cached["host"] += event.cached_local_tokens
                if event.cached_fetched_tokens:
                    own = event.fetch_node_id == self._node_id
                    self._cached["disk" if own else "p2p"] += event.cached_fetched_tokens
                    self._fetch.observe(event.fetch_ns)
            case DecodeStarted():
                self._kv_wait.observe(event.wait_ns)
            case RequestFinished():
                self._ends["finished"] += self._answers
                self._preemptions += event.preemptions
            case PrefillFailed() | DecodeFailed():
                self._ends["failed"] += 1
            case DecodeRefused():
                self._ends["refused"] += 1
            case _:
                pass  # joins and heartbeats

    def waited(self, name: Literal["room_wait", "first_step"], elapsed_ns: int) -> None:
        """A sequence joined the batch after waiting for room, or made its first step after joining."""
        match name:
            case "room_wait":
                self._room_wait.observe(elapsed_ns)
            case "first_step":
                self._first_step.observe(elapsed_ns)
            case _:
                assert_never(name)

    def stepped(self, step_ns: int, sequences: int, context_tokens: int) -> None:
        """One decode step was made."""
        self._steps.observe(step_ns)
        self._step_sequences += sequences
        self._step_context_tokens += context_tokens

    # --- figures --------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        worker = self._worker
        model = (self._model,)
        ends: Values = {(end,): count for end, count in self._ends.items()}
        yield counter("halfmoon_orders", "Orders answered, by how they ended.", ("result",), ends)
        yield gauge("halfmoon_orders_open", "Orders taken and not answered.", (), {(): worker.orders_open()})
        blocks, used = self._kv_blocks, worker.kv_blocks_used()
        yield gauge(
            "halfmoon_kv_cache_blocks", "Blocks of the worker's own paged cache in use.", (), {(): used}
        )
        yield gauge("halfmoon_kv_cache_blocks_max", "Blocks of that cache.", (), {(): blocks})
        yield gauge(
            "vllm:kv_cache_usage_perc",
            "Share of that cache in use, 0 to 1.",
            ("model_name",),
            {model: used / blocks},
        )
        duties = ROLES[worker.role].duties
        if "prompts" in duties:
            yield from self._prefill(model)
        if "batch" in duties:
            yield from self._decode(model)

    def _prefill(self, model: tuple[str]) -> Iterable[Metric]:
        cached = {(*model, source): count for source, count in self._cached.items()}
        yield counter(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens not computed.",
            ("model_name", "source"),
            cached,
        )
        for name, text, times in (
            ("halfmoon_prefill_queue_seconds", "From order to prefill.", self._queue),
            ("halfmoon_prefill_fetch_seconds", "Fetching cached blocks, of those that did.", self._fetch),
            ("halfmoon_prefill_compute_seconds", "Computing prefill.", self._compute),
            ("halfmoon_prefill_push_seconds", "Moving KVCache to the decode node, in all.", self._push),
        ):
            yield histogram(name, text, (), {(): times})

    def _decode(self, model: tuple[str]) -> Iterable[Metric]:
        preempted = {model: self._preemptions}
        yield counter(
            "vllm:num_preemptions", "Sequences swapped out to host memory.", ("model_name",), preempted
        )
        for name, text, times in (
            (
                "halfmoon_decode_kv_wait_seconds",
                "From the end of prefill until all KVCache is here.",
                self._kv_wait,
            ),
            ("halfmoon_decode_queue_seconds", "From then until room in the batch.", self._room_wait),
            (
                "halfmoon_decode_first_step_seconds",
                "From joining the batch to the next token.",
                self._first_step,
            ),
            ("halfmoon_decode_step_seconds", "One step of the batch.", self._steps),
        ):
            yield histogram(name, text, (), {(): times})
        yield counter(
            "halfmoon_decode_step_sequences", "Sequences, over all steps.", (), {(): self._step_sequences}
        )
        context = {(): self._step_context_tokens}
        yield counter(
            "halfmoon_decode_step_context_tokens", "Tokens of context, over all steps.", (), context
        )
