"""The choice between a pair, which prefills here and decodes there, and one mixed worker that does both.

Each way is decided by its own rules first (`admission`, `mixed_admission`). A placement goes before a refusal; between
two placements the earlier first token decides, then the shorter time between tokens, then the fewer orders, then the
mixed worker, between whose halves nothing moves. Without mixed workers the pair's verdict stands.
"""

from __future__ import annotations

from typing import NamedTuple

from halfmoon.conductor.core.admission import Placement, Refusal, decide, place_again
from halfmoon.conductor.core.mixed_admission import decide_mixed, mixed_again
from halfmoon.conductor.core.objectives import limit_ns, slo_ns
from halfmoon.conductor.core.placement.costed import Costed


class Choice(NamedTuple):
    """The decision on a request that was never placed."""

    verdict: Placement | Refusal
    #: The verdict on the other way (pair or mixed); None: there was one way only.
    other_way: Placement | Refusal | None = None
    #: How long it waits for a worker instead of being refused; 0: it does not wait.
    wait_ns: int = 0


def choose(costed: Costed) -> Choice:
    """A placement or a refusal for a request that was never placed."""
    pair = decide(costed)
    # Paused placements are refused by `decide`, for workers of all kinds.
    mixed = None if costed.mixed is None or costed.state.paused else decide_mixed(costed, costed.mixed)
    verdict = pair if mixed is None else _one_of(costed, pair, mixed)
    if isinstance(verdict, Refusal):
        return Choice(verdict, wait_ns=_waits_ns(costed, verdict))
    loads = costed.state.loads
    pairs = loads.prefill.workers and (costed.one_token or loads.decode.workers)
    return Choice(verdict, mixed if not verdict.mixed else pair if pairs else None)


def _one_of(costed: Costed, pair: Placement | Refusal, mixed: Placement | Refusal) -> Placement | Refusal:
    if isinstance(mixed, Refusal):
        # Of two refusals, the one by workers that exist tells the client more.
        none_there = isinstance(pair, Refusal) and pair.reason in ("no_worker", "too_long")
        return mixed if none_there else pair
    if isinstance(pair, Refusal) or costed.state.policy.mixed_choice == "preferred":
        return mixed
    return _better(pair, mixed)


def _waits_ns(costed: Costed, refusal: Refusal) -> int:
    """Time for which a new request waits for a worker instead of being refused; 0: it does not wait.

    It does not when `queued_max_per_worker` wait already, and never past the moment when its first token is late.
    """
    state, request = costed.state, costed.request
    policy = state.policy
    if refusal.reason != "no_worker" or len(state.parked) >= policy.queued_max_per_worker:
        return 0
    return min(policy.arrival_wait_ns_max, limit_ns(slo_ns(state, request)[0], request.priority))


def choose_again(costed: Costed) -> Placement | None:
    """The best placement of a request that was accepted before, whatever it costs, on workers that did not fail it
    where there are others; None when there is none, or placements are paused. The request is costed whole.
    """
    if costed.state.paused:
        return None
    pair, mixed = place_again(costed), mixed_again(costed)
    if pair is None or mixed is None:
        return pair or mixed
    failed = [any(one in costed.avoid for one in _workers(placement)) for placement in (pair, mixed)]
    if failed[0] != failed[1]:
        return mixed if failed[0] else pair
    if costed.state.policy.mixed_choice == "preferred":
        return mixed
    return _better(pair, mixed)


def _workers(placement: Placement) -> tuple[str, str]:
    return placement.prefill.worker_id, placement.decode.worker_id


def _better(pair: Placement, mixed: Placement) -> Placement:
    return mixed if way_rank(mixed) <= way_rank(pair) else pair


def way_rank(placement: Placement) -> tuple[int, int, int]:
    """The least is better. Where nothing is predicted (the null engine) the number of orders tells the two apart."""
    orders = max(placement.prefill.orders, placement.decode.sequences)
    return placement.predicted.ttft_ns, placement.predicted.tbt_ns, orders
