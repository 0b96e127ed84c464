"""Demand: the load of recent requests on each pool, refused ones too; and the refusals among it.

Kept in looks of a second, so that the oldest can be forgotten. Times are ns of the log.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.types import INT_MAX

LOOK_NS = 1 * SECOND_NS


class Look(msgspec.Struct):
    """Arrivals of one second: prompts to compute, and answers to decode."""

    begun_ns: int
    requests: int = 0
    #: Requests among them that prefill took too long for, and that decode had no room for.
    prefill_refused: int = 0
    decode_refused: int = 0
    #: Time to compute the uncached part.
    prefill_ns: int = 0
    answer_tokens: int = 0
    #: For each token of an answer, the tokens before it; and those that its request has reserved.
    context_steps: int = 0
    reserved_steps: int = 0


class Advice(msgspec.Struct):
    """A change of role that is due, and was not made: an operator is to decide."""

    worker_id: str
    role: WorkerRole
    since_ns: int
    reason: str


class Demand(msgspec.Struct, kw_only=True):
    """See the module."""

    #: Oldest first; none of nothing.
    looks: list[Look] = []
    #: The role that wants workers, and since when without a pause.
    wants: WorkerRole | Literal[""] = ""
    wants_since_ns: int = 0
    #: Roles that changed by load, and when one changed last, by whatever.
    changes: int = 0
    changed_ns: int = 0
    advice: Advice | None = None


def learn_demand(
    demand: Demand,
    now_ns: int,
    window_ns: int,
    *,
    prefill_ns: int,
    prompt_tokens: int,
    answer_tokens: int,
    prefill_refused: bool,
    decode_refused: bool,
) -> None:
    """Call it for each request that arrives."""
    looks = demand.looks
    if not looks or now_ns - looks[-1].begun_ns >= LOOK_NS:
        forget_demand(demand, now_ns, window_ns)
        looks.append(Look(now_ns))
    look = looks[-1]
    look.requests += 1
    look.prefill_refused += prefill_refused
    look.decode_refused += decode_refused
    # A worker may announce any cost, and a request any length: the sums stay numbers that a snapshot can hold.
    look.prefill_ns = min(look.prefill_ns + prefill_ns, INT_MAX)
    look.answer_tokens = min(look.answer_tokens + answer_tokens, INT_MAX)
    context_steps = answer_tokens * (prompt_tokens + answer_tokens // 2)
    look.context_steps = min(look.context_steps + context_steps, INT_MAX)
    reserved_steps = answer_tokens * (prompt_tokens + answer_tokens)
    look.reserved_steps = min(look.reserved_steps + reserved_steps, INT_MAX)


def forget_demand(demand: Demand, now_ns: int, window_ns: int) -> None:
    """Only the looks of the last `window_ns` stay."""
    while demand.looks and now_ns - demand.looks[0].begun_ns >= window_ns:
        del demand.looks[0]


def demand_of(demand: Demand, now_ns: int, window_ns: int) -> Look:
    """The sum of the last `window_ns`."""
    whole = Look(now_ns - window_ns)
    for look in demand.looks:
        if now_ns - look.begun_ns < window_ns:
            whole.requests += look.requests
            whole.prefill_refused += look.prefill_refused
            whole.decode_refused += look.decode_refused
            whole.prefill_ns += look.prefill_ns
            whole.answer_tokens += look.answer_tokens
            whole.context_steps += look.context_steps
            whole.reserved_steps += look.reserved_steps
    return whole
