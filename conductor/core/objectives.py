"""Objectives of a request, and the predictions from which it is refused.

A request that names no objective has the cluster's. With `idle_served` that is never less than ALONE_TIMES the time of
the request at workers which do nothing else: an objective that none meets even then would refuse it for ever, on a
cluster that could serve it. And a prediction that nothing recent supports refuses nothing at an idle worker: the
request is served, and its time teaches. Costs that were measured on a busy machine are corrected so.

Ours. Mooncake (ARXIV, section 8.1) sets its limits by a request's time alone, too: ten times that for TTFT, five for
TBT.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.conductor.core.placement.measures import Candidate, DecodeCandidate
from halfmoon.conductor.core.placement.prices import Row, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.types import INT_MAX

#: With priority -1000, which halves every limit, the time at an idle worker is just within it.
ALONE_TIMES = 2
#: A measurement within this time supports a prediction.
RECENT_NS = 60 * SECOND_NS


def slo_ns(state: State, request: RequestArrived) -> tuple[int, int]:
    """TTFT and TBT objective of a request: its own, or the cluster's."""
    return request.ttft_slo_ns or state.policy.ttft_slo_ns, request.tbt_slo_ns or state.policy.tbt_slo_ns


def limit_ns(objective_ns: int, priority: int) -> int:
    """The prediction from which a request of this priority is refused."""
    return objective_ns * (1_000 + priority // 2) // 1_000


def ttft_limit_ns(state: State, request: RequestArrived, prefill: Candidate) -> int:
    """The predicted time to first token from which this worker's candidate is refused."""
    objective_ns, _ = slo_ns(state, request)
    if state.policy.idle_served:
        if not prefill.orders and not _supported(state, state.workers[prefill.worker_id]):
            return INT_MAX
        if not request.ttft_slo_ns:
            objective_ns = max(objective_ns, ALONE_TIMES * (prefill.ttft_ns - prefill.queue_ns))
    return limit_ns(objective_ns, request.priority)


def tbt_limit_ns(state: State, request: RequestArrived, decode: DecodeCandidate, context_tokens: int) -> int:
    """The predicted time between tokens from which this candidate, with `context_tokens`, is refused."""
    worker = state.workers[decode.worker_id]
    objective_ns = tbt_objective_ns(
        state, request, worker, context_tokens, decode.loans, decode.cache, idle=not worker.orders
    )
    return limit_ns(objective_ns, request.priority) if objective_ns else INT_MAX


def tbt_objective_ns(
    state: State,
    request: RequestArrived,
    worker: WorkerRecord,
    context_tokens: int,
    loans: Sequence[KvPart],
    cache: Sequence[KvPart],
    *,
    idle: bool,
) -> int:
    """The objective between tokens at this worker; 0: whatever comes. `idle`: it has no other request."""
    _, objective_ns = slo_ns(state, request)
    if not state.policy.idle_served:
        return objective_ns
    if idle and not _supported(state, worker):
        return 0
    if request.tbt_slo_ns:
        return objective_ns
    alone = step_price(state, worker, 1, context_tokens, [Row(context_tokens, list(loans), list(cache))])
    return max(objective_ns, ALONE_TIMES * alone.ns)


def learned(state: State, worker: WorkerRecord) -> None:
    """Note the time of a measurement of the worker's own speed."""
    # An older log has states without this.
    if state.policy.idle_served:
        worker.learning.newest_ns = state.at_ns


def _supported(state: State, worker: WorkerRecord) -> bool:
    """True where the worker's speed was measured lately, or is known beforehand (null engine)."""
    learning = worker.learning
    if not learning.enabled:
        return True
    return learning.newest_ns > 0 and state.at_ns - learning.newest_ns <= RECENT_NS
