"""The choice between a pair, which prefills here and decodes there, and one mixed worker that does both.

Each way is decided by its own rules first (`admission`, `mixed_admission`). What is possible goes before what is
refused; between two placements the earlier first token decides, then the shorter time between tokens, then the fewer
orders, then the mixed worker, between whose halves nothing moves. Where there are no mixed workers, all is as it was
before there were any.
"""

from __future__ import annotations

from halfmoon.conductor.core.admission import Placement, Refusal, decide, place_again
from halfmoon.conductor.core.mixed_admission import decide_mixed, mixed_again
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Request
from halfmoon.schemas.events import RequestArrived


def choose(
    state: State, request: RequestArrived, now_ns: int, draw: str, *, waited_ns: int = 0
) -> Placement | Refusal:
    """A placement or a refusal for a request that was never placed, and has waited for a worker so long."""
    pair, mixed = both_ways(state, request, now_ns, draw, waited_ns=waited_ns)
    if mixed is None:
        return pair
    if isinstance(mixed, Refusal):
        # Of two refusals, that of who exists says more.
        none_there = isinstance(pair, Refusal) and pair.reason in ("no_worker", "too_long")
        return mixed if none_there else pair
    if isinstance(pair, Refusal) or state.policy.mixed_choice == "preferred":
        return mixed
    return _better(pair, mixed)


def both_ways(
    state: State, request: RequestArrived, now_ns: int, draw: str, *, waited_ns: int = 0
) -> tuple[Placement | Refusal, Placement | Refusal | None]:
    """Each way as it would be decided alone; None: no mixed worker is there, or none may be chosen."""
    pair = decide(state, request, now_ns, draw, waited_ns=waited_ns)
    if not state.loads.mixed.workers or state.policy.mixed_choice == "never":
        return pair, None
    return pair, decide_mixed(state, request, now_ns, waited_ns=waited_ns)


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
    return _better(pair, mixed)


def _workers(placement: Placement) -> tuple[str, str]:
    return placement.prefill.worker_id, placement.decode.worker_id


def _better(pair: Placement, mixed: Placement) -> Placement:
    return mixed if way_rank(mixed) <= way_rank(pair) else pair


def way_rank(placement: Placement) -> tuple[int, int, int]:
    """The least is better. Where nothing is predicted (the null engine) the number of orders tells the two apart."""
    orders = max(placement.prefill.orders, placement.decode.sequences)
    return placement.predicted.ttft_ns, placement.predicted.tbt_ns, orders
