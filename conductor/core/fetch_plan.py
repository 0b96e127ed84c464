"""Whether blocks of a prompt are fetched, up to where, and from whom.

Source: Mooncake (FAST'25), Algorithm 1, for the choice between fetching and computing; partial fetch, the
cost of both branches, layer-wise overlap and SSD are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from halfmoon.conductor.core.cost import LINK_STALE_NS, Link, transfer_ns
from halfmoon.conductor.core.records import WorkerRecord
from halfmoon.conductor.core.state import State

#: A run of blocks from the first, and the nodes that hold just so much.
Runs = list[tuple[int, list[str]]]


#: Destination, source: what links achieved.
Links = Mapping[str, Mapping[str, Link]]
#: A holder: node, blocks in any tier, blocks in DRAM, transfers that would leave it then.
Source = tuple[str, int, int, int]


class PrefixMatch:
    """Blocks of a prompt by node: in any tier, and in DRAM. Runs are longest first."""

    __slots__ = ("_now_ns", "_runs", "_state", "dram", "dram_runs", "held", "longest")

    def __init__(self, state: State, runs: Runs, dram_runs: Runs, now_ns: int) -> None:
        self.held = _by_node(runs)
        self.dram_runs = dram_runs
        self.dram = self.held if dram_runs is runs else _by_node(dram_runs)
        self.longest = runs[0][0] if runs else 0
        self._state, self._runs, self._now_ns = state, runs, now_ns

    def sources(self, more_than: int = 0) -> Iterator[Source]:
        """Holders of more blocks than that, longest first, then by id."""
        for blocks, nodes in self._runs:
            if blocks <= more_than:
                return
            for node_id in nodes:
                yield self._source(node_id, blocks)

    def undominated_sources(self, measured: Mapping[str, Link] | None, more_than: int) -> Iterator[Source]:
        """Those of `sources` that may be the best one, in the same order.

        Over a way that was not measured no holder is better than an earlier one from which nothing leaves: a
        first block may be everywhere. `measured`: ways to where it goes; None: not known.
        """
        if measured is None or self.dram is not self.held:
            yield from self.sources(more_than)
            return
        still = False
        for blocks, nodes in self._runs:
            if blocks <= more_than:
                return
            last_id = ""
            for node_id in nodes if not still else ():
                yield self._source(node_id, blocks)
                last_id = node_id
                still = node_id not in measured and node_id not in self._state.leaving
                if still:
                    break
            for node_id in sorted(measured):
                if node_id > last_id and self.held.get(node_id) == blocks:
                    yield self._source(node_id, blocks)

    def _source(self, node_id: str, blocks: int) -> Source:
        return node_id, blocks, self.dram.get(node_id, 0), 1 + leaving(self._state, node_id, self._now_ns)


def _by_node(runs: Runs) -> dict[str, int]:
    held: dict[str, int] = {}
    for blocks, nodes in runs:
        held.update(dict.fromkeys(nodes, blocks))
    return held


def leaving(state: State, node_id: str, now_ns: int) -> int:
    """Transfers that leave a node now."""
    ends = state.leaving.get(node_id)
    return sum(1 for end_ns in ends.values() if end_ns > now_ns) if ends else 0


class FetchPlan(msgspec.Struct):
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
        worker: WorkerRecord,
        tokens: int,
        source: Source,
        now_ns: int,
        queue: int,
        local: int,
        links: Links,
    ) -> None:
        self.node_id, _, self.dram, self.sharing = source
        self.worker, self.tokens, self.queue_ns, self.local = worker, tokens, queue, local
        policy = state.policy
        self.latency_ns = policy.link_latency_ns
        self.bytes_s = link_bytes_s(links, worker.node_id, self.node_id, now_ns, policy.link_bytes_s)
        self.ssd_bytes_s = link_bytes_s(
            state.ssd_links, worker.node_id, self.node_id, now_ns, policy.ssd_bytes_s
        )

    def transfer_ns(self, blocks: int, block_bytes: int) -> int:
        """To read blocks local..blocks, `block_bytes` of each."""
        if blocks <= self.dram:
            return transfer_ns(
                (blocks - self.local) * block_bytes, self.bytes_s, self.sharing, self.latency_ns
            )
        dram_bytes = max(0, self.dram - self.local) * block_bytes
        ssd_bytes = (blocks - max(self.dram, self.local)) * block_bytes
        return transfer_ns(dram_bytes, self.bytes_s, self.sharing, self.latency_ns) + transfer_ns(
            ssd_bytes, self.ssd_bytes_s, self.sharing, 0
        )

    def cut(self, blocks: int) -> FetchPlan:
        """The first token when `blocks` are used: loading overlaps with the queue and, by layers, with
        computing.
        """
        worker = self.worker
        transfer = self.transfer_ns(blocks, worker.block_bytes)
        first_layer = self.transfer_ns(blocks, worker.layer_block_bytes)
        prefill = worker.cost.prefill_ns(self.tokens, blocks * worker.block_tokens)
        ttft = max(self.queue_ns, first_layer) + max(transfer, prefill)
        return FetchPlan(
            blocks, self.node_id, transfer, prefill, ttft, self.sharing, blocks > self.dram, self.local
        )

    def best_plan(self, blocks: int) -> FetchPlan:
        """The cheapest cut in local+1..blocks.

        With T (transfer) growing and P (prefill) falling with the cut, max(T, P) falls up to where they cross
        and grows after it. Left of the crossing the start (the first layer) is either hidden by the queue,
        and more is better, or grows in a straight line while P falls faster and faster: the best is at an
        end. So few cuts need a look.
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
        prefill = worker.cost.prefill_ns(self.tokens, blocks * worker.block_tokens)
        return self.transfer_ns(blocks, worker.block_bytes) >= prefill

    def _first_layer_exceeds_queue(self, blocks: int) -> bool:
        return self.transfer_ns(blocks, self.worker.layer_block_bytes) > self.queue_ns


def _cheaper(one: FetchPlan, other: FetchPlan) -> FetchPlan:
    """The earlier first token; of equals the shorter transfer, then the smaller id."""
    if (other.ttft_ns, other.blocks, other.node_id) < (one.ttft_ns, one.blocks, one.node_id):
        return other
    return one


def cheapest(
    state: State,
    worker: WorkerRecord,
    tokens: int,
    matched: PrefixMatch,
    now_ns: int,
    queue: int,
    local: int,
    blocks_max: int,
) -> FetchPlan | None:
    """Ours: the best cut over all holders of more than is here; None when the threshold forbids a fetch."""
    measured = state.loads.links_measured(worker.node_id, state.at_ns) if now_ns >= state.at_ns else None
    sources = matched.undominated_sources(measured, local)
    return _cheapest(state, worker, tokens, matched, now_ns, queue, local, blocks_max, sources, state.links)


def unmeasured(
    state: State, worker: WorkerRecord, tokens: int, matched: PrefixMatch, now_ns: int, blocks_max: int
) -> FetchPlan | None:
    """As `cheapest`, were the worker idle, nothing on its node, and every way as fast as is expected of one."""
    sources = matched.undominated_sources({}, 0)
    return _cheapest(state, worker, tokens, matched, now_ns, 0, 0, blocks_max, sources, {})


def _cheapest(
    state: State,
    worker: WorkerRecord,
    tokens: int,
    matched: PrefixMatch,
    now_ns: int,
    queue: int,
    local: int,
    blocks_max: int,
    sources: Iterable[Source],
    links: Links,
) -> FetchPlan | None:
    best: FetchPlan | None = None
    fastest = (0, 1)
    if local >= blocks_max:
        return None
    fetching = min(matched.longest, blocks_max) * 100 > local * state.policy.fetch_threshold_percent
    for source in sources:
        blocks = min(source[1], blocks_max)
        if source[0] != worker.node_id and not fetching:
            continue
        if source[2] >= blocks and source[0] != worker.node_id:
            # A holder of no more, over no faster a way, is no better. (Compared per transfer that shares it.)
            bytes_s = link_bytes_s(links, worker.node_id, source[0], now_ns, state.policy.link_bytes_s)
            if bytes_s * fastest[1] <= fastest[0] * source[3]:
                continue
            fastest = (bytes_s, source[3])
        here = _Source(state, worker, tokens, source, now_ns, queue, local, links)
        if source[0] == worker.node_id:
            here.latency_ns = 0
        cut = here.best_plan(blocks)
        best = cut if best is None else _cheaper(best, cut)
    return best


def plan_as_printed(
    state: State,
    worker: WorkerRecord,
    tokens: int,
    matched: PrefixMatch,
    now_ns: int,
    queue: int,
    blocks_max: int,
) -> FetchPlan | None:
    """Algorithm 1 as printed: fetch all of the best prefix when it is longer than the local one times the
    threshold.
    """
    local = min(matched.held.get(worker.node_id, 0), blocks_max)
    source = next(matched.sources())
    node_id, best, _, sharing = source
    blocks = min(best, blocks_max)
    if node_id == worker.node_id or blocks * 100 <= local * state.policy.fetch_threshold_percent:
        dram = matched.dram.get(worker.node_id, 0)
        if local <= dram:
            return None
        prefill = worker.cost.prefill_ns(tokens, local * worker.block_tokens)
        return FetchPlan(local, worker.node_id, 0, prefill, queue + prefill, 1, True, dram)
    here = _Source(state, worker, tokens, source, now_ns, queue, local, state.links)
    transfer = here.transfer_ns(blocks, worker.block_bytes)
    prefill = worker.cost.prefill_ns(tokens, blocks * worker.block_tokens)
    return FetchPlan(
        blocks, node_id, transfer, prefill, queue + transfer + prefill, sharing, blocks > here.dram, local
    )


def load_from_own_ssd(
    state: State,
    worker: WorkerRecord,
    tokens: int,
    matched: PrefixMatch,
    now_ns: int,
    queue: int,
    local: int,
    blocks_max: int,
) -> FetchPlan | None:
    for source in matched.sources(local):
        if source[0] == worker.node_id and min(source[1], blocks_max) > local:
            here = _Source(state, worker, tokens, source, now_ns, queue, local, state.links)
            here.latency_ns = 0
            return here.best_plan(min(source[1], blocks_max))
    return None


def link_bytes_s(links: Links, destination: str, source: str, now_ns: int, otherwise: int) -> int:
    """Bandwidth from `source` to `destination` as measured lately, or what is expected otherwise."""
    measured = links.get(destination)
    if measured is None:
        return otherwise
    link = measured.get(source)
    if link is None or now_ns - link.measured_ns > LINK_STALE_NS:
        return otherwise
    return link.bytes_s
