"""Workers that each pool needs: by recent arrivals, and by waiting and running requests. Thousandths of a worker.

Prefill: the time that arriving prompts take a second, and the queue. Decode: arriving tokens of answers over the tokens
that a worker makes with a batch as large as the TBT SLO, its KV and its batch allow; or, if that is more, the workers
that the placed requests fill, and more by the share of requests that decode had no room for: the length of answers is
learned when they end, which may be a minute after they have become longer.

Refused requests count: they are the demand that a pool lacks workers for.

Sources: DistServe (arXiv 2401.09670) for a split by each phase's goodput under its own SLO; Mooncake (ARXIV), section
7, for load over SLO. Which parts make a need, and their targets, are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.demand import Look, demand_of
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.roles import ELASTIC_ROLES, WorkerRole

#: A pool counts as full at these percentages: of a prefill worker's time, of the TBT SLO, of a decode worker's KV.
PREFILL_TARGET = 85
STEP_TARGET = 75
KV_TARGET = 90


class PoolNeed(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that stays as it is: its workers (with those that are joining it), and how many it needs, permille."""

    workers: int
    #: For arriving load, for present load, and for both.
    arriving: int
    present: int
    permille: int
    #: For what it does now: `present` without requests whose turn comes later.
    running: int
    #: Of the arriving requests, those that the other pool takes.
    passing_permille: int

    @property
    def wanted(self) -> int:
        """Whole workers, one at least."""
        return max(1, -(-self.permille // 1_000))

    def load(self, more: int = 0) -> int:
        """The pool's load in permille with `more` workers more; a pool of none is as full as can be."""
        workers = self.workers + more
        return self.permille // workers if workers > 0 else ENDLESS

    def load_having_given(self, other: PoolNeed) -> int:
        """The pool's load in permille with one worker less, by the requests that the `other` pool, which gets it, will
        take with one more.
        """
        passing = min(1_000, self.passing_permille * (other.workers + 1) // max(1, other.workers))
        need = max(self.permille * passing // 1_000, self.running)
        return need // (self.workers - 1) if self.workers > 1 else ENDLESS


#: The load of a pool without a worker, permille.
ENDLESS = 2**53


def pool_needs(state: State) -> dict[WorkerRole, PoolNeed]:
    """For the two roles that workers may change between."""
    seen = demand_of(state.demand, state.at_ns, state.policy.elastic_window_ns)
    stay: dict[WorkerRole, list[WorkerRecord]] = {role: [] for role in ELASTIC_ROLES}
    joining: dict[WorkerRole, int] = dict.fromkeys(ELASTIC_ROLES, 0)
    for worker in state.workers.values():
        if worker.change.becomes in joining:
            joining[worker.change.becomes] += 1
        elif worker.role in stay and not worker.draining:
            stay[worker.role].append(worker)
    prefills, decodes = stay["prefill"], stay["decode"]
    prompts, queued = _prompts(state, seen), _queued(state, prefills)
    answers, decoding = _answers(state, seen, decodes or prefills), _decoding(state, seen, decodes)
    return {
        "prefill": PoolNeed(
            workers=len(prefills) + joining["prefill"],
            arriving=prompts,
            present=queued,
            permille=prompts + queued,
            running=queued,
            passing_permille=1_000 - 1_000 * seen.decode_refused // max(1, seen.requests),
        ),
        "decode": PoolNeed(
            workers=len(decodes) + joining["decode"],
            arriving=answers,
            present=decoding,
            permille=max(answers, decoding),
            running=_running(state, seen, decodes),
            passing_permille=1_000 - 1_000 * seen.prefill_refused // max(1, seen.requests),
        ),
    }


def _prompts(state: State, seen: Look) -> int:
    return seen.prefill_ns * 1_000 * 100 // (state.policy.elastic_window_ns * PREFILL_TARGET or 1)


def _queued(state: State, workers: Sequence[WorkerRecord]) -> int:
    """Workers for the queue: it is to be worked off beside new arrivals, within the SLO and the window."""
    horizon_ns = max(1, state.policy.ttft_slo_ns + state.policy.elastic_window_ns)
    return sum(queue_ns(worker, state.at_ns) for worker in workers) * 1_000 // horizon_ns


def _answers(state: State, seen: Look, workers: Sequence[WorkerRecord]) -> int:
    """The tokens of answers that arrive, over those that one worker makes."""
    if not seen.answer_tokens or not workers:
        return 0
    cost = _mean_cost(workers)
    row_ps = _row_ps(cost, seen.context_steps // seen.answer_tokens)
    batch = min(worker.batch_max for worker in workers)
    room_ns = _step_room_ns(state, cost)
    if row_ps:
        batch = min(batch, room_ns * 1_000 // row_ps)
    if workers[0].block_bytes:
        tokens = min(worker.kv_blocks * worker.block_tokens for worker in workers) * KV_TARGET // 100
        batch = min(batch, tokens * seen.answer_tokens // max(1, seen.reserved_steps))
    batch = max(1, batch)
    step_ns = cost.decode_base_ns + batch * row_ps // 1_000
    return seen.answer_tokens * step_ns * 1_000 // (batch * max(1, state.policy.elastic_window_ns))


def _decoding(state: State, seen: Look, workers: Sequence[WorkerRecord]) -> int:
    """Workers that the placed requests fill."""
    return _filled(
        state,
        seen,
        workers,
        sequences=sum(len(worker.orders) for worker in workers),
        context_tokens=sum(worker.context_tokens for worker in workers),
        blocks=sum(worker.reserved_blocks for worker in workers),
    )


def _running(state: State, seen: Look, workers: Sequence[WorkerRecord]) -> int:
    """Workers that the placed requests fill whose prompts are computed: before a long queue of prompts they are few."""
    orders = [state.orders[order_id] for worker in workers for order_id in worker.orders]
    halves = [order.decode for order in orders if order.phase == "decode"]
    return _filled(
        state,
        seen,
        workers,
        sequences=len(halves),
        context_tokens=sum(half.context_tokens for half in halves),
        blocks=sum(half.reserved_blocks for half in halves),
    )


def _filled(
    state: State,
    seen: Look,
    workers: Sequence[WorkerRecord],
    *,
    sequences: int,
    context_tokens: int,
    blocks: int,
) -> int:
    """Workers that so much fills: by steps, by KV or by batches, whichever is the most."""
    if not workers:
        return 0
    cost = _mean_cost(workers)
    rows_ns = (
        cost.decode_per_sequence_ns * sequences + cost.decode_per_context_token_ps * context_tokens // 1_000
    )
    batches = sum(worker.batch_max for worker in workers)
    found = [rows_ns * 1_000 // _step_room_ns(state, cost), sequences * 1_000 * len(workers) // batches]
    if workers[0].block_bytes:
        room = sum(worker.kv_blocks for worker in workers) * KV_TARGET
        found.append(blocks * 100 * 1_000 * len(workers) // max(1, room))
    taken = max(1, seen.requests - seen.decode_refused)
    return max(found) * max(1, seen.requests) // taken


def _step_room_ns(state: State, cost: CostProfile) -> int:
    """The time that a step may take beyond its base."""
    return max(1, state.policy.tbt_slo_ns * STEP_TARGET // 100 - cost.decode_base_ns)


def _row_ps(cost: CostProfile, context_tokens: int) -> int:
    return cost.decode_per_sequence_ns * 1_000 + cost.decode_per_context_token_ps * context_tokens


def _mean_cost(workers: Sequence[WorkerRecord]) -> CostProfile:
    def mean(name: str) -> int:
        return sum(int(getattr(worker.cost, name)) for worker in workers) // len(workers)

    return CostProfile(
        decode_base_ns=mean("decode_base_ns"),
        decode_per_sequence_ns=mean("decode_per_sequence_ns"),
        decode_per_context_token_ps=mean("decode_per_context_token_ps"),
    )
