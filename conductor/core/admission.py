"""Placement or refusal of a request: `decide` joins the choice of its workers and early rejection.

The request comes costed (`placement.costed`), and the policy's rule chooses among its candidates
(`placement.policies`). `decide` gives a placement or a refusal with its reason, and changes nothing. Each admission
mode looks at the load of decode in its own way:

- `none`: everything is queued; refused are only requests that can never run, that find all queues full, or that must
  borrow and find no room.
- `late`: TTFT is checked here, TBT only by the decode worker, after prefill.
- `early`: TBT is checked here too, against the requests that are in decode now. Requests still in prefill do not count,
  so the load oscillates.
- `predicted`: TBT is checked against the load at the predicted end of this prefill: with requests whose prefill ends by
  then, without those whose decode will be over.

Priorities scale the limits: priority 0 is held to its SLO, -1000 is refused from half of it on, 1000 is accepted up to
one and a half times. So under growing load smaller priorities are refused first. Under `predicted` some policies refuse
larger prompts first as well (`state.overload`).

Source: Mooncake (ARXIV), section 7; priorities and retry-after are ours.
"""

# The idea is the paper's: a prefill whose answer no decode worker can give within its SLO is work thrown away, so the
# refusal must come before the prefill. Its first form (`early`) oscillates. While prompts are computed decode looks
# empty, and too many are accepted; then decode is full, and too many are refused. `predicted` looks at the load of
# the moment when the request will join, not at the load of now.
#
# This is simpler here than in the paper. All reservations are in one state, so the load at a later time is a sum over
# orders, and no monitor has to be asked. The mean length of answers is learned for each class of `max_tokens`, where
# the paper has one time for all. It is harder because a request may borrow memory from several workers: it gets all
# of its room at once or is refused.
#
# Turned down:
# - Queueing a request that borrows until room comes: two requests that hold parts of each other would wait for ever.
# - Refusing in the frontend, near the client: two frontends would each give away the same room.
# - One reason for all refusals: `too_long` is final, `ttft_slo` passes with the load.
#
# In doubt: the mean over the pool (`_pool_tbt_ns`) lets a request pay for workers that it does not touch. Retry-after
# knows the queue of one worker, and not the other clients that it sends back at the same moment.

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.corrections import corrects_tbt, tbt_permille
from halfmoon.conductor.core.objectives import tbt_limit_ns, ttft_limit_ns
from halfmoon.conductor.core.placement.capacity import nowhere_to_hold, too_long
from halfmoon.conductor.core.placement.costed import Costed
from halfmoon.conductor.core.placement.groups import in_group
from halfmoon.conductor.core.placement.measures import Candidate, DecodeCandidate
from halfmoon.conductor.core.placement.policies import choose_decode, choose_prefill, rules_of
from halfmoon.conductor.core.placement.prices import Row, step_price
from halfmoon.conductor.core.placement.similar import with_reference
from halfmoon.conductor.core.placement.waits import RETRY_NS_MIN, wait_ns
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.correction import EXACT_PERMILLE
from halfmoon.conductor.core.state.cost import expected_decode_ns
from halfmoon.conductor.core.state.overload import asked_for, queue_allowed_ns
from halfmoon.schemas.decisions import Prediction, RejectReason
from halfmoon.schemas.types import INT_MAX


class AdmissionLimits(msgspec.Struct, frozen=True):
    """Predictions from which a request is refused at the workers that were chosen."""

    ttft_ns: int
    tbt_ns: int


class Placement(msgspec.Struct, kw_only=True):
    """A pair of workers for a request, or one mixed worker twice, and the predictions for it there. Where the prefill
    worker answers, `decode` is `NOBODY`.
    """

    prefill: Candidate
    decode: DecodeCandidate
    predicted: Prediction
    answer_tokens: int
    #: Predicted duration of decode.
    decode_ns: int
    limits: AdmissionLimits | None = None
    #: Predicted time between tokens, in thousandths of a step.
    tbt_permille: int = EXACT_PERMILLE
    #: A mixed worker that was chosen for its first token alone: the policy's own would have refused the request.
    by_first_token: bool = False

    @property
    def mixed(self) -> bool:
        """One mixed worker does both."""
        return self.prefill.worker_id == self.decode.worker_id


class Refusal(msgspec.Struct, kw_only=True):
    """The reason why a request is not accepted, and when to come back (0: unknown)."""

    reason: RejectReason
    message: str
    predicted: Prediction = Prediction()
    retry_after_ns: int = 0
    limits: AdmissionLimits | None = None


def decide(costed: Costed) -> Placement | Refusal:
    """A prefill and a decode worker, or a refusal, for a request that was never placed."""
    state, now_ns, draw = costed.state, costed.now_ns, costed.draw
    refusal = _cannot(costed)
    if refusal is not None:
        return refusal
    prefill = choose_prefill(state, [c for c in costed.prefills if not c.full], draw)
    assert prefill is not None, costed
    prefill = in_group(state, prefill, costed.request.prompt_tokens, now_ns)
    prefill = with_reference(state, costed.request, prefill, now_ns)
    open_decodes = [c for c in costed.decodes if not c.full]
    roomy = [c for c in open_decodes if c.room]
    end_ns = now_ns + prefill.ttft_ns
    admission = state.policy.admission
    borrows = any(c.needs_others for c in open_decodes)
    # A request that borrows is never queued: two that hold parts of each other would wait for each other.
    if not roomy and (borrows or admission in ("early", "predicted")):
        # A borrower needs room at several workers at one moment; `room_at` predicts the room of one.
        roomy = [] if borrows else [c for c in open_decodes if costed.room_at(c, end_ns)]
        if not roomy:
            return Refusal(
                reason="no_room",
                message="no decode worker has room for the request's KV",
                predicted=prediction(prefill, min(c.tbt_ns for c in open_decodes)),
                retry_after_ns=_borrowers_wait_ns(state, now_ns)
                if borrows
                else min(wait_ns(state, state.workers[c.worker_id], c, 0, now_ns) for c in open_decodes),
            )
    decode = choose_decode(state, roomy or open_decodes, draw)
    assert decode is not None, costed
    placement = placement_of(costed, prefill, decode)
    if admission == "none":
        return placement
    limits = placement.limits = limits_of(costed, placement)
    return (
        _over_slo(costed, placement, limits)
        or too_large_now(costed, placement, limits, costed.prefill_workers)
        or placement
    )


def place_again(costed: Costed) -> Placement | None:
    """The best pair for a request that was accepted before, whatever it takes; None when there is no worker, or no room
    at lenders. It is costed whole.
    """
    state, draw = costed.state, costed.draw
    prefill = choose_prefill(state, costed.prefills, draw)
    roomy = [c for c in costed.decodes if c.room]
    decode = choose_decode(state, roomy or [c for c in costed.decodes if not c.needs_others], draw)
    if prefill is None or decode is None:
        return None
    return placement_of(costed, prefill, decode)


def limits_of(costed: Costed, placement: Placement) -> AdmissionLimits:
    """Predictions from which the request is refused where it is placed."""
    state, request = costed.state, costed.request
    context = request.prompt_tokens + placement.answer_tokens
    return AdmissionLimits(
        ttft_limit_ns(state, request, placement.prefill),
        INT_MAX if costed.one_token else tbt_limit_ns(state, request, placement.decode, context),
    )


def placement_of(costed: Costed, prefill: Candidate, decode: DecodeCandidate) -> Placement:
    placement = Placement(
        prefill=prefill,
        decode=decode,
        predicted=prediction(prefill, decode.tbt_ns),
        answer_tokens=costed.answer_tokens,
        decode_ns=expected_decode_ns(costed.answers, costed.answer_tokens, decode.tbt_ns),
    )
    state, worker = costed.state, costed.state.workers.get(decode.worker_id)
    if worker is not None and corrects_tbt(state, worker):
        # The request joins the batch of that time, not the one of now. Clients see the longest intervals of an answer,
        # so the correction is by these and not by the mean step.
        load = costed.load_at(worker, state.at_ns + prefill.ttft_ns)
        context = costed.request.prompt_tokens + costed.answer_tokens
        step_ns = worker.cost.step_ns(load.sequences + 1, load.context_tokens + context)
        placement.tbt_permille = tbt_permille(worker, costed.answer_tokens)
        tbt_ns = step_ns * placement.tbt_permille // EXACT_PERMILLE
        placement.predicted = msgspec.structs.replace(placement.predicted, tbt_ns=tbt_ns)
    return placement


def _borrowers_wait_ns(state: State, now_ns: int) -> int:
    """Time until the next request ends, which may leave enough room at its worker or its lenders."""
    ends = (order.prefill.end_ns + order.decode.lasts_ns for order in state.orders.values())
    return max(min(ends, default=0) - now_ns, RETRY_NS_MIN)


def prediction(prefill: Candidate, tbt_ns: int) -> Prediction:
    return Prediction(
        queue_ns=prefill.queue_ns,
        transfer_ns=prefill.transfer_ns,
        prefill_ns=prefill.prefill_ns,
        ttft_ns=prefill.ttft_ns,
        tbt_ns=tbt_ns,
    )


def _cannot(costed: Costed) -> Refusal | None:
    """A refusal that holds under every admission mode: placements are paused, no worker there, too long for all, all
    queues full.
    """
    state, now_ns = costed.state, costed.now_ns
    if state.paused:
        message = "an operator has paused placements"
    elif not state.loads.prefill.workers:
        message = "no prefill worker is there"
    elif costed.one_token:
        message = ""
    elif not state.loads.decode.workers:
        message = "no decode worker is there"
    else:
        message = nowhere_to_hold(state)
    if message:
        return Refusal(
            reason="no_worker",
            message=message,
            retry_after_ns=max(state.policy.heartbeat_ns, RETRY_NS_MIN),
        )
    if not costed.prefills or not costed.decodes:
        return Refusal(reason="too_long", message=too_long(state, costed.request))
    if all(c.full for c in costed.prefills):
        return Refusal(
            reason="queue_full",
            message="the queue of every prefill worker is full",
            # One place is free when the first order is done.
            retry_after_ns=max(min(c.queue_ns // c.orders for c in costed.prefills), RETRY_NS_MIN),
        )
    if all(c.full for c in costed.decodes):
        wait = min(wait_ns(state, state.workers[c.worker_id], c, 0, now_ns) for c in costed.decodes)
        return Refusal(
            reason="queue_full", message="the queue of every decode worker is full", retry_after_ns=wait
        )
    return None


def _over_slo(costed: Costed, placement: Placement, limits: AdmissionLimits) -> Refusal | None:
    """A refusal because the prediction is over an SLO."""
    state, now_ns = costed.state, costed.now_ns
    # Predictions of steps below carry no correction, so the limit is divided by it once instead of correcting each.
    tbt_limit = limits.tbt_ns * EXACT_PERMILLE // placement.tbt_permille
    refusal = late(placement, limits, costed.waited_ns)
    if refusal is not None:
        return refusal
    if state.policy.admission == "late":
        return None
    # The load with all reservations counted bounds the load at any one time. Mostly this cheap bound is enough, and no
    # walk over orders is needed.
    if costed.tbt_ns_max <= tbt_limit or all(c.tbt_ns <= tbt_limit for c in costed.every_decode()):
        return None
    end_ns = now_ns + placement.prefill.ttft_ns
    decode = placement.decode
    worker = state.workers[decode.worker_id]
    context = costed.request.prompt_tokens + placement.answer_tokens
    load = costed.load_at(worker, end_ns)
    rows = [*load.rows, Row(context, decode.loans, decode.cache)]
    tbt_ns = step_price(state, worker, load.sequences + 1, load.context_tokens + context, rows).ns
    if tbt_ns <= tbt_limit and _pool_tbt_ns(costed, end_ns) <= tbt_limit:
        return None
    tbt_ns = tbt_ns * placement.tbt_permille // EXACT_PERMILLE
    return Refusal(
        reason="tbt_slo",
        message=f"predicted time between tokens {tbt_ns // 1_000_000} ms; the limit is {limits.tbt_ns // 1_000_000} ms",
        predicted=msgspec.structs.replace(placement.predicted, tbt_ns=tbt_ns),
        limits=limits,
        retry_after_ns=wait_ns(state, worker, decode, tbt_limit, now_ns, context),
    )


def _pool_tbt_ns(costed: Costed, end_ns: int) -> int:
    """Mean time between tokens over the decode pool at `end_ns`."""
    state, total = costed.state, 0
    decodes = costed.every_decode()
    for candidate in decodes:
        worker = state.workers[candidate.worker_id]
        load = costed.load_at(worker, end_ns)
        if load.sequences:
            total += step_price(state, worker, load.sequences, load.context_tokens, load.rows).ns
    return total // len(decodes)


def late(placement: Placement, limits: AdmissionLimits, waited_ns: int) -> Refusal | None:
    """A refusal because the first token is predicted to come too late."""
    ttft_ns = placement.prefill.ttft_ns + waited_ns
    if ttft_ns <= limits.ttft_ns:
        return None
    wait = ttft_ns - limits.ttft_ns
    return Refusal(
        reason="ttft_slo",
        message=f"predicted time to first token {ttft_ns // 1_000_000} ms is over {limits.ttft_ns // 1_000_000} ms",
        predicted=placement.predicted,
        limits=limits,
        # The queue drains at one second a second; transfer and prefill stay as long as they are.
        retry_after_ns=max(wait, RETRY_NS_MIN) if wait <= placement.prefill.queue_ns else 0,
    )


def too_large_now(
    costed: Costed, placement: Placement, limits: AdmissionLimits, workers: int
) -> Refusal | None:
    """A refusal because under overload larger prompts go first (ours)."""
    state = costed.state
    if not rules_of(state).large_refused_first or state.policy.admission != "predicted":
        return None
    prefill = placement.prefill
    asked = asked_for(state.offered, costed.missing_key, costed.now_ns)
    allowed_ns = queue_allowed_ns(state.offered, workers, prefill.prefill_ns // asked, limits.ttft_ns)
    if prefill.queue_ns <= allowed_ns:
        return None
    shared = f" (divided by {asked} requests for its text)" if asked > 1 else ""
    return Refusal(
        reason="ttft_slo",
        message=f"overload: a prompt that takes {prefill.prefill_ns // 1_000_000} ms{shared} may find "
        f"{allowed_ns // 1_000_000} ms queued and finds {prefill.queue_ns // 1_000_000} ms",
        predicted=placement.predicted,
        limits=limits,
        retry_after_ns=max(prefill.queue_ns - allowed_ns, RETRY_NS_MIN),
    )
