"""The choice between a pair, which prefills here and decodes there, and one mixed worker that does both.

Each way is decided by its own rules first (`admission`, `mixed_admission`). What is possible goes before what is
refused; between two placements the earlier first token decides, then the shorter time between tokens, then the fewer
orders, then the mixed worker, between whose halves nothing moves. Where there are no mixed workers, all is as it was
before there were any.

`balanced` asks two things before: whether one way alone holds both objectives by what is predicted, and whether the
first tokens are nearly as early. A mixed worker's chunks make its tokens come twice as far apart, which is a high price
for a first token that comes a little earlier, by predictions that are off by as much.
"""

from __future__ import annotations

from halfmoon.conductor.core.admission import Placement, Refusal, decide, place_again
from halfmoon.conductor.core.mixed_admission import decide_mixed, mixed_again
from halfmoon.conductor.core.objectives import slo_ns
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Request
from halfmoon.schemas.events import RequestArrived

#: First tokens of which the later one takes so much more at most are nearly as early. Predictions of a busy host are
#: off by as much.
NEAR_PERCENT = 25


def choose(
    state: State, request: RequestArrived, now_ns: int, draw: str, *, waited_ns: int = 0
) -> Placement | Refusal:
    """A placement or a refusal for a request that was never placed, and has waited for a worker so long."""
    pair = decide(state, request, now_ns, draw, waited_ns=waited_ns)
    if not _mixed_may_be_chosen(state):
        return pair
    mixed = decide_mixed(state, request, now_ns, waited_ns=waited_ns)
    if isinstance(mixed, Refusal):
        # Of two refusals, that of who exists says more.
        none_there = isinstance(pair, Refusal) and pair.reason in ("no_worker", "too_long")
        return mixed if none_there else pair
    if isinstance(pair, Refusal) or state.policy.mixed_choice == "preferred":
        return mixed
    return _better(state, request, pair, mixed)


def both_ways(
    state: State, request: RequestArrived, now_ns: int, draw: str, *, waited_ns: int = 0
) -> tuple[Placement | Refusal, Placement | Refusal | None]:
    """Each way as it would be decided alone; None: no mixed worker is there, or none may be chosen."""
    pair = decide(state, request, now_ns, draw, waited_ns=waited_ns)
    if not _mixed_may_be_chosen(state):
        return pair, None
    return pair, decide_mixed(state, request, now_ns, waited_ns=waited_ns)


def _mixed_may_be_chosen(state: State) -> bool:
    return bool(state.loads.mixed.workers) and state.policy.mixed_choice != "never"


def choose_again(state: State, request: Request, now_ns: int, draw: str) -> Placement | None:
    """The best placement of a request that was accepted before, whatever it takes, with no worker that failed it where
    there are others; None when there is none.
    """
    pair = place_again(state, request, now_ns, draw)
    mixed = mixed_again(state, request, now_ns)
    if pair is None or mixed is None:
        return pair or mixed
    failed = [any(one in request.avoid for one in _workers(placement)) for placement in (pair, mixed)]
    if failed[0] != failed[1]:
        return mixed if failed[0] else pair
    if state.policy.mixed_choice == "preferred":
        return mixed
    return _better(state, request.event, pair, mixed)


def _workers(placement: Placement) -> tuple[str, str]:
    return placement.prefill.worker_id, placement.decode.worker_id


def _better(state: State, request: RequestArrived, pair: Placement, mixed: Placement) -> Placement:
    if state.policy.mixed_choice == "balanced":
        objectives_ns = slo_ns(state, request)
        if holds(pair, *objectives_ns) != holds(mixed, *objectives_ns):
            return pair if holds(pair, *objectives_ns) else mixed
        if nearly_as_early(pair, mixed):
            return mixed if way_rank(mixed)[1:] <= way_rank(pair)[1:] else pair
    return mixed if way_rank(mixed) <= way_rank(pair) else pair


def holds(placement: Placement, ttft_ns: int, tbt_ns: int) -> bool:
    """Both objectives are held, by what is predicted."""
    return placement.predicted.ttft_ns <= ttft_ns and placement.predicted.tbt_ns <= tbt_ns


def nearly_as_early(one: Placement, other: Placement) -> bool:
    earlier, later = sorted((one.predicted.ttft_ns, other.predicted.ttft_ns))
    return later * 100 <= earlier * (100 + NEAR_PERCENT)


def way_rank(placement: Placement) -> tuple[int, int, int]:
    """The least is better. Where nothing is predicted (the null engine) the number of orders tells the two apart."""
    orders = max(placement.prefill.orders, placement.decode.sequences)
    return placement.predicted.ttft_ns, placement.predicted.tbt_ns, orders
