"""Branch and bound: the prefill candidate that a policy would take, found without costing every worker.

In a large cluster nearly all workers are passed over. Each worker has a lower bound of its rank, cheap to compute;
workers are costed in the order of their bounds, until the next bound is no better than the best cost so far. The
answer is that of looking at all of them: tests compare the two, on random logs.

Only the orders of choice `EARLIEST_TOKEN` and `EARLIEST_TOKEN_WITH_COPIES` have bounds.
"""

# The method is the old one of operations research (Land and Doig, 1960), with one branching: the worker. Costing a
# prompt at a worker plans a fetch to it. The bound leaves the plan out: no first token comes before the queue is done
# and all behind the longest known prefix is computed.
#
# It is simpler than a search tree, since all branches are leaves and a sorted list is the whole queue. It is harder in
# one respect: the answer must be the very worker that a look at all of them gives, ties included, because replay
# explains a decision by costing all workers. So a rank ends in the worker's place by id, and every bound has that
# place too.
#
# Turned down:
# - Costing a few workers drawn at random (power of two choices): cheap and near the best, but another answer.
# - Keeping costs between requests: every order changes a queue, every block the matches, so little would stay valid.
# - Bounds for every policy: the other policies are there for comparison, and may cost more.
#
# In doubt: bounds are loose where all workers are idle and alike; `_IdleBound` is there for that case alone. With links
# measured faster than the policy's figure it bounds nothing, and many workers are costed.

from __future__ import annotations

from halfmoon.conductor.core.placement.candidates import (
    cached_blocks_max,
    candidate_of,
    candidates,
    coming_blocks,
    copies_ns,
    copies_rate,
)
from halfmoon.conductor.core.placement.fetch_plan import Prompt, plan_on_expected_links
from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.placement.policies import (
    EARLIEST_TOKEN,
    EARLIEST_TOKEN_WITH_COPIES,
    PolicyRules,
    rules_of,
)
from halfmoon.conductor.core.placement.prefix_match import PrefixMatch
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import LoadIndex, Row
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import RequestArrived

#: The bounds of this many of the least loaded workers are computed first, to have a good cost early.
FEW_WORKERS = 8
#: Holders of the longest match are costed first too, when they are no more than this: a first block may be everywhere.
FEW_NODES = 32
#: Later than any first token.
NEVER_NS = 2**62
#: The figures that orders of choice compare: first token with the price of copies, transfer, orders; then place by id.
Rank = tuple[int, int, int, int]
NEVER: Rank = (NEVER_NS, 0, 0, 0)
#: Bounds every rank.
NO_BOUND: Rank = (0, 0, 0, 0)


def prefills_to_choose_from(
    state: State, request: RequestArrived, match: PrefixMatch, now_ns: int
) -> tuple[list[Candidate], int]:
    """The policy's candidate, where it is known without looking at all, else every candidate; and their full number."""
    best = earliest_first_token(state, request, match, now_ns)
    if best is not None:
        return [best], len(state.loads.prefill.rows)
    found = candidates(state, request, match, now_ns)
    return found, len(found)


def earliest_first_token(
    state: State, request: RequestArrived, match: PrefixMatch, now_ns: int
) -> Candidate | None:
    """The candidate that `choose_prefill` would take of all those that are not full.

    None when it is not known here: the policy chooses otherwise, workers differ in capacity, or all are full. Then all
    must be looked at.
    """
    # The index is of the state's own time. A request that is explained at an earlier time is costed whole.
    policy, tokens, index = state.policy, request.prompt_tokens, state.loads.prefill
    if not _bounded(rules_of(state)) or tokens > index.tokens_max or now_ns < state.at_ns:
        return None
    blocks = min(match.longest, (tokens - 1) // index.block_tokens) if index.block_tokens else 0
    # A good cost at the start passes over the most: that of the best bound among those that mostly win.
    likely = likely_places(index, match)
    bounds = _lower_bounds(state, match, tokens, blocks, now_ns, likely)
    # A worker may announce any cost, so all of these may be beyond NEVER_NS.
    if not bounds:
        return None
    first = min(bounds)[-1]
    best: Candidate | None = None
    rank = NEVER
    if index.rows[first].orders < policy.queued_max_per_worker:
        best = candidate_of(state, index.workers[first], tokens, match, now_ns)
        rank = _rank(best, first)
    if len(likely) < len(index.rows):
        # A worker with more queued than this cannot be earlier, even at the least cost of any worker.
        most = max(match.coming.values(), default=0) * index.block_tokens
        cached = max(blocks * index.block_tokens, min(most, tokens))
        queue_max_ns = rank[0] - index.least.prefill_ns(tokens, cached)
        # Sorted by load, so this is a slice: the work is of the workers with short queues, not of the whole cluster.
        bounded = dict.fromkeys(likely)
        places = [place for _, place in index.up_to(now_ns + queue_max_ns) if place not in bounded]
        if places:
            bounds += _lower_bounds(state, match, tokens, blocks, now_ns, places, rank)
    idle = _IdleBound(state, tokens, match, now_ns)
    for bound in sorted(bounds):
        if bound > rank:
            break
        place = bound[-1]
        if place == first:
            continue
        worker = index.workers[place]
        if len(worker.orders) >= policy.queued_max_per_worker or idle.bound(worker, place) > rank:
            continue
        here = candidate_of(state, worker, tokens, match, now_ns)
        here_rank = _rank(here, place)
        if here_rank < rank:
            best, rank = here, here_rank
    return best


def _bounded(rules: PolicyRules) -> bool:
    """True where the lower bounds below are bounds of the policy's own figures."""
    if rules.prefill == EARLIEST_TOKEN_WITH_COPIES:
        return True
    # The bounds contain the price of copies: they bound a rank without it only where there is none.
    return rules.prefill == EARLIEST_TOKEN and not rules.copies_priced


def _rank(candidate: Candidate, place: int) -> Rank:
    return candidate.ttft_ns + candidate.copies_ns, candidate.transfer_ns, candidate.orders, place


def likely_places(index: LoadIndex[Row], match: PrefixMatch) -> list[int]:
    """Places of workers that mostly win or nearly so: the least loaded, and holders of the longest match."""
    places = [place for _, place in index.by_load[:FEW_WORKERS]]
    if len(places) == len(index.rows):
        return places
    if match.dram_runs and len(match.dram_runs[0][1]) <= FEW_NODES:
        for node_id in match.dram_runs[0][1]:
            places += index.on_node.get(node_id, ())
    places += index.places(match.coming)
    return list(dict.fromkeys(places))


def _lower_bounds(
    state: State,
    match: PrefixMatch,
    tokens: int,
    blocks: int,
    now_ns: int,
    places: list[int],
    rank: Rank = NEVER,
) -> list[Rank]:
    """Lower bounds of the ranks of the workers at `places`, those below `rank` only.

    No first token comes before the queue is done, and all behind the longest match of `blocks`, or behind what comes
    at the worker, is computed; the price of copies comes on top. The transfer is taken to be free.
    """
    index, held = state.loads.prefill, match.dram
    rows, limit_ns, found = index.rows, rank[0], []
    here, rate = coming_blocks(state, match), None
    # At the least cost of any worker: mostly that is enough to pass over one with a long queue.
    least_ns = index.least.prefill_ns(tokens, blocks * index.block_tokens)
    for place in places:
        worker = index.workers[place]
        free_ns, behind_ns, orders = rows[place]
        queue_ns = free_ns - now_ns
        if queue_ns < behind_ns:
            queue_ns = behind_ns
        coming = 0
        if worker.worker_id in here:
            coming = min(here[worker.worker_id], cached_blocks_max(worker, tokens))
        elif queue_ns + least_ns > limit_ns:
            continue
        cached = (coming if coming > blocks else blocks) * index.block_tokens
        bound_ns = queue_ns + worker.cost.prefill_ns(tokens, cached)
        if bound_ns <= limit_ns:
            lacking = blocks - max(held.get(worker.node_id, 0), coming)
            if lacking > 0:
                rate = rate or copies_rate(state)
                bound_ns += copies_ns(rate, worker.cost, index.block_tokens, lacking)
            bound = bound_ns, 0, orders, place
            if bound < rank:
                found.append(bound)
    return found


class _IdleBound:
    """A closer lower bound, for workers that are idle and hold nothing of the prompt: there may be many, all alike.

    It is the rank of an idle worker without the prefix, over links at the expected bandwidth; computed once for each
    cost profile. A worker to which a faster link was measured has no such bound.
    """

    __slots__ = ("_known", "_match", "_now_ns", "_state", "_tokens")

    def __init__(self, state: State, tokens: int, match: PrefixMatch, now_ns: int) -> None:
        self._state, self._tokens, self._match, self._now_ns = state, tokens, match, now_ns
        #: Cost profile, first token with the price of copies, transfer.
        self._known: list[tuple[CostProfile, int, int]] = []

    def bound(self, worker: WorkerRecord, place: int) -> Rank:
        """A lower bound of the worker's rank; NO_BOUND when none is known."""
        state, held = self._state, self._match.held
        if worker.orders or worker.node_id in held or self._match.dram is not held:
            return NO_BOUND
        # Other rules than the cheapest may give a rank that is better than their own plan on expected links.
        if rules_of(state).fetch != "cheapest":
            return NO_BOUND
        for node_id, link in state.loads.links_measured(worker.node_id, state.at_ns).items():
            if link.bytes_s > state.policy.link_bytes_s and node_id in held:
                return NO_BOUND
        for cost, first_token_ns, transfer_ns in self._known:
            if cost == worker.cost:
                return first_token_ns, transfer_ns, 0, place
        first_token_ns, transfer_ns = self._at_an_idle_worker(worker)
        self._known.append((worker.cost, first_token_ns, transfer_ns))
        return first_token_ns, transfer_ns, 0, place

    def _at_an_idle_worker(self, worker: WorkerRecord) -> tuple[int, int]:
        """First token with the price of copies, and transfer."""
        state, tokens, match = self._state, self._tokens, self._match
        limit = cached_blocks_max(worker, tokens)
        first_token_ns, transfer_ns = worker.cost.prefill_ns(tokens, 0), 0
        if limit:
            prompt = Prompt(worker, tokens, match, self._now_ns, queue_ns=0, local=0, limit=limit)
            plan = plan_on_expected_links(state, prompt)
            if plan is not None and plan.ttft_ns < first_token_ns:
                first_token_ns, transfer_ns = plan.ttft_ns, plan.transfer_ns
        blocks = min(match.longest, limit)
        first_token_ns += copies_ns(copies_rate(state), worker.cost, worker.block_tokens, blocks)
        return first_token_ns, transfer_ns
