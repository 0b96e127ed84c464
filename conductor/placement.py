"""What every candidate would give: the pure half of Algorithm 1.

`candidates` costs one prompt at every prefill worker, `decode_candidates` at every decode worker. They change
nothing, so that replay can call them to explain a decision. Which one is taken is up to `policy`.

Source: Mooncake (FAST'25), Algorithm 1; partial fetch, the cost of both branches, layer-wise overlap and SSD are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from halfmoon.conductor.cost import LINK_STALE_NS, Link, prefill_ns, step_ns, transfer_ns
from halfmoon.conductor.state import State, Worker
from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.policy import PolicyName
from halfmoon.schemas.types import KEY_BYTES

#: Policies that never move blocks: they use what is on the node.
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


class Matched(msgspec.Struct, kw_only=True):
    """Blocks of a prompt by node: in any tier, and in DRAM; and the holders from which one may read, longest first."""

    held: dict[str, int]
    dram: dict[str, int]
    #: (node, blocks in any tier, blocks in DRAM, transfers that would leave it then).
    sources: list[tuple[str, int, int, int]]


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
        if worker.role == "prefill" and not worker.draining and prefill_fits(worker, request)
    ]
    workers = [worker for worker in fitting if worker.worker_id not in avoid] or fitting
    return [_candidate(state, worker, request.prompt_tokens, matched, now_ns) for worker in workers]


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
    cached, transfer, source, sharing, ssd = local, 0, "", 1, False
    prefill = prefill_ns(worker.cost, tokens, local * worker.block_tokens)
    ttft = queue + prefill
    if blocks_max and matched.sources and matched.sources[0][1] > local:
        if policy.name in LOCAL_POLICIES:
            cut = _load_from_own_ssd(state, worker, tokens, matched, now_ns, queue, local, blocks_max)
        elif policy.name == "mooncake":
            cut = _papers_rule(state, worker, tokens, matched, now_ns, queue, blocks_max)
        else:
            cut = _cheapest(state, worker, tokens, matched, now_ns, queue, local, blocks_max)
        if cut is not None and (cut.ttft_ns < ttft or policy.name == "mooncake"):
            cached, transfer, source, ssd = cut.blocks, cut.transfer_ns, cut.node_id, cut.from_ssd
            prefill, ttft, sharing, local = cut.prefill_ns, cut.ttft_ns, cut.sharing, cut.first_block
    fetches = []
    if source and source != node_id:
        fetches.append(Fetch(node_id=source, first_block=local, blocks=cached - local))
    elif source:
        local = cached
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
        full=len(worker.orders) >= policy.queued_max_per_worker,
    )


# --- where to cut ---------------------------------------------------------------------------------------------------


class Cut(msgspec.Struct):
    """Use the first `blocks` of the prompt, those that the instance lacks from `node_id`."""

    blocks: int
    node_id: str
    transfer_ns: int
    prefill_ns: int
    ttft_ns: int
    sharing: int
    from_ssd: bool
    #: The first block that is read.
    first_block: int


class _Source:
    """One holder, seen from one instance: what the first `c` blocks cost."""

    __slots__ = (
        "bytes_s",
        "dram",
        "latency_ns",
        "local",
        "node_id",
        "queue_ns",
        "sharing",
        "ssd_bytes_s",
        "tokens",
        "worker",
    )

    def __init__(
        self,
        state: State,
        worker: Worker,
        tokens: int,
        source: tuple[str, int, int, int],
        now_ns: int,
        queue: int,
        local: int,
    ) -> None:
        self.node_id, _, self.dram, self.sharing = source
        self.worker, self.tokens, self.queue_ns, self.local = worker, tokens, queue, local
        policy = state.policy
        self.latency_ns = policy.link_latency_ns
        self.bytes_s = link_bytes_s(state.links, worker.node_id, self.node_id, now_ns, policy.link_bytes_s)
        self.ssd_bytes_s = link_bytes_s(state.ssd_links, worker.node_id, self.node_id, now_ns, policy.ssd_bytes_s)

    def transfer_ns(self, blocks: int, block_bytes: int) -> int:
        """To read blocks local..blocks, `block_bytes` of each."""
        if blocks <= self.dram:
            return transfer_ns((blocks - self.local) * block_bytes, self.bytes_s, self.sharing, self.latency_ns)
        dram_bytes = max(0, self.dram - self.local) * block_bytes
        ssd_bytes = (blocks - max(self.dram, self.local)) * block_bytes
        return transfer_ns(dram_bytes, self.bytes_s, self.sharing, self.latency_ns) + transfer_ns(
            ssd_bytes, self.ssd_bytes_s, self.sharing, 0
        )

    def cut(self, blocks: int) -> Cut:
        """The first token when `blocks` are used: loading overlaps with the queue and, by layers, with computing."""
        worker = self.worker
        transfer = self.transfer_ns(blocks, worker.block_bytes)
        first_layer = self.transfer_ns(blocks, worker.layer_block_bytes)
        prefill = prefill_ns(worker.cost, self.tokens, blocks * worker.block_tokens)
        ttft = max(self.queue_ns, first_layer) + max(transfer, prefill)
        return Cut(blocks, self.node_id, transfer, prefill, ttft, self.sharing, blocks > self.dram, self.local)

    def best_cut(self, blocks: int) -> Cut:
        """The cheapest cut in local+1..blocks.

        With T (transfer) growing and P (prefill) falling with the cut, max(T, P) falls up to where they cross and
        grows after it. Left of the crossing the start (the first layer) is either hidden by the queue, and more is
        better, or grows in a straight line while P falls faster and faster: the best is at an end. So few cuts need a
        look.
        """
        whole = self.cut(blocks)
        cross = blocks
        if whole.transfer_ns > whole.prefill_ns:
            cross = self._first(blocks, self._transfer_reaches_prefill)
        best = whole if cross == blocks else self.cut(cross)
        if cross - 1 > self.local:
            best = _cheaper(best, self.cut(cross - 1))
        if self.transfer_ns(cross, self.worker.layer_block_bytes) > self.queue_ns and cross > self.local + 1:
            best = _cheaper(best, self.cut(self.local + 1))
            hidden = self._first(cross, self._first_layer_exceeds_queue) - 1
            if hidden > self.local:
                best = _cheaper(best, self.cut(hidden))
        if self.local < self.dram < cross:  # where the SSD begins, T bends
            best = _cheaper(best, self.cut(self.dram))
        return best

    def _first(self, blocks: int, reached: Callable[[int], bool]) -> int:
        """The first cut up to `blocks` for which `reached` holds; it holds at `blocks`."""
        low, high = self.local + 1, blocks
        while low < high:
            middle = (low + high) // 2
            if reached(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _transfer_reaches_prefill(self, blocks: int) -> bool:
        worker = self.worker
        prefill = prefill_ns(worker.cost, self.tokens, blocks * worker.block_tokens)
        return self.transfer_ns(blocks, worker.block_bytes) >= prefill

    def _first_layer_exceeds_queue(self, blocks: int) -> bool:
        return self.transfer_ns(blocks, self.worker.layer_block_bytes) > self.queue_ns


def _cheaper(one: Cut, other: Cut) -> Cut:
    """The earlier first token; of equals the shorter transfer, then the smaller id."""
    if (other.ttft_ns, other.blocks, other.node_id) < (one.ttft_ns, one.blocks, one.node_id):
        return other
    return one


def _cheapest(
    state: State, worker: Worker, tokens: int, matched: Matched, now_ns: int, queue: int, local: int, blocks_max: int
) -> Cut | None:
    """Ours: the best cut over all holders of more than is here; None when the threshold forbids a fetch."""
    best: Cut | None = None
    fastest = (0, 1)
    longest = min(matched.sources[0][1], blocks_max)
    fetching = longest * 100 > local * state.policy.fetch_threshold_percent
    for source in matched.sources:
        blocks = min(source[1], blocks_max)
        if blocks <= local:
            break  # longest first: no other has more
        if source[0] != worker.node_id and not fetching:
            continue
        if source[2] >= blocks and source[0] != worker.node_id:
            # A holder of no more, over no faster a way, is no better. (Compared per transfer that shares it.)
            bytes_s = link_bytes_s(state.links, worker.node_id, source[0], now_ns, state.policy.link_bytes_s)
            if bytes_s * fastest[1] <= fastest[0] * source[3]:
                continue
            fastest = (bytes_s, source[3])
        here = _Source(state, worker, tokens, source, now_ns, queue, local)
        if source[0] == worker.node_id:
            here.latency_ns = 0
        cut = here.best_cut(blocks)
        best = cut if best is None else _cheaper(best, cut)
    return best


def _papers_rule(
    state: State, worker: Worker, tokens: int, matched: Matched, now_ns: int, queue: int, blocks_max: int
) -> Cut | None:
    """Algorithm 1 as printed: fetch all of the best prefix when it is longer than the local one times the threshold."""
    local = min(matched.held.get(worker.node_id, 0), blocks_max)
    node_id, best, _, sharing = matched.sources[0]
    blocks = min(best, blocks_max)
    if node_id == worker.node_id or blocks * 100 <= local * state.policy.fetch_threshold_percent:
        if local <= matched.dram.get(worker.node_id, 0):
            return None
        prefill = prefill_ns(worker.cost, tokens, local * worker.block_tokens)
        return Cut(local, worker.node_id, 0, prefill, queue + prefill, 1, True, local)
    here = _Source(state, worker, tokens, matched.sources[0], now_ns, queue, local)
    transfer = here.transfer_ns(blocks, worker.block_bytes)
    prefill = prefill_ns(worker.cost, tokens, blocks * worker.block_tokens)
    return Cut(blocks, node_id, transfer, prefill, queue + transfer + prefill, sharing, blocks > here.dram, local)


def _load_from_own_ssd(
    state: State, worker: Worker, tokens: int, matched: Matched, now_ns: int, queue: int, local: int, blocks_max: int
) -> Cut | None:
    for source in matched.sources:
        if source[0] == worker.node_id and min(source[1], blocks_max) > local:
            here = _Source(state, worker, tokens, source, now_ns, queue, local)
            here.latency_ns = 0
            return here.best_cut(min(source[1], blocks_max))
    return None


def link_bytes_s(links: dict[str, dict[str, Link]], destination: str, source: str, now_ns: int, otherwise: int) -> int:
    """Bandwidth from `source` to `destination` as measured lately, or what is expected otherwise."""
    measured = links.get(destination)
    if measured is None:
        return otherwise
    link = measured.get(source)
    if link is None or now_ns - link.measured_ns > LINK_STALE_NS:
        return otherwise
    return link.bytes_s


# --- decode ---------------------------------------------------------------------------------------------------------


def decode_candidates(
    state: State, request: RequestArrived, matched: Matched, answer_tokens: int, *, avoid: Sequence[str] = ()
) -> list[DecodeCandidate]:
    """Every decode worker that could take the request, by id, with all reservations counted."""
    fitting = [
        worker
        for worker in state.workers.values()
        if worker.role == "decode" and not worker.draining and decode_fits(worker, request)
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
