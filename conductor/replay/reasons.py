"""Why a candidate won, and what each other one lacked, in words: the order of choice of `core.policies`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from halfmoon.conductor.core.explanation import Explanation
from halfmoon.conductor.core.placement import Candidate, DecodeCandidate
from halfmoon.conductor.replay.text import duration

C = TypeVar("C", Candidate, DecodeCandidate)
#: What is compared, in words, and the value: smaller wins.
Measure = tuple[str, Callable[[C], int]]

_ID = "the smaller id"
_PREFILL: dict[str, list[Measure[Candidate]]] = {
    "first token + copies": [
        ("first token + copies", lambda c: c.ttft_ns + c.copies_ns),
        ("transfer", lambda c: c.transfer_ns),
        ("orders", lambda c: c.orders),
    ],
    "first token": [
        ("first token", lambda c: c.ttft_ns),
        ("transfer", lambda c: c.transfer_ns),
        ("orders", lambda c: c.orders),
    ],
    "queue": [("queue", lambda c: c.queue_ns), ("orders", lambda c: c.orders)],
    "blocks": [
        ("blocks to compute and in hand", lambda c: c.pending_blocks + c.prompt_blocks + c.uncached_blocks)
    ],
}
_DECODE: dict[str, list[Measure[DecodeCandidate]]] = {
    "tbt": [
        ("time between tokens", lambda c: c.tbt_ns),
        ("missing prefix blocks", lambda c: -c.prefix_blocks),
        ("sequences", lambda c: c.sequences),
    ],
    "blocks": [("KV blocks", lambda c: c.reserved_blocks + c.blocks), ("sequences", lambda c: c.sequences)],
}
_TIMES = ("first token + copies", "first token", "transfer", "queue", "time between tokens")
#: By which rule a policy chooses; policies that are not here draw, or take turns.
PREFILL_RULES: dict[str, list[Measure[Candidate]]] = {
    "halfmoon": _PREFILL["first token + copies"],
    "mooncake": _PREFILL["first token"],
    "local_cache_aware": _PREFILL["first token"],
    "least_loaded": _PREFILL["queue"],
    "dynamo": _PREFILL["blocks"],
}
DECODE_RULES: dict[str, list[Measure[DecodeCandidate]]] = {
    **dict.fromkeys(("halfmoon", "mooncake", "local_cache_aware", "least_loaded"), _DECODE["tbt"]),
    "dynamo": _DECODE["blocks"],
}


def prefill_reasons(why: Explanation, chosen: str) -> dict[str, str]:
    """For each candidate, and each worker that was none, why it was taken or not; `chosen` "": none was."""
    rule = PREFILL_RULES.get(why.policy, [])
    passed = {c.worker_id: "its queue is full" for c in why.prefill if c.full}
    return _reasons(why, why.prefill, rule, chosen, passed, why.last_chosen.get("prefill", ""))


def decode_reasons(why: Explanation, chosen: str) -> dict[str, str]:
    rule = DECODE_RULES.get(why.policy, [])
    passed = {c.worker_id: "its queue is full" for c in why.decode if c.full}
    if any(c.room and not c.full for c in why.decode):
        passed.update({c.worker_id: "no room for the KV" for c in why.decode if not c.room})
    return _reasons(why, why.decode, rule, chosen, passed, why.last_chosen.get("decode", ""))


def _reasons(
    why: Explanation,
    found: Sequence[C],
    rule: list[Measure[C]],
    chosen: str,
    passed: dict[str, str],
    last: str,
) -> dict[str, str]:
    winner = next((c for c in found if c.worker_id == chosen), None)
    reasons: dict[str, str] = {}
    for candidate in found:
        worker_id = candidate.worker_id
        if worker_id in passed and worker_id != chosen:
            reasons[worker_id] = passed[worker_id]
        elif winner is None:
            reasons[worker_id] = _refused(candidate, why)
        elif why.policy == "round_robin":
            reasons[worker_id] = f"next after {last or 'none'}" if candidate is winner else "not its turn"
        elif why.policy == "random":
            reasons[worker_id] = "drawn" if candidate is winner else "not drawn"
        elif candidate is not winner:
            reasons[worker_id] = _behind(candidate, winner, rule)
    if winner is not None and chosen not in reasons:
        rivals = [c for c in found if c is not winner and c.worker_id not in passed]
        reasons[chosen] = _ahead(winner, rivals, rule)
    return reasons


def _refused(candidate: Candidate | DecodeCandidate, why: Explanation) -> str:
    """Of a request that was refused, or waits."""
    if isinstance(candidate, Candidate):
        over, limit_ns = candidate.ttft_ns - why.ttft_limit_ns, why.ttft_limit_ns
    else:
        over, limit_ns = candidate.tbt_ns - why.tbt_limit_ns, why.tbt_limit_ns
    return f"{duration(over)} over the limit of {duration(limit_ns)}" if over > 0 else "within the limit"


def _behind(candidate: C, winner: C, rule: list[Measure[C]]) -> str:
    for name, measure in rule:
        more = measure(candidate) - measure(winner)
        if more:
            return f"{name} {_amount(name, more)} more"
    return f"equal; {winner.worker_id} has {_ID}"


def _ahead(winner: C, rivals: list[C], rule: list[Measure[C]]) -> str:
    if not rivals:
        return "the only one"
    for name, measure in rule:
        least = min(measure(rival) for rival in rivals)
        if measure(winner) < least:
            return f"least {name}, by {_amount(name, least - measure(winner))}"
        rivals = [rival for rival in rivals if measure(rival) == least]
    return f"equal to {', '.join(rival.worker_id for rival in rivals)}; {_ID}"


def _amount(name: str, value: int) -> str:
    return duration(value) if name in _TIMES else str(value)
