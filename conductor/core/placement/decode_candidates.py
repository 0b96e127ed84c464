"""Decode candidates: the next step with a request in it at each decode worker.

`decode_candidates` costs it at all of them, `shortest_step` finds the one that most policies take without looking at
all: the answer is the same, which tests compare on random logs. They change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from halfmoon.conductor.core.placement.measures import DecodeCandidate
from halfmoon.conductor.core.placement.parts import Borrowing, borrowings, places_for
from halfmoon.conductor.core.placement.policies import SHORTEST_STEP, rules_of
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch
from halfmoon.conductor.core.placement.prices import Row, rows_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import tokens_max
from halfmoon.conductor.core.state.records import WorkerRecord, part_blocks
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.lending import KvPart

#: Longer than any step.
_NEVER_NS = 2**62


class DecodeChoice(NamedTuple):
    """Candidates among which the policy chooses."""

    found: list[DecodeCandidate]
    #: They are all that there are.
    complete: bool
    #: No worker that could take the request has a longer step.
    tbt_ns_max: int


def decodes_to_choose_from(
    state: State, request: RequestArrived, match: PrefixMatch, answer_tokens: int
) -> DecodeChoice:
    """The candidate that the policy would take, where it is known without looking at all, else all."""
    short = shortest_step(state, request, match, answer_tokens)
    if short is not None:
        return DecodeChoice([short.best], False, short.tbt_ns_max)
    found = decode_candidates(state, request, match, answer_tokens)
    return DecodeChoice(found, True, max((c.tbt_ns for c in found), default=0))


class ShortestStep(msgspec.Struct):
    """The decode worker with the shortest step among those with room; no worker's step is longer than `tbt_ns_max`."""

    best: DecodeCandidate
    tbt_ns_max: int


def shortest_step(
    state: State, request: RequestArrived, match: PrefixMatch, answer_tokens: int
) -> ShortestStep | None:
    """The candidate that `choose_decode` would take of all those with room.

    None when it is not known here: the policy chooses otherwise, workers differ in capacity, or none has room. Then all
    must be looked at.
    """
    index = state.loads.decode
    context = request.prompt_tokens + answer_tokens
    if rules_of(state).decode != SHORTEST_STEP or not index.block_tokens:
        return None
    # Rows have no part of a step's wait for attention elsewhere.
    if state.loads.priced:
        return None
    if request.prompt_tokens + request.max_tokens > index.tokens_max:
        return None
    blocks = -(-context // index.block_tokens)
    # Rows know the step without this request's context, which adds at least and at most this much. (One ns more, since
    # both parts were cut to whole ns.)
    least_ns = index.least.decode_per_context_token_ps * context // 1_000
    most_ns = index.most.decode_per_context_token_ps * context // 1_000 + 1
    limit_ns = _NEVER_NS
    near = []
    for step_ns, place in index.by_load:
        if step_ns > limit_ns:
            break
        if index.rows[place].blocks_free >= blocks:
            limit_ns = min(limit_ns, step_ns + most_ns - least_ns)
            worker = index.workers[place]
            sequences, held = len(worker.orders), match.held.get(worker.node_id, 0)
            tbt_ns = worker.cost.step_ns(sequences + 1, worker.context_tokens + context)
            near.append((tbt_ns, -held, sequences, place))
    if not near:
        return None
    best = index.workers[min(near)[-1]]
    return ShortestStep(decode_candidate_of(state, best, match, context), index.by_load[-1][0] + most_ns)


def decode_candidates(
    state: State,
    request: RequestArrived,
    match: PrefixMatch,
    answer_tokens: int,
    *,
    avoid: Sequence[str] = (),
) -> list[DecodeCandidate]:
    """Every decode worker that could take the request, by id, with all reservations counted; where none could alone,
    those that could with others' help.
    """
    fitting = [worker for worker in state.loads.decode.workers if decode_fits(state, worker, request)]
    context = request.prompt_tokens + answer_tokens
    if any(worker.cache_elsewhere for worker in fitting):
        trusted = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
        return list(_elsewhere_candidates(state, trusted, request, match, context))
    if not fitting:
        return [
            _borrowing_candidate(state, one, request, match, context)
            for one in borrowings(state, request, avoid=avoid)
        ]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [decode_candidate_of(state, worker, match, context) for worker in workers]


def decode_candidate_of(
    state: State,
    worker: WorkerRecord,
    match: PrefixMatch,
    context_tokens: int,
    *,
    loans: Sequence[KvPart] = (),
    cache: Sequence[KvPart] = (),
) -> DecodeCandidate:
    """One decode worker with a request of `context_tokens` (prompt and expected answer) on top of its load; `loans` and
    `cache` are the parts of its KV at other workers.
    """
    blocks = -(-context_tokens // worker.block_tokens) if worker.block_bytes else 0
    sequences = len(worker.orders)
    rows = [*rows_of(state, worker), Row(context_tokens, list(loans), list(cache))]
    price = step_price(state, worker, sequences + 1, worker.context_tokens + context_tokens, rows)
    return DecodeCandidate(
        worker_id=worker.worker_id,
        node_id=worker.node_id,
        tbt_ns=price.ns,
        waits_ns=price.waits_ns,
        groups=price.groups,
        loans=list(loans),
        cache=list(cache),
        blocks=blocks,
        reserved_blocks=worker.reserved_blocks,
        room=has_room(worker, sequences, worker.reserved_blocks, blocks),
        prefix_blocks=match.held.get(worker.node_id, 0),
        sequences=sequences,
        full=sequences - worker.batch_max >= state.policy.queued_max_per_worker,
    )


def _borrowing_candidate(
    state: State, borrowing: Borrowing, request: RequestArrived, match: PrefixMatch, context_tokens: int
) -> DecodeCandidate:
    worker, loans, room = borrowing
    # Not for the expected answer but for the longest: lenders can take no more later.
    blocks = -(-(request.prompt_tokens + request.max_tokens) // worker.block_tokens)
    blocks -= sum(part_blocks(worker.layout, loan) for loan in loans)
    candidate = decode_candidate_of(state, worker, match, context_tokens, loans=loans)
    return msgspec.structs.replace(candidate, blocks=blocks, room=room)


def _elsewhere_candidates(
    state: State, workers: Sequence[WorkerRecord], request: RequestArrived, match: PrefixMatch, context: int
) -> Iterator[DecodeCandidate]:
    """Those of the workers whose sequences find room where their KV lies, and those that keep it themselves."""
    for worker in workers:
        if not worker.cache_elsewhere:
            yield decode_candidate_of(state, worker, match, context)
        elif (found := places_for(state, worker, request)) is not None:
            room = found.room and len(worker.orders) < worker.batch_max
            candidate = decode_candidate_of(state, worker, match, context, cache=found.places)
            yield msgspec.structs.replace(candidate, blocks=0, room=room, cache_blocks=found.blocks)


def decode_fits(state: State, worker: WorkerRecord, request: RequestArrived) -> bool:
    """True when the worker's context and cache hold prompt and answer, and its node's pool the prompt."""
    if request.prompt_tokens > state.pool_tokens(worker):
        return False
    return request.prompt_tokens + request.max_tokens <= tokens_max(worker)


def has_room(worker: WorkerRecord, sequences: int, reserved_blocks: int, blocks: int) -> bool:
    """True when one more request fits beside `sequences` that hold `reserved_blocks`."""
    # A null engine has no KV to fit.
    if worker.block_bytes == 0:
        return True
    return sequences < worker.batch_max and reserved_blocks + blocks <= worker.kv_blocks
