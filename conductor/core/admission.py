"""Placement or refusal of a request: `decide` joins the choice of its workers and early rejection.

The choice is made by `placement.best_first` where its short cut holds, else by the policy's rule
(`placement.policies`). `decide` gives a placement or a refusal with its reason, and changes nothing. Each admission
mode looks at the load of decode in its own way:

- `none`: everything is queued; only what can never run, full queues, and what must borrow and finds no room are
  refused.
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

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.corrections import corrects_tbt, tbt_permille
from halfmoon.conductor.core.objectives import limit_ns, slo_ns, tbt_limit_ns, ttft_limit_ns
from halfmoon.conductor.core.placement.best_first import earliest_first_token, shortest_step
from halfmoon.conductor.core.placement.cache_places import nowhere_to_hold
from halfmoon.conductor.core.placement.candidates import candidates, capacity, decode_candidates, has_room
from halfmoon.conductor.core.placement.groups import in_group
from halfmoon.conductor.core.placement.measures import Candidate, DecodeCandidate
from halfmoon.conductor.core.placement.policies import choose_decode, choose_prefill, rules_of
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch, match_prefix
from halfmoon.conductor.core.placement.prices import Row, row_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.correction import EXACT_PERMILLE
from halfmoon.conductor.core.state.cost import answer_class, expected_decode_ns, expected_tokens
from halfmoon.conductor.core.state.overload import queue_allowed_ns
from halfmoon.conductor.core.state.records import Request, WorkerRecord
from halfmoon.schemas.decisions import Prediction, RejectReason
from halfmoon.schemas.events import RequestArrived

#: Retry-after is never shorter: a client that comes back at once finds the same.
RETRY_NS_MIN = 1_000_000


class AdmissionLimits(msgspec.Struct, frozen=True):
    """Predictions from which a request is refused at the workers that were chosen."""

    ttft_ns: int
    tbt_ns: int


class Placement(msgspec.Struct, kw_only=True):
    """A pair of workers for a request, or one mixed worker twice, and what is expected of it there."""

    prefill: Candidate
    decode: DecodeCandidate
    predicted: Prediction
    answer_tokens: int
    #: How long decode is to last.
    decode_ns: int
    limits: AdmissionLimits | None = None
    #: Of a step, the time between tokens that is predicted.
    tbt_permille: int = EXACT_PERMILLE

    @property
    def mixed(self) -> bool:
        """One mixed worker does both."""
        return self.prefill.worker_id == self.decode.worker_id


class Refusal(msgspec.Struct, kw_only=True):
    """The reason why a request is not accepted, and when to come back (0: not said)."""

    reason: RejectReason
    message: str
    predicted: Prediction = Prediction()
    retry_after_ns: int = 0
    limits: AdmissionLimits | None = None


class Load(msgspec.Struct):
    """The batch of a decode worker at some time."""

    sequences: int
    context_tokens: int
    blocks: int
    rows: list[Row] = []


def waits_ns(state: State, request: RequestArrived, refusal: Refusal) -> int:
    """How long a new request waits for a worker instead of being refused; 0: it does not wait.

    Not when so many wait already, nor longer than until its first token is late.
    """
    policy = state.policy
    if refusal.reason != "no_worker" or len(state.parked) >= policy.queued_max_per_worker:
        return 0
    return min(policy.arrival_wait_ns_max, limit_ns(slo_ns(state, request)[0], request.priority))


def decide(
    state: State, request: RequestArrived, now_ns: int, draw: str, *, waited_ns: int = 0
) -> Placement | Refusal:
    """A prefill and a decode worker, or a refusal, for a request that was never placed, and has waited so long."""
    matched = match_prefix(state, request, now_ns)
    answer_tokens = expected_tokens(state.answers.get(answer_class(request.max_tokens)), request.max_tokens)
    best = earliest_first_token(state, request, matched, now_ns)
    prefills = candidates(state, request, matched, now_ns) if best is None else [best]
    short = shortest_step(state, request, matched, answer_tokens)
    decodes = decode_candidates(state, request, matched, answer_tokens) if short is None else [short.best]
    refusal = _cannot(state, request, prefills, decodes, now_ns)
    if refusal is not None:
        return refusal
    prefill = choose_prefill(state, [c for c in prefills if not c.full], draw)
    assert prefill is not None, (request, prefills)
    prefill = in_group(state, prefill, request.prompt_tokens, now_ns)
    open_decodes = [c for c in decodes if not c.full]
    roomy = [c for c in open_decodes if c.room]
    end_ns = now_ns + prefill.ttft_ns
    admission = state.policy.admission
    borrows = any(c.needs_others for c in open_decodes)
    # What borrows is never queued: two that hold parts of each other would wait for each other.
    if not roomy and (borrows or admission in ("early", "predicted")):
        # When lenders will have room is not predicted.
        roomy = [] if borrows else [c for c in open_decodes if room_at(state, c, end_ns)]
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
    assert decode is not None, (request, decodes)
    placement = placement_of(state, request, prefill, decode, answer_tokens)
    if admission == "none":
        return placement
    limits = placement.limits = limits_of(state, request, placement)
    workers = len(state.loads.prefill.rows) if best is not None else len(prefills)
    tbt_ns_max = max(c.tbt_ns for c in decodes) if short is None else short.tbt_ns_max
    return (
        _over_slo(state, request, matched, placement, limits, tbt_ns_max, now_ns, waited_ns)
        or too_large_now(state, placement, limits, workers)
        or placement
    )


def place_again(state: State, request: Request, now_ns: int, draw: str) -> Placement | None:
    """The best pair for a request that was accepted before, whatever it takes; None when there is no worker, or no room
    at lenders.
    """
    event = request.event
    matched = match_prefix(state, event, now_ns)
    answer_tokens = expected_tokens(state.answers.get(answer_class(event.max_tokens)), event.max_tokens)
    prefill = choose_prefill(state, candidates(state, event, matched, now_ns, avoid=request.avoid), draw)
    decodes = decode_candidates(state, event, matched, answer_tokens, avoid=request.avoid)
    roomy = [c for c in decodes if c.room]
    decode = choose_decode(state, roomy or [c for c in decodes if not c.needs_others], draw)
    if prefill is None or decode is None:
        return None
    return placement_of(state, event, prefill, decode, answer_tokens)


def limits_of(state: State, request: RequestArrived, placement: Placement) -> AdmissionLimits:
    """Predictions from which the request is refused where it is placed."""
    context = request.prompt_tokens + placement.answer_tokens
    return AdmissionLimits(
        ttft_limit_ns(state, request, placement.prefill),
        tbt_limit_ns(state, request, placement.decode, context),
    )


def placement_of(
    state: State, request: RequestArrived, prefill: Candidate, decode: DecodeCandidate, answer_tokens: int
) -> Placement:
    answers = state.answers.get(answer_class(request.max_tokens))
    placement = Placement(
        prefill=prefill,
        decode=decode,
        predicted=prediction(prefill, decode.tbt_ns),
        answer_tokens=answer_tokens,
        decode_ns=expected_decode_ns(answers, answer_tokens, decode.tbt_ns),
    )
    worker = state.workers[decode.worker_id]
    if corrects_tbt(state, worker):
        _correct_tbt(state, placement, worker, request.prompt_tokens + answer_tokens)
    return placement


def _correct_tbt(state: State, placement: Placement, worker: WorkerRecord, context: int) -> None:
    """Predict the time between tokens at the batch that will be, and by what the longest intervals took of answers."""
    load = decode_load(state, worker, state.at_ns + placement.prefill.ttft_ns)
    step_ns = worker.cost.step_ns(load.sequences + 1, load.context_tokens + context)
    placement.tbt_permille = tbt_permille(worker, placement.answer_tokens)
    tbt_ns = step_ns * placement.tbt_permille // EXACT_PERMILLE
    placement.predicted = msgspec.structs.replace(placement.predicted, tbt_ns=tbt_ns)


def prediction(prefill: Candidate, tbt_ns: int) -> Prediction:
    return Prediction(
        queue_ns=prefill.queue_ns,
        transfer_ns=prefill.transfer_ns,
        prefill_ns=prefill.prefill_ns,
        ttft_ns=prefill.ttft_ns,
        tbt_ns=tbt_ns,
    )


def _cannot(
    state: State,
    request: RequestArrived,
    prefills: list[Candidate],
    decodes: list[DecodeCandidate],
    now_ns: int,
) -> Refusal | None:
    """A refusal that holds under every admission mode: no worker there, too long for all, all queues full."""
    pools = {"prefill": state.loads.prefill.workers, "decode": state.loads.decode.workers}
    missing = [f"no {role} worker is there" for role, workers in pools.items() if not workers]
    message = missing[0] if missing else _nowhere_to_hold(state)
    if message:
        return Refusal(
            reason="no_worker",
            message=message,
            retry_after_ns=max(state.policy.heartbeat_ns, RETRY_NS_MIN),
        )
    if not prefills or not decodes:
        return Refusal(reason="too_long", message=too_long(state, request))
    if all(c.full for c in prefills):
        return Refusal(
            reason="queue_full",
            message="the queue of every prefill worker is full",
            # One place is free when the oldest order is done.
            retry_after_ns=max(min(c.queue_ns // c.orders for c in prefills), RETRY_NS_MIN),
        )
    if all(c.full for c in decodes):
        wait = min(wait_ns(state, state.workers[c.worker_id], c, 0, now_ns) for c in decodes)
        return Refusal(
            reason="queue_full", message="the queue of every decode worker is full", retry_after_ns=wait
        )
    return None


def _nowhere_to_hold(state: State) -> str:
    """Why attention workers can hold no KV for any decode worker; "": they can for one, or it keeps its own."""
    why = ""
    for worker in state.loads.decode.workers:
        why = nowhere_to_hold(state, worker)
        if not why:
            break
    return why


def too_long(state: State, request: RequestArrived) -> str:
    message = f"{request.prompt_tokens} prompt tokens and {request.max_tokens} more fit no worker"
    if state.policy.pools_bound:  # a log of before has the message of before
        prompt_tokens, tokens = capacity(state)
        message += f": the cluster holds prompts of up to {prompt_tokens}, {tokens} with the answer"
    return message


def _over_slo(
    state: State,
    request: RequestArrived,
    matched: PrefixMatch,
    placement: Placement,
    limits: AdmissionLimits,
    tbt_ns_max: int,
    now_ns: int,
    waited_ns: int,
) -> Refusal | None:
    """A refusal because the prediction is over an SLO. `tbt_ns_max`: no worker that could take it has a longer step."""
    # Steps below are uncorrected.
    tbt_limit = limits.tbt_ns * EXACT_PERMILLE // placement.tbt_permille
    refusal = late(placement, limits, waited_ns)
    if refusal is not None:
        return refusal
    if state.policy.admission == "late":
        return None
    # With all reservations counted the load can only be higher than at any one time: mostly this is enough.
    if tbt_ns_max <= tbt_limit:
        return None
    decodes = decode_candidates(state, request, matched, placement.answer_tokens)
    if all(c.tbt_ns <= tbt_limit for c in decodes):
        return None
    end_ns = now_ns + placement.prefill.ttft_ns
    decode = placement.decode
    worker = state.workers[decode.worker_id]
    context = request.prompt_tokens + placement.answer_tokens
    load = decode_load(state, worker, end_ns)
    load.rows.append(Row(context, decode.loans, decode.cache))
    tbt_ns = step_price(state, worker, load.sequences + 1, load.context_tokens + context, load.rows).ns
    if tbt_ns <= tbt_limit and _pool_tbt_ns(state, decodes, end_ns) <= tbt_limit:
        return None
    tbt_ns = tbt_ns * placement.tbt_permille // EXACT_PERMILLE
    return Refusal(
        reason="tbt_slo",
        message=f"predicted time between tokens {tbt_ns // 1_000_000} ms; the limit is {limits.tbt_ns // 1_000_000} ms",
        predicted=msgspec.structs.replace(placement.predicted, tbt_ns=tbt_ns),
        limits=limits,
        retry_after_ns=wait_ns(state, worker, decode, tbt_limit, now_ns, context),
    )


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
        # The queue drains at one second a second; what is not queue does not.
        retry_after_ns=max(wait, RETRY_NS_MIN) if wait <= placement.prefill.queue_ns else 0,
    )


def too_large_now(
    state: State, placement: Placement, limits: AdmissionLimits, workers: int
) -> Refusal | None:
    """A refusal because under overload larger prompts go first (ours)."""
    if not rules_of(state).large_refused_first or state.policy.admission != "predicted":
        return None
    prefill = placement.prefill
    allowed_ns = queue_allowed_ns(state.offered, workers, prefill.prefill_ns, limits.ttft_ns)
    if prefill.queue_ns <= allowed_ns:
        return None
    return Refusal(
        reason="ttft_slo",
        message=f"overload: a prompt that takes {prefill.prefill_ns // 1_000_000} ms may find "
        f"{allowed_ns // 1_000_000} ms queued and finds {prefill.queue_ns // 1_000_000} ms",
        predicted=placement.predicted,
        limits=limits,
        retry_after_ns=max(prefill.queue_ns - allowed_ns, RETRY_NS_MIN),
    )


def decode_load(state: State, worker: WorkerRecord, end_ns: int) -> Load:
    """The load of `worker` in decode at `end_ns` (`predicted`), or now (any other admission mode)."""
    predicted = state.policy.admission == "predicted"
    # When a loan ends is not predicted: it counts as long as it lasts.
    load = Load(0, 0, sum(worker.lent.values()))
    for order_id in worker.orders:
        order = state.orders[order_id]
        half = order.decode
        if predicted:
            start_ns = order.prefill.end_ns
            if order.phase == "prefill":
                start_ns = max(start_ns, state.at_ns)  # it is late
            over_ns = start_ns + half.lasts_ns
            if order.phase == "decode" and over_ns < state.at_ns:
                # It lasts longer than expected: how long is as open as before.
                over_ns = state.at_ns + half.lasts_ns
            counts = start_ns <= end_ns <= over_ns
        else:
            counts = order.phase == "decode"
        if counts:
            load.sequences += 1
            load.context_tokens += half.context_tokens
            load.blocks += half.reserved_blocks
            if worker.priced:
                load.rows.append(row_of(order))
    return load


def _pool_tbt_ns(state: State, decodes: list[DecodeCandidate], end_ns: int) -> int:
    """Mean time between tokens over the decode pool at `end_ns`."""
    total = 0
    for candidate in decodes:
        worker = state.workers[candidate.worker_id]
        load = decode_load(state, worker, end_ns)
        if load.sequences:
            total += step_price(state, worker, load.sequences, load.context_tokens, load.rows).ns
    return total // len(decodes)


def room_at(state: State, candidate: DecodeCandidate, end_ns: int) -> bool:
    worker = state.workers[candidate.worker_id]
    load = decode_load(state, worker, end_ns)
    return has_room(worker, load.sequences, load.blocks, candidate.blocks)


def _borrowers_wait_ns(state: State, now_ns: int) -> int:
    """Time until the next request ends, which may leave enough room at its worker or its lenders."""
    ends = (order.prefill.end_ns + order.decode.lasts_ns for order in state.orders.values())
    return max(min(ends, default=0) - now_ns, RETRY_NS_MIN)


def wait_ns(
    state: State,
    worker: WorkerRecord,
    candidate: DecodeCandidate,
    tbt_limit_ns: int,
    now_ns: int,
    context: int = 0,
) -> int:
    """Time until enough of the worker's requests have ended: the KV fits and the step is within the limit (0: any)."""
    ends = sorted(
        (max(order.prefill.end_ns + order.decode.lasts_ns, now_ns), order.order_id)
        for order in [state.orders[order_id] for order_id in worker.orders]
    )
    sequences, tokens, blocks = len(ends), worker.context_tokens, worker.reserved_blocks
    rows = {order_id: row_of(state.orders[order_id]) for _, order_id in ends if worker.priced}
    new = Row(context, candidate.loans, candidate.cache)
    for end_ns, order_id in ends:
        order = state.orders[order_id]
        sequences, tokens, blocks = (
            sequences - 1,
            tokens - order.decode.context_tokens,
            blocks - order.decode.reserved_blocks,
        )
        rows.pop(order_id, None)
        step = step_price(state, worker, sequences + 1, tokens + context, [*rows.values(), new])
        within = tbt_limit_ns == 0 or step.ns <= tbt_limit_ns
        if within and has_room(worker, sequences, blocks, candidate.blocks):
            return max(end_ns - now_ns, RETRY_NS_MIN)
    return 0
