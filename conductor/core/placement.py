"""What every candidate would give: the pure half of Algorithm 1.

`candidates` costs one prompt at every prefill worker, `decode_candidates` at every decode worker. They change
nothing, so that replay can call them to explain a decision. Which one is taken is up to `policy`.

Source: Mooncake (FAST'25), Algorithm 1; which blocks to fetch from where is in `fetching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from halfmoon.conductor.core.fetch_plan import (
    PrefixMatch,
    cheapest,
    load_from_own_ssd,
    plan_as_printed,
    unmeasured,
)
from halfmoon.conductor.core.load_index import LoadIndex, PrefillRow
from halfmoon.conductor.core.records import WorkerRecord
from halfmoon.conductor.core.state import State
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.policy import PolicyName
from halfmoon.schemas.types import KEY_BYTES

#: Policies that take the earliest first token, those that take the shortest decode step, and those that never
#: move blocks: they use what is on the node.
EARLIEST_POLICIES: tuple[PolicyName, ...] = ("halfmoon", "mooncake", "local_cache_aware")
LIGHTEST_POLICIES: tuple[PolicyName, ...] = (*EARLIEST_POLICIES, "least_loaded")
LOCAL_POLICIES: tuple[PolicyName, ...] = (
    "local_cache_aware",
    "least_loaded",
    "round_robin",
    "random",
    "dynamo",
)

#: So many of the least loaded workers are looked at first, and the holders of the longest match when there
#: are no more of them than so many: a first block may be everywhere.
FEW_WORKERS = 8
FEW_NODES = 32
#: Later than any first token.
NEVER_NS = 2**62
#: What is least in the worker that is taken: time to first token with the price of copies, transfer, orders,
#: place.
Rank = tuple[int, int, int, int]
NEVER: Rank = (NEVER_NS, 0, 0, 0)


class Candidate(msgspec.Struct, kw_only=True):
    """A prefill worker, and what the prompt would take there, from now on."""

    worker_id: str
    node_id: str
    queue_ns: int
    transfer_ns: int = 0
    prefill_ns: int
    ttft_ns: int
    #: Tokens (whole blocks) that need not be computed, and how many of those blocks are on the node already.
    cached_tokens: int
    cached_blocks: int
    local_blocks: int
    fetches: list[Fetch] = []
    fetch_sharing: int = 1
    #: Some of the blocks come from an SSD.
    from_ssd: bool = False
    #: Orders accepted before, blocks waiting to be computed, blocks of prompts in hand.
    orders: int
    pending_blocks: int
    prompt_blocks: int
    #: Blocks of this prompt that must be computed.
    uncached_blocks: int
    #: Price of one more copy of blocks that are elsewhere: time to compute what it displaces, as far as that
    #: is reused.
    copies_ns: int = 0
    #: Out of the choice, because its queue is as long as it may be.
    full: bool = False


class DecodeCandidate(msgspec.Struct, kw_only=True):
    """A decode worker with all that it has accepted, this request included."""

    worker_id: str
    node_id: str
    tbt_ns: int
    #: KV blocks that the request needs, and that are reserved before it; whether they fit.
    blocks: int
    reserved_blocks: int
    room: bool
    prefix_blocks: int
    sequences: int
    full: bool = False


def match(state: State, request: RequestArrived, now_ns: int) -> PrefixMatch:
    """The longest prefix that each readable node holds; suspected nodes hold nothing."""
    blocks_max = len(request.block_keys) // KEY_BYTES
    index = state.index
    runs = index.runs(request.block_keys, blocks_max)
    if runs and now_ns < state.loads.suspected_until_ns:
        runs = [
            (blocks, [node for node in nodes if not _suspected(state, node, now_ns)])
            for blocks, nodes in runs
        ]
        runs = [(blocks, nodes) for blocks, nodes in runs if nodes]
    dram_runs = index.runs(request.block_keys, blocks_max, dram_only=True) if index.has_ssd else runs
    return PrefixMatch(state, runs, dram_runs, now_ns)


def _suspected(state: State, node_id: str, now_ns: int) -> bool:
    store = state.stores.get(node_id)
    return store is not None and store.suspected_until_ns > now_ns


def queue_ns(worker: WorkerRecord, now_ns: int) -> int:
    """Predicted remaining time of all that a prefill worker has accepted; its oldest order is the one that
    runs.
    """
    if not worker.orders:
        return 0
    head_ns = worker.orders[next(iter(worker.orders))]
    return worker.reserved_ns - min(head_ns, max(0, now_ns - worker.head_since_ns))


def candidates(
    state: State, request: RequestArrived, matched: PrefixMatch, now_ns: int, *, avoid: Sequence[str] = ()
) -> list[Candidate]:
    """Every prefill worker that could take the request, by id, with its cost under the policy in force.

    Workers in `avoid` are left out unless there are no others. Empty when no worker is there or none can hold
    the prompt.
    """
    fitting = [
        worker
        for worker in state.workers.values()
        if worker.role == "prefill" and state.takes_orders(worker) and prefill_fits(worker, request)
    ]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [_candidate(state, worker, request.prompt_tokens, matched, now_ns) for worker in workers]


def earliest_first_token(
    state: State, request: RequestArrived, matched: PrefixMatch, now_ns: int
) -> Candidate | None:
    """What `policy.choose_prefill` would take of all `candidates`, under a policy that goes by the time to
    first token.

    No first token comes before the queue, computing what nobody holds, and the price of copies. Workers are
    looked at in the order of that bound, and no further than the best so far: in a large pool nearly all are
    passed over. None: there is no short way, look at them all.
    """
    policy, tokens, pool = state.policy, request.prompt_tokens, state.loads.prefill
    if tokens > pool.tokens_max or now_ns < state.at_ns:
        return None
    blocks = min(matched.longest, (tokens - 1) // pool.block_tokens) if pool.block_tokens else 0
    first = min(_bounds(state, matched, tokens, blocks, now_ns, _likely(pool, matched)))[-1]
    best: Candidate | None = None
    rank = NEVER
    if pool.rows[first].orders < policy.queued_max_per_worker:
        best = _candidate(state, pool.workers[first], tokens, matched, now_ns)
        rank = (best.ttft_ns + best.copies_ns, best.transfer_ns, best.orders, first)
    queue_max_ns = rank[0] - pool.least.prefill_ns(tokens, blocks * pool.block_tokens)
    places = [place for _, place in pool.up_to(now_ns + queue_max_ns) if place != first]
    idle = _Idle(state, tokens, matched, now_ns)
    for bound in sorted(_bounds(state, matched, tokens, blocks, now_ns, places, rank)):
        if bound > rank:
            break
        place = bound[-1]
        worker = pool.workers[place]
        if len(worker.orders) >= policy.queued_max_per_worker or idle.bound(worker, place) > rank:
            continue
        here = _candidate(state, worker, tokens, matched, now_ns)
        here_rank = (here.ttft_ns + here.copies_ns, here.transfer_ns, here.orders, place)
        if here_rank < rank:
            best, rank = here, here_rank
    return best


def _likely(pool: LoadIndex[PrefillRow], matched: PrefixMatch) -> list[int]:
    """Places of those of which one is mostly the best or nearly so: the least loaded, holders of the longest
    match.
    """
    places = [place for _, place in pool.by_load[:FEW_WORKERS]]
    if matched.dram_runs and len(matched.dram_runs[0][1]) <= FEW_NODES:
        for node_id in matched.dram_runs[0][1]:
            places += pool.on_node.get(node_id, ())
    return places


def _bounds(
    state: State,
    matched: PrefixMatch,
    tokens: int,
    blocks: int,
    now_ns: int,
    places: list[int],
    rank: Rank = NEVER,
) -> list[Rank]:
    """Of the ranks of prefill workers, up to `rank`: the queue, computing what is behind the longest match of
    `blocks`, and the price of copies."""
    pool, held = state.loads.prefill, matched.dram
    cached = blocks * pool.block_tokens
    found = []
    for place in places:
        worker = pool.workers[place]
        free_ns, behind_ns, orders = pool.rows[place]
        bound_ns = worker.cost.prefill_ns(tokens, cached) + max(behind_ns, free_ns - now_ns)
        if bound_ns <= rank[0]:
            lacking = blocks - min(held.get(worker.node_id, 0), blocks)
            if lacking:
                bound_ns += copies_ns(state, worker.cost, pool.block_tokens, lacking)
            found.append((bound_ns, 0, orders, place))
    return [bound for bound in found if bound < rank]


class _Idle:
    """Bounds for workers that are idle and hold nothing of a prompt: there may be many, and all alike.

    Such a worker does no better than one of the same cost to which every way is as fast as is expected of
    one, unless a faster way to it was measured.
    """

    __slots__ = ("_matched", "_now_ns", "_seen", "_state", "_tokens")

    def __init__(self, state: State, tokens: int, matched: PrefixMatch, now_ns: int) -> None:
        self._state, self._tokens, self._matched, self._now_ns = state, tokens, matched, now_ns
        self._seen: list[tuple[CostProfile, int, int]] = []

    def bound(self, worker: WorkerRecord, place: int) -> Rank:
        """Of its rank; zeros: not known."""
        state, matched = self._state, self._matched
        held = matched.held
        if (
            worker.orders
            or state.policy.name != "halfmoon"
            or worker.node_id in held
            or matched.dram is not held
        ):
            return 0, 0, 0, 0
        link_bytes_s = state.policy.link_bytes_s
        for node_id, link in state.loads.links_measured(worker.node_id, state.at_ns).items():
            if link.bytes_s > link_bytes_s and node_id in held:
                return 0, 0, 0, 0
        for cost, first_token_ns, transfer in self._seen:
            if cost == worker.cost:
                return first_token_ns, transfer, 0, place
        blocks_max = (self._tokens - 1) // worker.block_tokens if worker.block_bytes else 0
        first_token_ns, transfer = worker.cost.prefill_ns(self._tokens, 0), 0
        cut = (
            unmeasured(state, worker, self._tokens, matched, self._now_ns, blocks_max) if blocks_max else None
        )
        if cut is not None and cut.ttft_ns < first_token_ns:
            first_token_ns, transfer = cut.ttft_ns, cut.transfer_ns
        first_token_ns += copies_ns(state, worker.cost, worker.block_tokens, min(matched.longest, blocks_max))
        self._seen.append((worker.cost, first_token_ns, transfer))
        return first_token_ns, transfer, 0, place


def prefill_fits(worker: WorkerRecord, request: RequestArrived) -> bool:
    """Whether the worker's context and cache hold the prompt."""
    tokens = request.prompt_tokens
    if tokens > worker.context_tokens_max:
        return False
    return worker.block_bytes == 0 or -(-tokens // worker.block_tokens) <= worker.kv_blocks


def decode_fits(worker: WorkerRecord, request: RequestArrived) -> bool:
    """Whether the worker's context and cache hold prompt and answer."""
    tokens = request.prompt_tokens + request.max_tokens
    if tokens > worker.context_tokens_max:
        return False
    return worker.block_bytes == 0 or -(-tokens // worker.block_tokens) <= worker.kv_blocks


def _candidate(
    state: State, worker: WorkerRecord, tokens: int, matched: PrefixMatch, now_ns: int
) -> Candidate:
    policy = state.policy
    node_id = worker.node_id
    queue = queue_ns(worker, now_ns)
    # At least one token is computed: the last one's logits are needed.
    blocks_max = (tokens - 1) // worker.block_tokens if worker.block_bytes else 0
    local = min(matched.dram.get(node_id, 0), blocks_max)
    copies = copies_ns(state, worker.cost, worker.block_tokens, min(matched.longest, blocks_max) - local)
    cached, transfer, source, sharing, ssd = local, 0, "", 1, False
    prefill = worker.cost.prefill_ns(tokens, local * worker.block_tokens)
    ttft = queue + prefill
    if blocks_max and matched.longest > local:
        if policy.name in LOCAL_POLICIES:
            cut = load_from_own_ssd(state, worker, tokens, matched, now_ns, queue, local, blocks_max)
        elif policy.name == "mooncake":
            cut = plan_as_printed(state, worker, tokens, matched, now_ns, queue, blocks_max)
        else:
            cut = cheapest(state, worker, tokens, matched, now_ns, queue, local, blocks_max)
        if cut is not None and (cut.ttft_ns < ttft or policy.name == "mooncake"):
            cached, transfer, source, ssd = cut.blocks, cut.transfer_ns, cut.node_id, cut.from_ssd
            prefill, ttft, sharing, local = cut.prefill_ns, cut.ttft_ns, cut.sharing, cut.first_block
    fetches = []
    if source and cached > local:  # from this node itself: from its SSD
        replicas = replicas_of(matched, cached, 0 if ssd else policy.fetch_replicas, source, node_id)
        fetches.append(Fetch(node_id=source, first_block=local, blocks=cached - local, replicas=replicas))
    return Candidate(
        worker_id=worker.worker_id,
        node_id=node_id,
        queue_ns=queue,
        transfer_ns=transfer,
        prefill_ns=prefill,
        ttft_ns=ttft,
        cached_tokens=cached * worker.block_tokens,
        cached_blocks=cached,
        local_blocks=local,
        fetches=fetches,
        fetch_sharing=sharing,
        from_ssd=ssd,
        orders=len(worker.orders),
        pending_blocks=worker.pending_blocks,
        prompt_blocks=worker.prompt_blocks,
        uncached_blocks=-(-tokens // worker.block_tokens) - cached,
        copies_ns=copies,
        full=len(worker.orders) >= policy.queued_max_per_worker,
    )


def replicas_of(matched: PrefixMatch, blocks: int, count: int, *but: str) -> list[str]:
    """Up to `count` nodes that have the first `blocks` in DRAM, longest prefix first, without those in `but`."""
    if not count:
        return []
    held = (node for node, _, dram, _ in matched.sources(blocks - 1) if dram >= blocks and node not in but)
    return list(islice(held, count))


def copies_ns(state: State, cost: CostProfile, block_tokens: int, blocks: int) -> int:
    """Price of `blocks` that another node holds and this one will: in a full pool they displace as many
    others.

    Those would be reused as blocks are on average, each time in place of computing them. Only for policy
    `halfmoon`.
    """
    counters = state.counters
    if blocks <= 0 or not counters.prompt_tokens or state.policy.name != "halfmoon":
        return 0
    reused = counters.cached_local_tokens + counters.cached_fetched_tokens
    block_ns = cost.prefill_per_token_ps * block_tokens // 1_000
    return blocks * block_ns * reused // counters.prompt_tokens


# --- decode -------------------------------------------------------------------------------------------------


def decode_candidates(
    state: State,
    request: RequestArrived,
    matched: PrefixMatch,
    answer_tokens: int,
    *,
    avoid: Sequence[str] = (),
) -> list[DecodeCandidate]:
    """Every decode worker that could take the request, by id, with all reservations counted."""
    fitting = [
        worker
        for worker in state.workers.values()
        if worker.role == "decode" and state.takes_orders(worker) and decode_fits(worker, request)
    ]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    context = request.prompt_tokens + answer_tokens
    return [_decode_candidate(state, worker, matched, context) for worker in workers]


def _decode_candidate(
    state: State, worker: WorkerRecord, matched: PrefixMatch, context: int
) -> DecodeCandidate:
    blocks = decode_blocks(worker, context)
    sequences = len(worker.orders)
    return DecodeCandidate(
        worker_id=worker.worker_id,
        node_id=worker.node_id,
        tbt_ns=worker.cost.step_ns(sequences + 1, worker.context_tokens + context),
        blocks=blocks,
        reserved_blocks=worker.reserved_blocks,
        room=has_room(worker, sequences, worker.reserved_blocks, blocks),
        prefix_blocks=matched.held.get(worker.node_id, 0),
        sequences=sequences,
        full=sequences - worker.batch_max >= state.policy.queued_max_per_worker,
    )


class ShortestStep(msgspec.Struct):
    """The decode worker with the shortest step among those with room; no step is longer than `tbt_ns_max`."""

    best: DecodeCandidate
    tbt_ns_max: int


def shortest_step(
    state: State, request: RequestArrived, matched: PrefixMatch, answer_tokens: int
) -> ShortestStep | None:
    """What `policy.choose_decode` would take of all `decode_candidates`, under a policy that goes by the
    step.

    None: there is no short way, look at them all.
    """
    pool = state.loads.decode
    context = request.prompt_tokens + answer_tokens
    if not pool.block_tokens or request.prompt_tokens + request.max_tokens > pool.tokens_max:
        return None
    blocks = -(-context // pool.block_tokens)
    # A step with this context too: at least, and at most (both parts were cut to whole ns).
    least_ns = pool.least.decode_per_context_token_ps * context // 1_000
    most_ns = pool.most.decode_per_context_token_ps * context // 1_000 + 1
    limit_ns = NEVER_NS
    near = []
    for step, place in pool.by_load:
        if step > limit_ns:
            break
        if pool.rows[place].blocks_free >= blocks:
            limit_ns = min(limit_ns, step + most_ns - least_ns)
            worker = pool.workers[place]
            sequences, held = len(worker.orders), matched.held.get(worker.node_id, 0)
            tbt_ns = worker.cost.step_ns(sequences + 1, worker.context_tokens + context)
            near.append((tbt_ns, -held, sequences, place))
    if not near:
        return None
    best = pool.workers[min(near)[-1]]
    return ShortestStep(_decode_candidate(state, best, matched, context), pool.by_load[-1][0] + most_ns)


def decode_blocks(worker: WorkerRecord, context_tokens: int) -> int:
    return -(-context_tokens // worker.block_tokens) if worker.block_bytes else 0


def has_room(worker: WorkerRecord, sequences: int, reserved_blocks: int, blocks: int) -> bool:
    """Whether one more request fits beside `sequences` that hold `reserved_blocks`. A null engine has no KV
    to fit.
    """
    if worker.block_bytes == 0:
        return True
    return sequences < worker.batch_max and reserved_blocks + blocks <= worker.kv_blocks
