"""Candidates that are one mixed worker each: a request's times where prompts and answers share iterations.

Beside a prompt's chunks go the decodes that the worker has, so a prompt takes as many decode steps longer as it takes
iterations; and beside the answer go chunks of other prompts, up to the token budget, wherever there are others.

Source: Sarathi-Serve (OSDI'24), sections 4.2 and 4.3: the time that a chunk adds to a decode's iteration, and the
reverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.conductor.core.placement.candidates import candidate_of
from halfmoon.conductor.core.placement.decode_candidates import decode_candidate_of, decode_fits
from halfmoon.conductor.core.placement.measures import Candidate, DecodeCandidate
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived


class MixedCandidate(msgspec.Struct, kw_only=True):
    """One mixed worker, costed for the prompt and for the answer."""

    prefill: Candidate
    decode: DecodeCandidate

    @property
    def worker_id(self) -> str:
        return self.prefill.worker_id

    @property
    def full(self) -> bool:
        """Out of the choice, because its queue is as long as it may be."""
        return self.prefill.full or self.decode.full

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """The least is chosen: first token with the price of copies, time between tokens, orders, id."""
        first_token_ns = self.prefill.ttft_ns + self.prefill.copies_ns
        return first_token_ns, self.decode.tbt_ns, self.prefill.orders, self.worker_id


def mixed_candidates(
    state: State,
    request: RequestArrived,
    match: PrefixMatch,
    now_ns: int,
    answer_tokens: int,
    *,
    avoid: Sequence[str] = (),
) -> list[MixedCandidate]:
    """Every mixed worker that could take the request, by id. Workers in `avoid` are left out unless there are no
    others.
    """
    fitting = [worker for worker in state.loads.mixed.workers if decode_fits(state, worker, request)]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [_candidate_of(state, worker, request, match, now_ns, answer_tokens) for worker in workers]


def _candidate_of(
    state: State,
    worker: WorkerRecord,
    request: RequestArrived,
    match: PrefixMatch,
    now_ns: int,
    answer_tokens: int,
) -> MixedCandidate:
    prefill = candidate_of(state, worker, request.prompt_tokens, match, now_ns)
    decode = decode_candidate_of(state, worker, match, request.prompt_tokens + answer_tokens)
    decoding = [order for order_id in worker.orders if (order := state.orders[order_id]).phase == "decode"]
    if decoding:
        computed = request.prompt_tokens - prefill.cached_tokens
        iterations = -(-computed // chunk_tokens(worker, len(decoding)))
        step_ns = worker.cost.step_ns(len(decoding), sum(order.decode.context_tokens for order in decoding))
        beside_ns = iterations * step_ns
        prefill = msgspec.structs.replace(
            prefill, prefill_ns=prefill.prefill_ns + beside_ns, ttft_ns=prefill.ttft_ns + beside_ns
        )
    if worker.orders:
        chunk_ns = worker.cost.prefill_ns(chunk_tokens(worker, len(worker.orders)), 0)
        decode = msgspec.structs.replace(decode, tbt_ns=decode.tbt_ns + chunk_ns)
    return MixedCandidate(prefill=prefill, decode=decode)


def chunk_tokens(worker: WorkerRecord, decoding: int) -> int:
    """Tokens of prompts in an iteration beside `decoding` decodes: whole blocks in exact numerics, one at least."""
    grain = worker.block_tokens if worker.layout.numerics == "exact" else 1
    assert worker.batch is not None, worker
    return max(grain, (worker.batch.token_budget - decoding) // grain * grain)
