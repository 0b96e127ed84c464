"""The reasons why a candidate won and each other one lost: the measures of the policy, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from halfmoon.conductor.core.admission import Placement, Refusal
from halfmoon.conductor.core.choice import way_rank
from halfmoon.conductor.core.explanation import Explanation
from halfmoon.conductor.core.placement.measures import (
    C,
    Candidate,
    CandidateMeasure,
    DecodeCandidate,
    MixedCandidate,
)
from halfmoon.conductor.core.placement.policies import (
    EARLIEST_TOKEN_MIXED,
    POLICIES,
    Drawn,
    InTurn,
    Least,
    mixed_rule,
)
from halfmoon.conductor.replay.text import duration

_ID = "the smaller id"


def prefill_reasons(why: Explanation, chosen: str) -> dict[str, str]:
    """Why each prefill candidate was taken or not, by worker; `chosen` "": none was taken."""
    choice = POLICIES[why.policy].prefill
    passed = {c.worker_id: "its queue is full" for c in why.prefill if c.full}
    return _reasons(why, why.prefill, choice, chosen, passed, why.last_chosen.get("prefill", ""))


def decode_reasons(why: Explanation, chosen: str) -> dict[str, str]:
    choice = POLICIES[why.policy].decode
    passed = {c.worker_id: "its queue is full" for c in why.decode if c.full}
    if any(c.room and not c.full for c in why.decode):
        passed.update({c.worker_id: "no room for the KV" for c in why.decode if not c.room})
    return _reasons(why, why.decode, choice, chosen, passed, why.last_chosen.get("decode", ""))


def mixed_reasons(why: Explanation, chosen: str) -> dict[str, str]:
    passed = {c.worker_id: "its queue is full" for c in why.mixed if c.full}
    if any(c.decode.room and not c.full for c in why.mixed):
        passed.update({c.worker_id: "no room for the KV" for c in why.mixed if not c.decode.room})
    second = isinstance(why.verdict, Placement) and why.verdict.by_first_token
    choice = EARLIEST_TOKEN_MIXED if second else mixed_rule(why.policy, why.mixed_by_policy)
    reasons = _reasons(why, why.mixed, choice, chosen, passed, why.last_chosen.get("mixed", ""))
    if second:
        reasons[chosen] += "; where it would delay others least, it would be refused"
    return reasons


def _reasons(
    why: Explanation,
    found: Sequence[C],
    choice: Least[C] | InTurn | Drawn,
    chosen: str,
    passed: dict[str, str],
    last: str,
) -> dict[str, str]:
    """By worker. `passed`: those that were out of the choice, and why; `last`: the worker chosen before."""
    winner = next((c for c in found if c.worker_id == chosen), None)
    rivals = [c for c in found if c is not winner and c.worker_id not in passed]
    reasons: dict[str, str] = {}
    for candidate in found:
        worker_id = candidate.worker_id
        if worker_id in passed and worker_id != chosen:
            reasons[worker_id] = passed[worker_id]
        elif winner is None and isinstance(why.verdict, Placement):
            reasons[worker_id] = "a mixed worker does both" if why.verdict.mixed else "a pair does it"
        elif winner is None:
            reasons[worker_id] = _refused(candidate, why)
        else:
            reasons[worker_id] = _compared(candidate, winner, rivals, choice, last)
    return reasons


def _compared(candidate: C, winner: C, rivals: list[C], choice: Least[C] | InTurn | Drawn, last: str) -> str:
    won = candidate is winner
    match choice:
        case Least():
            if won:
                return _ahead(winner, rivals, choice.measures)
            return _behind(candidate, winner, choice.measures)
        case InTurn():
            return f"next after {last or 'none'}" if won else "not its turn"
        case Drawn():
            return "drawn" if won else "not drawn"
        case _:
            assert_never(choice)


def _refused(candidate: C, why: Explanation) -> str:
    """The reason at a candidate of a request that was refused, or waits."""
    predicted: list[tuple[int, int]] = []
    if isinstance(candidate, Candidate | MixedCandidate):
        prefill = candidate.prefill if isinstance(candidate, MixedCandidate) else candidate
        predicted.append((prefill.ttft_ns, why.ttft_limit_ns))
    if isinstance(candidate, DecodeCandidate | MixedCandidate):
        decode = candidate.decode if isinstance(candidate, MixedCandidate) else candidate
        predicted.append((decode.tbt_ns, why.tbt_limit_ns))
    for predicted_ns, limit_ns in predicted:
        if predicted_ns > limit_ns:
            return f"{duration(predicted_ns - limit_ns)} over the limit of {duration(limit_ns)}"
    return "within the limit"


def _behind(candidate: C, winner: C, measures: Sequence[CandidateMeasure[C]]) -> str:
    for measure in measures:
        more = measure.of(candidate) - measure.of(winner)
        if more:
            return f"{measure.words} {_amount(measure, more)} more"
    return f"equal; {winner.worker_id} has {_ID}"


def _ahead(winner: C, rivals: list[C], measures: Sequence[CandidateMeasure[C]]) -> str:
    if not rivals:
        return "the only one"
    for measure in measures:
        own, least = measure.of(winner), min(measure.of(rival) for rival in rivals)
        if own < least:
            return f"least {measure.words}, by {_amount(measure, least - own)}"
        rivals = [rival for rival in rivals if measure.of(rival) == least]
    return f"equal to {', '.join(rival.worker_id for rival in rivals)}; {_ID}"


def _amount(measure: CandidateMeasure[C], value: int) -> str:
    match measure.unit:
        case "ns":
            return duration(value)
        case "count":
            return str(value)
        case _:
            assert_never(measure.unit)


def workers_text(prefill_id: str, decode_id: str) -> str:
    """A pair, or the one that does all."""
    return prefill_id if decode_id in ("", prefill_id) else f"{prefill_id} and {decode_id}"


def way_reason(why: Explanation) -> str:
    """Why one mixed worker was taken and not a pair, or the reverse; "": there was one way only."""
    verdict, other = why.verdict, why.other_way
    if not isinstance(verdict, Placement) or other is None:
        return ""
    if isinstance(other, Refusal):
        return f"{'a pair' if verdict.mixed else 'a mixed worker'} was refused: {other.message}"
    names = workers_text(other.prefill.worker_id, other.decode.worker_id)
    own, others = way_rank(verdict), way_rank(other)
    preferred = ", but mixed workers are preferred" if verdict.mixed and others < own else ""
    first, between, orders = (there - here for here, there in zip(own, others, strict=True))
    if first:
        word = f"{duration(abs(first))} {'later' if first > 0 else 'earlier'}"
        return f"not {names}: the first token would come {word}{preferred}"
    if between:
        word = f"{duration(abs(between))} {'more' if between > 0 else 'less'} between tokens"
        return f"not {names}: as early, with {word}{preferred}"
    if orders:
        word = f"{abs(orders)} {'more' if orders > 0 else 'fewer'} orders"
        return f"not {names}: as fast by what is predicted, with {word}{preferred}"
    return f"not {names}: nothing would be better there, and KV would move"
