"""Explanations: all that a placement or a refusal rested on. Part of the core.

Made only for requests that are to be explained: replay sets `Core.explain_requests` and reads `Core.notes` after each
step. The log alone decides, so these are the grounds of the conductor that decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.conductor.core.admission import Placement, Refusal, limit_ns, slo_ns, waits_ns
from halfmoon.conductor.core.candidates import candidates, decode_candidates
from halfmoon.conductor.core.cost import answer_class, expected_tokens
from halfmoon.conductor.core.measures import Candidate, DecodeCandidate
from halfmoon.conductor.core.prefix_match import match_prefix
from halfmoon.conductor.core.records import WorkerRecord
from halfmoon.conductor.core.role_rules import fits
from halfmoon.conductor.core.state import State
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.policy import AdmissionName, PolicyName


class Explanation(msgspec.Struct, kw_only=True, rename={"lost_reason": "lost"}):
    """The grounds of one decision on a request, real or supposed, at one place of the log."""

    request_id: str
    #: Event that caused it, and its time.
    seq: int
    at_ns: int
    policy: PolicyName
    admission: AdmissionName
    ttft_slo_ns: int
    tbt_slo_ns: int
    #: From which prediction on the request is refused: the SLO, by its priority.
    ttft_limit_ns: int
    tbt_limit_ns: int
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
    #: None: no worker could take it; it waits.
    verdict: Placement | Refusal | None


def explain(
    state: State,
    request: RequestArrived,
    at_ns: int,
    verdict: Placement | Refusal | None,
    *,
    seq: int,
    avoid: Sequence[str] = (),
    lost_reason: str = "",
) -> Explanation:
    """The grounds of `verdict`, in the state in which it was found."""
    matched = match_prefix(state, request, at_ns)
    tokens = expected_tokens(state.answers.get(answer_class(request.max_tokens)), request.max_tokens)
    prefills = candidates(state, request, matched, at_ns, avoid=avoid)
    decodes = decode_candidates(state, request, matched, tokens, avoid=avoid)
    found = dict.fromkeys([c.worker_id for c in prefills] + [c.worker_id for c in decodes])
    ttft_slo, tbt_slo = slo_ns(state, request)
    return Explanation(
        request_id=request.request_id,
        seq=seq,
        at_ns=at_ns,
        policy=state.policy.name,
        admission=state.policy.admission,
        ttft_slo_ns=ttft_slo,
        tbt_slo_ns=tbt_slo,
        ttft_limit_ns=limit_ns(ttft_slo, request.priority),
        tbt_limit_ns=limit_ns(tbt_slo, request.priority),
        lost_reason=lost_reason,
        last_chosen=dict(state.round_robin),
        prefix_blocks=dict(sorted(matched.held.items())),
        answer_tokens=tokens,
        prefill=prefills,
        decode=decodes,
        left_out={
            worker.worker_id: _why_not(state, worker, request)
            for worker in state.workers.values()
            if worker.worker_id not in found
        },
        verdict=verdict,
    )


def explain_arrival(
    state: State, request: RequestArrived, at_ns: int, verdict: Placement | Refusal, *, seq: int
) -> Explanation:
    """The grounds of `verdict` on a request that was never placed: it may wait instead of being refused."""
    if isinstance(verdict, Refusal) and waits_ns(state, request, verdict):
        return explain(state, request, at_ns, None, seq=seq, lost_reason=verdict.message)
    return explain(state, request, at_ns, verdict, seq=seq)


def _why_not(state: State, worker: WorkerRecord, request: RequestArrived) -> str:
    if worker.draining:
        return "draining"
    if not state.takes_orders(worker):
        return "its node's store agent is away"
    return (
        "it failed this request before" if fits(state, worker, request) else "the request is too long for it"
    )
