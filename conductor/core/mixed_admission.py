"""Early rejection at mixed workers: a request is placed on one whole, or refused by the prediction there.

The rules are those of a pair (`admission`), with one worker's queue, room and iterations. A policy that weighs how long
others wait may choose a worker that is late: then the one of the earliest first token is tried before the request is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.conductor.core.admission import (
    AdmissionLimits,
    Placement,
    Refusal,
    late,
    limits_of,
    placement_of,
    prediction,
    too_large_now,
)
from halfmoon.conductor.core.placement.capacity import too_long
from halfmoon.conductor.core.placement.costed import Costed
from halfmoon.conductor.core.placement.measures import MixedCandidate
from halfmoon.conductor.core.placement.policies import (
    EARLIEST_TOKEN_MIXED,
    LEAST_DELAYS_MIXED,
    choose_by,
)
from halfmoon.conductor.core.placement.waits import RETRY_NS_MIN, wait_ns
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.correction import EXACT_PERMILLE


def decide_mixed(costed: Costed, found: Sequence[MixedCandidate]) -> Placement | Refusal:
    """The one of the mixed workers for a request that was never placed, or why none of them takes it."""
    able = _able(costed, found)
    if isinstance(able, Refusal):
        return able
    best = choose_by(costed.mixed_rule, "mixed", costed.state, able, costed.draw)
    assert best is not None, "one of them is able"
    verdict = _judged(costed, best)
    if isinstance(verdict, Refusal) and costed.mixed_rule == LEAST_DELAYS_MIXED:
        able = _able(costed, costed.every_mixed())
        assert not isinstance(able, Refusal), "one of them is able"
        verdict = _judged(costed, min(able, key=EARLIEST_TOKEN_MIXED.rank))
        if isinstance(verdict, Placement):
            verdict.by_first_token = True
    return verdict


def _able(costed: Costed, found: Sequence[MixedCandidate]) -> list[MixedCandidate] | Refusal:
    """Those that the choice is among, at least one."""
    state, now_ns = costed.state, costed.now_ns
    if not found:
        return Refusal(reason="too_long", message=too_long(state, costed.request))
    able = [c for c in found if not c.full]
    if not able:
        return Refusal(
            reason="queue_full",
            message="the queue of every mixed worker is full",
            retry_after_ns=max(min(c.prefill.queue_ns // c.prefill.orders for c in found), RETRY_NS_MIN),
        )
    roomy = [c for c in able if c.decode.room]
    if not roomy and state.policy.admission in ("early", "predicted"):
        roomy = [c for c in able if costed.room_at(c.decode, now_ns + c.prefill.ttft_ns)]
        if not roomy:
            return _no_room(state, able, now_ns)
    return roomy or able


def _judged(costed: Costed, best: MixedCandidate) -> Placement | Refusal:
    state = costed.state
    placement = placement_of(costed, best.prefill, best.decode)
    if state.policy.admission == "none":
        return placement
    limits = placement.limits = limits_of(costed, placement)
    return (
        late(placement, limits, costed.waited_ns)
        or _slow(state, placement, limits, costed.now_ns)
        or too_large_now(costed, placement, limits, costed.mixed_workers)
        or placement
    )


def mixed_again(costed: Costed) -> Placement | None:
    """The best mixed worker for a request that was accepted before, whatever it takes; None when there is none."""
    found = costed.mixed or []
    roomy = [c for c in found if c.decode.room]
    best = choose_by(costed.mixed_rule, "mixed", costed.state, roomy or found, costed.draw)
    return None if best is None else placement_of(costed, best.prefill, best.decode)


def _no_room(state: State, able: list[MixedCandidate], now_ns: int) -> Refusal:
    least = min(able, key=EARLIEST_TOKEN_MIXED.rank)
    return Refusal(
        reason="no_room",
        message="no mixed worker has room for the request's KV",
        predicted=prediction(least.prefill, least.decode.tbt_ns),
        retry_after_ns=min(wait_ns(state, state.workers[c.worker_id], c.decode, 0, now_ns) for c in able),
    )


def _slow(state: State, placement: Placement, limits: AdmissionLimits, now_ns: int) -> Refusal | None:
    """A refusal because an iteration with it is predicted to take too long."""
    decode, limit = placement.decode, limits.tbt_ns
    tbt_ns = decode.tbt_ns * placement.tbt_permille // EXACT_PERMILLE
    if state.policy.admission == "late" or tbt_ns <= limit:
        return None
    return Refusal(
        reason="tbt_slo",
        message=f"predicted time between tokens {tbt_ns // 1_000_000} ms; the limit is {limit // 1_000_000} ms",
        predicted=placement.predicted,
        limits=limits,
        retry_after_ns=wait_ns(state, state.workers[decode.worker_id], decode, 0, now_ns),
    )
