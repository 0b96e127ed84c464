"""Explanations: all that a placement or a refusal rested on. Part of the core.

Made only for requests that are to be explained: replay sets `Core.explain_requests` and reads `Core.notes` after each
step. The log alone decides, so these are the grounds of the conductor that decided.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.admission import AdmissionLimits, Placement, Refusal
from halfmoon.conductor.core.choice import Choice, choose
from halfmoon.conductor.core.corrections import correction_of
from halfmoon.conductor.core.objectives import limit_ns, slo_ns
from halfmoon.conductor.core.placement.capacity import why_not
from halfmoon.conductor.core.placement.costed import Costed, cost_request, cost_under
from halfmoon.conductor.core.placement.measures import Candidate, DecodeCandidate, MixedCandidate
from halfmoon.conductor.core.placement.policies import POLICIES, Least
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.policy import AdmissionName
from halfmoon.schemas.roles import WorkerRole


class DecisionTerms(msgspec.Struct, kw_only=True):
    """A decision's request, its place in the log, and the terms on which it is made."""

    request_id: str
    #: Event that caused it, and its time.
    seq: int
    at_ns: int
    policy: str
    admission: AdmissionName
    ttft_slo_ns: int
    tbt_slo_ns: int
    #: From which prediction on the request is refused: the SLO, by its priority.
    ttft_limit_ns: int
    tbt_limit_ns: int


class Explanation(DecisionTerms, kw_only=True, rename={"lost_reason": "lost"}):
    """The grounds of one decision on a request, real or supposed, at one place of the log."""

    #: Why it is placed again, or waits; "" for the first time.
    lost_reason: str = ""
    #: Node that round robin chose last, by pool.
    last_chosen: dict[str, str] = {}
    #: How many blocks of its prompt each node holds in a row from the first.
    prefix_blocks: dict[str, int]
    #: How long its answer was expected to be.
    answer_tokens: int
    prefill: list[Candidate]
    decode: list[DecodeCandidate]
    #: Workers that could not be chosen: id to why.
    left_out: dict[str, str]
    #: Mixed workers that could do both halves.
    mixed: list[MixedCandidate] = []
    #: Whether the policy chooses among them.
    mixed_by_policy: bool = False
    #: The verdict on the other way (pair or mixed); None: there was one way only.
    other_way: Placement | Refusal | None = None
    #: Attention workers that could hold KV: blocks that were free, and all that they have.
    attention: dict[str, tuple[int, int]] = {}
    #: Holders of others' KV that are avoided as slow: ns that a step waited for each, and was expected to wait.
    slow: dict[str, tuple[int, int]] = {}
    #: Workers whose predictions are corrected: role, thousandths of the fit, and busy neighbours (prefill).
    corrections: dict[str, tuple[WorkerRole, int, int]] = {}
    #: Policies that would have placed it on other workers, then and there: the pair of each (a mixed worker twice).
    rivals: dict[str, tuple[str, str]] = {}
    #: None: no worker could take it; it waits.
    verdict: Placement | Refusal | None


def explain(
    costed: Costed, verdict: Placement | Refusal | None, *, seq: int, lost_reason: str = ""
) -> Explanation:
    """The grounds of `verdict`, in the state in which it was found."""
    state, request = costed.state, costed.request
    prefills, decodes, mixed = costed.every_prefill(), costed.every_decode(), costed.every_mixed()
    found = dict.fromkeys(c.worker_id for each in (prefills, decodes, mixed) for c in each)
    ttft_slo, tbt_slo = slo_ns(state, request)
    limits = verdict.limits if verdict is not None else None
    if limits is None:
        limits = AdmissionLimits(limit_ns(ttft_slo, request.priority), limit_ns(tbt_slo, request.priority))
    return Explanation(
        request_id=request.request_id,
        seq=seq,
        at_ns=costed.now_ns,
        policy=state.policy.name,
        admission=state.policy.admission,
        ttft_slo_ns=ttft_slo,
        tbt_slo_ns=tbt_slo,
        ttft_limit_ns=limits.ttft_ns,
        tbt_limit_ns=limits.tbt_ns,
        lost_reason=lost_reason,
        last_chosen=dict(state.round_robin),
        prefix_blocks=dict(sorted(costed.match.held.items())),
        answer_tokens=costed.answer_tokens,
        prefill=prefills,
        decode=[c for c in decodes if c.worker_id],
        mixed=mixed,
        mixed_by_policy=state.policy.mixed_by_policy,
        left_out={
            worker.worker_id: why_not(state, worker, request)
            for worker in state.workers.values()
            if worker.worker_id not in found
            and not _holds_only(state, worker)
            and not (costed.one_token and worker.prompts is None)
        },
        attention={
            worker.worker_id: (worker.kv_blocks - worker.reserved_blocks, worker.kv_blocks)
            for worker in state.workers.values()
            if _holds_only(state, worker)
        },
        slow={
            worker.worker_id: (mark.waited_ns, mark.expected_ns)
            for worker in state.workers.values()
            if (mark := slow_mark(state, worker)) is not None
        },
        corrections={
            worker.worker_id: correction_of(worker)
            for worker in state.workers.values()
            if worker.worker_id in found and worker.learning.fitted is not None
        },
        verdict=verdict,
    )


def explain_arrival(costed: Costed, choice: Choice, *, seq: int) -> Explanation:
    """The grounds of the choice for a request that was never placed: it may wait instead of being refused."""
    verdict = choice.verdict
    if isinstance(verdict, Refusal) and choice.wait_ns:
        return explain(costed, None, seq=seq, lost_reason=verdict.message)
    rivals = _rivals(costed, verdict)
    why = explain(costed, verdict, seq=seq)
    why.other_way, why.rivals = choice.other_way, rivals
    return why


def explain_supposed(state: State, request: RequestArrived, at_ns: int) -> Explanation:
    """The grounds of the decision on `request`, were it the next event of the log, at `at_ns`."""
    if at_ns > state.at_ns:
        # The cost of an order that is overdue at that time is computed from the state's own time.
        state = msgspec.structs.replace(state, at_ns=at_ns)
    costed = cost_request(state, request, at_ns, f"{state.seq + 1}:0")
    return explain_arrival(costed, choose(costed), seq=state.seq + 1)


def _rivals(costed: Costed, verdict: Placement | Refusal) -> dict[str, tuple[str, str]]:
    """The pairs of policies that compare candidates, where they are not that of `verdict`."""
    if not isinstance(verdict, Placement):
        return {}
    state = costed.state
    rivals: dict[str, tuple[str, str]] = {}
    # All but the policy are the state's own objects, which no decision changes.
    other = msgspec.structs.replace(state)
    chosen = verdict.prefill.worker_id, verdict.decode.worker_id
    for name, rules in POLICIES.items():
        if name == state.policy.name or not isinstance(rules.prefill, Least):
            continue
        other.policy = msgspec.structs.replace(state.policy, name=name)
        placed = choose(cost_under(other, costed)).verdict
        if isinstance(placed, Placement):
            pair = placed.prefill.worker_id, placed.decode.worker_id
            if pair != chosen:
                rivals[name] = pair
    return rivals


def _holds_only(state: State, worker: WorkerRecord) -> bool:
    return worker.prompts is None and worker.batch is None and state.takes_orders(worker)


class RoleGrounds(msgspec.Struct, kw_only=True):
    """Grounds on which a worker changes its role by load, or should. Needs and loads are permille."""

    worker_id: str
    role: WorkerRole
    becomes: WorkerRole
    seq: int
    at_ns: int
    advised: bool
    reason: str
    #: By role: workers needed for arriving load, for present load, and workers that it has.
    arriving: dict[WorkerRole, int]
    present: dict[WorkerRole, int]
    workers: dict[WorkerRole, int]
    #: How full each pool is, and will be.
    load_before: dict[WorkerRole, int]
    load_after: dict[WorkerRole, int]
    #: Time since when it has been so; arrivals in the window before.
    held_ns: int
    window_ns: int
    requests: int
    prefill_ns: int
    answer_tokens: int
    #: Predicted time until it has finished its orders, and the same for each other worker that could have gone.
    done_ns: int
    others: dict[str, int]


class MoveGrounds(msgspec.Struct, kw_only=True):
    """The figures by which a plan moved a part of a request."""

    plan_id: str
    request_id: str
    order_id: str
    seq: int
    at_ns: int
    owner_id: str
    lender_id: str
    segments: int
    tokens: int
    #: The owner's batch and the requests that waited for its room; whether that was one that might come.
    batch: int
    waiting: int
    proactive: bool
    #: Of each cache, percent reserved before the move.
    owner_use: int
    lender_use: int
    #: Requests that fit in the owner's batch with the move, and thousandths of a token a second of both workers, before
    #: and after.
    joining: int
    rate_before: int
    rate_after: int
    #: Of a step with the move: the lender's attention to the owner's segments, and the owner's to its own.
    away_ns: int
    own_ns: int
    #: Creditors that were passed over: id and percent reserved.
    others: dict[str, int]
