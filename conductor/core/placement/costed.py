"""A costed request: the inputs of a decision on one request, each computed once and passed on as one value.

`cost_request` matches the prefix, estimates the length of the answer, and costs the workers. Where the policy's order
has a bound, it costs one prefill and one decode candidate: the ones that the policy would take of all (`best_first`,
`shortest_step`); and one mixed worker (`least_mixed`). An explanation asks for every one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.conductor.core.placement.best_first import prefills_to_choose_from
from halfmoon.conductor.core.placement.candidates import candidates
from halfmoon.conductor.core.placement.decode_candidates import (
    decode_candidates,
    decodes_to_choose_from,
    has_room,
)
from halfmoon.conductor.core.placement.measures import NOBODY, Candidate, DecodeCandidate, MixedCandidate
from halfmoon.conductor.core.placement.mixed_candidates import least_mixed, mixed_candidates
from halfmoon.conductor.core.placement.policies import EARLIEST_TOKEN_MIXED, MixedRule, mixed_rule
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch, match_prefix
from halfmoon.conductor.core.placement.prices import Row, row_of
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import Answers, answer_class, expected_tokens
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.types import KEY_BYTES


class Load(msgspec.Struct, frozen=True):
    """The batch of a decode worker at some time."""

    sequences: int
    context_tokens: int
    blocks: int
    rows: tuple[Row, ...]


class Costed(msgspec.Struct, kw_only=True, eq=False):
    """A request at one time of the log. Valid within one step, until an order is given or freed."""

    state: State
    request: RequestArrived
    now_ns: int
    #: Names the choice, for policies that draw.
    draw: str
    #: Since it arrived.
    waited_ns: int
    #: Workers that are left out unless there are no others.
    avoid: Sequence[str]
    match: PrefixMatch
    answers: Answers | None
    answer_tokens: int
    #: By id: as many candidates as the choice needs, or all; and how many prefill workers there are to choose from.
    prefills: list[Candidate] = []
    all_prefills: bool = False
    prefill_workers: int = 0
    decodes: list[DecodeCandidate] = []
    all_decodes: bool = False
    #: No decode worker that could take it has a longer step.
    tbt_ns_max: int = 0
    #: As many as the choice needs, or all, and how many there are; None: there is none, or none may be chosen.
    mixed: list[MixedCandidate] | None = None
    all_mixed: bool = False
    mixed_workers: int = 0
    #: How one of them is chosen.
    mixed_rule: MixedRule = EARLIEST_TOKEN_MIXED
    loads: dict[tuple[str, int], Load] = {}

    @property
    def missing_key(self) -> bytes:
        """The key of its first block that no node has; b"": they have all its whole blocks."""
        start = self.match.longest * KEY_BYTES
        return self.request.block_keys[start : start + KEY_BYTES]

    @property
    def one_token(self) -> bool:
        """Its first token is its whole answer, and each prefill worker can give it: in pairs nobody decodes."""
        return bool(self.decodes) and self.decodes[0] is NOBODY

    def every_prefill(self) -> list[Candidate]:
        """Every prefill worker that could take it, by id."""
        if not self.all_prefills:
            self.prefills = candidates(self.state, self.request, self.match, self.now_ns, avoid=self.avoid)
            self.prefill_workers, self.all_prefills = len(self.prefills), True
        return self.prefills

    def every_decode(self) -> list[DecodeCandidate]:
        """Every decode worker that could take it, by id."""
        if not self.all_decodes:
            self.decodes = decode_candidates(
                self.state, self.request, self.match, self.answer_tokens, avoid=self.avoid
            )
            self.all_decodes = True
        return self.decodes

    def every_mixed(self) -> list[MixedCandidate]:
        """Every mixed worker that could take it, by id; [] where none may be chosen."""
        if self.mixed is None:
            return []
        if not self.all_mixed:
            self.mixed = mixed_candidates(
                self.state, self.request, self.match, self.now_ns, self.answer_tokens, avoid=self.avoid
            )
            self.mixed_workers, self.all_mixed = len(self.mixed), True
        return self.mixed

    def load_at(self, worker: WorkerRecord, end_ns: int) -> Load:
        """The batch of a decode worker at `end_ns` (admission `predicted`), or now."""
        load = self.loads.get((worker.worker_id, end_ns))
        if load is None:
            load = self.loads[worker.worker_id, end_ns] = self._load_at(worker, end_ns)
        return load

    def _load_at(self, worker: WorkerRecord, end_ns: int) -> Load:
        state = self.state
        predicted = state.policy.admission == "predicted"
        sequences = context_tokens = 0
        # When a loan ends is not predicted: it counts as long as it lasts.
        blocks = sum(worker.lent.values())
        rows: list[Row] = []
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
                sequences += 1
                context_tokens += half.context_tokens
                blocks += half.reserved_blocks
                if worker.priced:
                    rows.append(row_of(order))
        return Load(sequences, context_tokens, blocks, tuple(rows))

    def room_at(self, candidate: DecodeCandidate, end_ns: int) -> bool:
        """True where the candidate's worker will have room for it at `end_ns`."""
        worker = self.state.workers[candidate.worker_id]
        load = self.load_at(worker, end_ns)
        return has_room(worker, load.sequences, load.blocks, candidate.blocks)


def cost_request(
    state: State,
    request: RequestArrived,
    now_ns: int,
    draw: str,
    *,
    waited_ns: int = 0,
    avoid: Sequence[str] | None = None,
) -> Costed:
    """The request at `now_ns`. `avoid`: it was accepted before, and failed by these; it is placed whatever that costs,
    so every worker is costed.
    """
    answers = state.answers.get(answer_class(request.max_tokens))
    answer_tokens = expected_tokens(answers, request.max_tokens)
    match = match_prefix(state, request, now_ns)
    costed = Costed(
        state=state,
        request=request,
        now_ns=now_ns,
        draw=draw,
        waited_ns=waited_ns,
        avoid=avoid or (),
        match=match,
        answers=answers,
        answer_tokens=answer_tokens,
    )
    if request.max_tokens == 1 and state.policy.one_token_prefills and state.loads.prefills_answer:
        costed.decodes, costed.all_decodes = [NOBODY], True
    if avoid is None:
        _cost_for_choice(costed)
    else:
        costed.every_prefill()
        costed.every_decode()
    if state.loads.mixed.workers and state.policy.mixed_choice != "never":
        _cost_mixed(costed, bounded=avoid is None)
    return costed


def _cost_for_choice(costed: Costed) -> None:
    state, request, match = costed.state, costed.request, costed.match
    costed.prefills, costed.prefill_workers = prefills_to_choose_from(state, request, match, costed.now_ns)
    # One of several stands for all that were passed over.
    costed.all_prefills = len(costed.prefills) == costed.prefill_workers
    if not costed.one_token:
        costed.decodes, costed.all_decodes, costed.tbt_ns_max = decodes_to_choose_from(
            state, request, match, costed.answer_tokens
        )


def _cost_mixed(costed: Costed, *, bounded: bool) -> None:
    state, request, policy = costed.state, costed.request, costed.state.policy
    rule = costed.mixed_rule = mixed_rule(policy.name, policy.mixed_by_policy)
    costed.mixed, costed.all_mixed, costed.mixed_workers = [], False, len(state.loads.mixed.workers)
    if not bounded:
        costed.every_mixed()
        return
    least = least_mixed(state, request, costed.match, costed.now_ns, costed.answer_tokens, rule)
    if least is not None:
        costed.mixed.append(least)
    else:
        costed.every_mixed()


def cost_under(state: State, known: Costed) -> Costed:
    """The same request of `known`, where `state` differs in the policy's name alone."""
    costed = msgspec.structs.replace(known, state=state, loads={})
    _cost_for_choice(costed)
    if known.mixed is not None:
        _cost_mixed(costed, bounded=True)
    return costed
