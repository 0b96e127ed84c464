"""What every candidate would give: the pure half of Algorithm 1.

`candidates` costs one prompt at every prefill worker, `decode_candidates` at every decode worker. They change
nothing, so that replay can call them to explain a decision. Which one is taken is up to `policy`.

Source: Mooncake (FAST'25), Algorithm 1; which blocks to fetch from where is in `fetching`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.conductor.cost import prefill_ns, step_ns
from halfmoon.conductor.fetching import Matched, cheapest, load_from_own_ssd, papers_rule
from halfmoon.conductor.state import State, Worker
from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.policy import PolicyName
from halfmoon.schemas.types import KEY_BYTES

#: Policies that take the earliest first token; and those that never move blocks: they use what is on the node.
EARLIEST_POLICIES: tuple[PolicyName, ...] = ("halfmoon", "mooncake", "local_cache_aware")
LOCAL_POLICIES: tuple[PolicyName, ...] = ("local_cache_aware", "least_loaded", "round_robin", "random", "dynamo")


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
    #: Price of one more copy of blocks that are elsewhere: time to compute what it displaces, as far as that is reused.
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


def match(state: State, request: RequestArrived, now_ns: int) -> Matched:
    """The longest prefix that each readable node holds; suspected nodes hold nothing."""
    blocks_max = len(request.block_keys) // KEY_BYTES
    index = state.index
    held = index.match(request.block_keys, blocks_max)
    if not held:
        return Matched(held={}, dram={}, sources=[])
    for store in state.stores.values():
        if store.suspected_until_ns > now_ns:
            held.pop(store.node_id, None)
    dram = index.match_dram(request.block_keys, blocks_max) if index.has_ssd else held
    sources = [
        (node_id, blocks, dram.get(node_id, 0), 1 + leaving(state, node_id, now_ns)) for node_id, blocks in held.items()
    ]
    sources.sort(key=lambda source: (-source[1], source[0]))
    return Matched(held=held, dram=dram, sources=sources)


def leaving(state: State, node_id: str, now_ns: int) -> int:
    """Transfers that leave a node now."""
    ends = state.leaving.get(node_id)
    return sum(1 for end_ns in ends.values() if end_ns > now_ns) if ends else 0


def queue_ns(worker: Worker, now_ns: int) -> int:
    """Predicted remaining time of all that a prefill worker has accepted; its oldest order is the one that runs."""
    if not worker.orders:
        return 0
    head_ns = worker.orders[next(iter(worker.orders))]
    return worker.reserved_ns - min(head_ns, max(0, now_ns - worker.head_since_ns))


def candidates(
    state: State, request: RequestArrived, matched: Matched, now_ns: int, *, avoid: Sequence[str] = ()
) -> list[Candidate]:
    """Every prefill worker that could take the request, by id, with its cost under the policy in force.

    Workers in `avoid` are left out unless there are no others. Empty when no worker is there or none can hold the
    prompt.
    """
    fitting = [
        worker
        for worker in state.workers.values()
        if worker.role == "prefill" and takes_orders(state, worker) and prefill_fits(worker, request)
    ]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [_candidate(state, worker, request.prompt_tokens, matched, now_ns) for worker in workers]


class Earliest(msgspec.Struct):
    """The best of all prefill workers, and what a refusal needs to know of the others."""

    best: Candidate | None
    #: Workers that could take the request at all, and those of them whose queue is as long as it may be.
    found: int
    full: int
    #: The shortest time after which one more place is free.
    place_free_ns: int


def earliest(state: State, request: RequestArrived, matched: Matched, now_ns: int) -> Earliest:
    """What `policy.choose_prefill` would take of all `candidates`, under a policy that goes by the time to first token.

    No first token comes before the queue and computing what nobody holds. Workers are looked at in the order of that
    bound, and no further than the best so far: in a large pool nearly all are passed over.
    """
    policy, tokens = state.policy, request.prompt_tokens
    longest = matched.sources[0][1] if matched.sources else 0
    bounds: list[tuple[int, str]] = []
    found = full = 0
    place_free_ns = -1
    for worker in state.workers.values():
        if worker.role != "prefill" or not takes_orders(state, worker) or not prefill_fits(worker, request):
            continue
        found += 1
        queue = queue_ns(worker, now_ns)
        if len(worker.orders) >= policy.queued_max_per_worker:
            full += 1
            free_ns = queue // len(worker.orders)
            place_free_ns = free_ns if place_free_ns < 0 else min(place_free_ns, free_ns)
            continue
        blocks = min(longest, (tokens - 1) // worker.block_tokens) if worker.block_bytes else 0
        bound = queue + prefill_ns(worker.cost, tokens, blocks * worker.block_tokens)
        if blocks and policy.name == "halfmoon":
            bound += _copies_ns(state, worker, blocks - min(matched.dram.get(worker.node_id, 0), blocks))
        bounds.append((bound, worker.worker_id))
    bounds.sort()
    best: Candidate | None = None
    rank: tuple[int, int, int, str] = (0, 0, 0, "")
    for bound, worker_id in bounds:
        if best is not None and bound > rank[0]:
            break
        here = _candidate(state, state.workers[worker_id], tokens, matched, now_ns)
        here_rank = (here.ttft_ns + here.copies_ns, here.transfer_ns, here.orders, worker_id)
        if best is None or here_rank < rank:
            best, rank = here, here_rank
    return Earliest(best, found, full, place_free_ns)


def takes_orders(state: State, worker: Worker) -> bool:
    """Neither draining nor without its node's store agent, through which all its KVCache comes and goes."""
    return not worker.draining and (worker.block_bytes == 0 or worker.node_id in state.stores)


def prefill_fits(worker: Worker, request: RequestArrived) -> bool:
    """Whether the worker's context and cache hold the prompt."""
    tokens = request.prompt_tokens
    if tokens > worker.context_tokens_max:
        return False
    return worker.block_bytes == 0 or -(-tokens // worker.block_tokens) <= worker.kv_blocks


def decode_fits(worker: Worker, request: RequestArrived) -> bool:
    """Whether the worker's context and cache hold prompt and answer."""
    tokens = request.prompt_tokens + request.max_tokens
    if tokens > worker.context_tokens_max:
        return False
    return worker.block_bytes == 0 or -(-tokens // worker.block_tokens) <= worker.kv_blocks


def _candidate(state: State, worker: Worker, tokens: int, matched: Matched, now_ns: int) -> Candidate:
    policy = state.policy
    node_id = worker.node_id
    queue = queue_ns(worker, now_ns)
    # At least one token is computed: the last one's logits are needed.
    blocks_max = (tokens - 1) // worker.block_tokens if worker.block_bytes else 0
    local = min(matched.dram.get(node_id, 0), blocks_max)
    copies_ns = 0
    if policy.name == "halfmoon" and matched.sources:
        copies_ns = _copies_ns(state, worker, min(matched.sources[0][1], blocks_max) - local)
    cached, transfer, source, sharing, ssd = local, 0, "", 1, False
    prefill = prefill_ns(worker.cost, tokens, local * worker.block_tokens)
    ttft = queue + prefill
    if blocks_max and matched.sources and matched.sources[0][1] > local:
        if policy.name in LOCAL_POLICIES:
            cut = load_from_own_ssd(state, worker, tokens, matched, now_ns, queue, local, blocks_max)
        elif policy.name == "mooncake":
            cut = papers_rule(state, worker, tokens, matched, now_ns, queue, blocks_max)
        else:
            cut = cheapest(state, worker, tokens, matched, now_ns, queue, local, blocks_max)
        if cut is not None and (cut.ttft_ns < ttft or policy.name == "mooncake"):
            cached, transfer, source, ssd = cut.blocks, cut.transfer_ns, cut.node_id, cut.from_ssd
            prefill, ttft, sharing, local = cut.prefill_ns, cut.ttft_ns, cut.sharing, cut.first_block
    fetches = []
    if source and cached > local:  # from this node itself: from its SSD
        fetches.append(Fetch(node_id=source, first_block=local, blocks=cached - local))
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
        copies_ns=copies_ns,
        full=len(worker.orders) >= policy.queued_max_per_worker,
    )


def _copies_ns(state: State, worker: Worker, blocks: int) -> int:
    """Price of `blocks` that another node holds and this one will: in a full pool they displace as many others.

    Those would be reused as blocks are on average, each time in place of computing them.
    """
    counters = state.counters
    if blocks <= 0 or not counters.prompt_tokens:
        return 0
    reused = counters.cached_local_tokens + counters.cached_fetched_tokens
    block_ns = worker.cost.prefill_per_token_ps * worker.block_tokens // 1_000
    return blocks * block_ns * reused // counters.prompt_tokens


# --- decode ---------------------------------------------------------------------------------------------------------


def decode_candidates(
    state: State, request: RequestArrived, matched: Matched, answer_tokens: int, *, avoid: Sequence[str] = ()
) -> list[DecodeCandidate]:
    """Every decode worker that could take the request, by id, with all reservations counted."""
    fitting = [
        worker
        for worker in state.workers.values()
        if worker.role == "decode" and takes_orders(state, worker) and decode_fits(worker, request)
    ]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    context = request.prompt_tokens + answer_tokens
    queued_max = state.policy.queued_max_per_worker
    found = []
    for worker in workers:
        blocks = decode_blocks(worker, context)
        sequences = len(worker.orders)
        found.append(
            DecodeCandidate(
                worker_id=worker.worker_id,
                node_id=worker.node_id,
                tbt_ns=step_ns(worker.cost, sequences + 1, worker.context_tokens + context),
                blocks=blocks,
                reserved_blocks=worker.reserved_blocks,
                room=has_room(worker, sequences, worker.reserved_blocks, blocks),
                prefix_blocks=matched.held.get(worker.node_id, 0),
                sequences=sequences,
                full=sequences - worker.batch_max >= queued_max,
            )
        )
    return found


def decode_blocks(worker: Worker, context_tokens: int) -> int:
    return -(-context_tokens // worker.block_tokens) if worker.block_bytes else 0


def has_room(worker: Worker, sequences: int, reserved_blocks: int, blocks: int) -> bool:
    """Whether one more request fits beside `sequences` that hold `reserved_blocks`. A null engine has no KV to fit."""
    if worker.block_bytes == 0:
        return True
    return sequences < worker.batch_max and reserved_blocks + blocks <= worker.kv_blocks
