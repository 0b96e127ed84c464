"""Fetch plans: whether blocks of a prompt are fetched to a prefill worker, up to where, and from which node.

Three rules, of which a policy has one (`plan_by`): `best_plan` (ours), `plan_as_printed` (the paper's),
`plan_from_own_ssd` (for policies that move nothing between nodes).

Source: Mooncake (FAST'25), Algorithm 1, for the choice between fetching and computing; partial fetch, the cost of
both branches, layer-wise overlap and SSD are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Literal, assert_never

import msgspec

from halfmoon.conductor.core.placement.prefix_match import FetchSource, PrefixMatch
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import LINK_STALE_NS, Link, transfer_ns
from halfmoon.conductor.core.state.records import WorkerRecord

#: `cheapest`: any part of the prefix, from whichever holder gives the earliest first token. `as_printed`: all of the
#: longest prefix, as in the paper. `local_only`: nothing moves between nodes.
FetchRule = Literal["cheapest", "as_printed", "local_only"]
#: Destination, source: bandwidths that were measured.
Links = Mapping[str, Mapping[str, Link]]


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt at one prefill worker: the inputs of a fetch plan."""

    worker: WorkerRecord
    tokens: int
    match: PrefixMatch
    now_ns: int
    #: Predicted wait before the worker starts on it.
    queue_ns: int
    #: Blocks in DRAM on the worker's node.
    local: int
    #: Blocks that may be cached at most: at least one token is computed.
    limit: int


class FetchPlan(msgspec.Struct):
    """Use the first `blocks` of the prompt; read those from `first_block` on from `node_id`."""

    blocks: int
    node_id: str
    transfer_ns: int
    prefill_ns: int
    ttft_ns: int
    #: Transfers that leave the source meanwhile, this one included.
    sharing: int
    from_ssd: bool
    first_block: int


def plan_by(rule: FetchRule, state: State, prompt: Prompt, computed_ns: int) -> FetchPlan | None:
    """The fetch plan by a policy's rule; None when computing, done after `computed_ns`, is as early."""
    match rule:
        case "cheapest":
            plan = best_plan(state, prompt)
        case "local_only":
            plan = plan_from_own_ssd(state, prompt)
        case "as_printed":
            # The printed rule compares lengths of prefixes only: its plan is taken though computing may be faster.
            return plan_as_printed(state, prompt)
        case _:
            assert_never(rule)
    return plan if plan is not None and plan.ttft_ns < computed_ns else None


def replicas_of(match: PrefixMatch, blocks: int, count: int, *but: str) -> list[str]:
    """Up to `count` nodes that have the first `blocks` in DRAM, longest prefix first, without those in `but`."""
    if not count:
        return []
    held = (
        source.node_id
        for source in match.sources(blocks - 1)
        if source.dram_blocks >= blocks and source.node_id not in but
    )
    return list(islice(held, count))


def best_plan(state: State, prompt: Prompt) -> FetchPlan | None:
    """The plan with the earliest first token over all holders of more than is local.

    None when nobody holds more, or the policy's threshold forbids a fetch.
    """
    worker_node = prompt.worker.node_id
    # Of a time in the past (a request that is explained) it is not known which links had been measured then.
    known = prompt.now_ns >= state.at_ns
    measured = state.loads.links_measured(worker_node, state.at_ns) if known else None
    sources = prompt.match.undominated_sources(measured, prompt.local)
    return _best_of(state, prompt, sources, state.links)


def plan_on_expected_links(state: State, prompt: Prompt) -> FetchPlan | None:
    """As `best_plan`, if every link had the bandwidth that the policy expects of one."""
    return _best_of(state, prompt, prompt.match.undominated_sources({}, prompt.local), {})


def _best_of(state: State, prompt: Prompt, sources: Iterable[FetchSource], links: Links) -> FetchPlan | None:
    if prompt.local >= prompt.limit:
        return None
    policy, worker_node = state.policy, prompt.worker.node_id
    longest = min(prompt.match.longest, prompt.limit)
    may_fetch = longest * 100 > prompt.local * policy.fetch_threshold_percent
    best: FetchPlan | None = None
    fastest = (0, 1)
    for source in sources:
        own = source.node_id == worker_node
        if not own and not may_fetch:
            continue
        blocks = min(source.blocks, prompt.limit)
        if not own and source.dram_blocks >= blocks:
            # Longer prefixes came first: a holder of no more blocks over no faster a link cannot be better. Bandwidths
            # are compared per transfer that shares them, cross-multiplied to stay integers.
            bytes_s = link_bytes_s(links, worker_node, source.node_id, prompt.now_ns, policy.link_bytes_s)
            if bytes_s * fastest[1] <= fastest[0] * source.sharing:
                continue
            fastest = (bytes_s, source.sharing)
        plan = _FetchCost(state, prompt, source, prompt.local, links).best(blocks)
        best = plan if best is None else _cheaper(best, plan)
    return best


def plan_as_printed(state: State, prompt: Prompt) -> FetchPlan | None:
    """Algorithm 1 as printed: fetch all of the longest prefix, if it is longer than the local one times the threshold.

    None: use the blocks in DRAM of the worker's node.
    """
    worker = prompt.worker
    local = min(prompt.match.held.get(worker.node_id, 0), prompt.limit)
    source = next(prompt.match.sources())
    blocks = min(source.blocks, prompt.limit)
    if source.node_id == worker.node_id or blocks * 100 <= local * state.policy.fetch_threshold_percent:
        dram = prompt.match.dram.get(worker.node_id, 0)
        if local <= dram:
            return None
        # The paper has one tier: blocks on the node's own SSD count as local, at no cost.
        prefill = worker.cost.prefill_ns(prompt.tokens, local * worker.block_tokens)
        return FetchPlan(
            blocks=local,
            node_id=worker.node_id,
            transfer_ns=0,
            prefill_ns=prefill,
            ttft_ns=prompt.queue_ns + prefill,
            sharing=1,
            from_ssd=True,
            first_block=dram,
        )
    # No overlap either: queue, transfer and prefill follow one another.
    transfer = _FetchCost(state, prompt, source, local, state.links).transfer_ns(blocks, worker.block_bytes)
    prefill = worker.cost.prefill_ns(prompt.tokens, blocks * worker.block_tokens)
    return FetchPlan(
        blocks=blocks,
        node_id=source.node_id,
        transfer_ns=transfer,
        prefill_ns=prefill,
        ttft_ns=prompt.queue_ns + transfer + prefill,
        sharing=source.sharing,
        from_ssd=blocks > source.dram_blocks,
        first_block=local,
    )


def plan_from_own_ssd(state: State, prompt: Prompt) -> FetchPlan | None:
    """The best plan that reads from the worker's own node only, whose blocks beyond the local ones are on SSD."""
    for source in prompt.match.sources(prompt.local):
        blocks = min(source.blocks, prompt.limit)
        if source.node_id == prompt.worker.node_id and blocks > prompt.local:
            return _FetchCost(state, prompt, source, prompt.local, state.links).best(blocks)
    return None


class _FetchCost:
    """The cost of the first n blocks of a prompt at one worker that reads those it lacks from one source."""

    __slots__ = (
        "bytes_s",
        "dram",
        "latency_ns",
        "layer_block_bytes",
        "local",
        "node_id",
        "queue_ns",
        "sharing",
        "ssd_bytes_s",
        "tokens",
        "worker",
    )

    def __init__(self, state: State, prompt: Prompt, source: FetchSource, local: int, links: Links) -> None:
        self.node_id, _, self.dram, self.sharing = source
        worker, policy, now_ns = prompt.worker, state.policy, prompt.now_ns
        self.worker, self.tokens, self.queue_ns, self.local = worker, prompt.tokens, prompt.queue_ns, local
        self.layer_block_bytes = worker.block_bytes // max(1, worker.layout.layers)
        self.latency_ns = policy.link_latency_ns if source.node_id != worker.node_id else 0
        self.bytes_s = link_bytes_s(links, worker.node_id, self.node_id, now_ns, policy.link_bytes_s)
        self.ssd_bytes_s = link_bytes_s(
            state.ssd_links, worker.node_id, self.node_id, now_ns, policy.ssd_bytes_s
        )

    def transfer_ns(self, blocks: int, block_bytes: int) -> int:
        """Time to read blocks local..blocks, `block_bytes` of each."""
        if blocks <= self.dram:
            return transfer_ns(
                (blocks - self.local) * block_bytes, self.bytes_s, self.sharing, self.latency_ns
            )
        dram_bytes = max(0, self.dram - self.local) * block_bytes
        ssd_bytes = (blocks - max(self.dram, self.local)) * block_bytes
        return transfer_ns(dram_bytes, self.bytes_s, self.sharing, self.latency_ns) + transfer_ns(
            ssd_bytes, self.ssd_bytes_s, self.sharing, 0
        )

    def plan(self, blocks: int) -> FetchPlan:
        """The plan that uses `blocks`. Loading overlaps with the queue and, layer by layer, with computing."""
        worker = self.worker
        transfer = self.transfer_ns(blocks, worker.block_bytes)
        first_layer = self.transfer_ns(blocks, self.layer_block_bytes)
        prefill = worker.cost.prefill_ns(self.tokens, blocks * worker.block_tokens)
        ttft = max(self.queue_ns, first_layer) + max(transfer, prefill)
        return FetchPlan(
            blocks, self.node_id, transfer, prefill, ttft, self.sharing, blocks > self.dram, self.local
        )

    def best(self, blocks: int) -> FetchPlan:
        """The cheapest plan that uses local+1 to `blocks` blocks; only a few of them need a look.

        With n blocks the transfer T(n) grows and the prefill P(n) falls, so max(T, P) falls up to where they cross and
        grows after it. Before the crossing the first layer is either hidden by the queue, and more blocks are better,
        or it grows in a straight line while P falls faster and faster: the best is at one of the ends.
        """
        whole = self.plan(blocks)
        cross = blocks
        if whole.transfer_ns > whole.prefill_ns:
            cross = self._first(blocks, self._transfer_reaches_prefill)
        best = whole if cross == blocks else self.plan(cross)
        if cross - 1 > self.local:
            best = _cheaper(best, self.plan(cross - 1))
        if self.transfer_ns(cross, self.layer_block_bytes) > self.queue_ns and cross > self.local + 1:
            best = _cheaper(best, self.plan(self.local + 1))
            hidden = self._first(cross, self._first_layer_exceeds_queue) - 1
            if hidden > self.local:
                best = _cheaper(best, self.plan(hidden))
        # Where the SSD begins T has a bend, which is one end more.
        if self.local < self.dram < cross:
            best = _cheaper(best, self.plan(self.dram))
        return best

    def _first(self, blocks: int, reached: Callable[[int], bool]) -> int:
        """The first number of blocks for which `reached` holds, by bisection; it holds at `blocks`."""
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
        return self.transfer_ns(blocks, self.layer_block_bytes) > self.queue_ns


def _cheaper(one: FetchPlan, other: FetchPlan) -> FetchPlan:
    """The earlier first token; of equals the shorter transfer, then the smaller id."""
    if (other.ttft_ns, other.blocks, other.node_id) < (one.ttft_ns, one.blocks, one.node_id):
        return other
    return one


def link_bytes_s(links: Links, destination: str, source: str, now_ns: int, expected: int) -> int:
    """Bandwidth from `source` to `destination` as measured not long ago, else `expected`."""
    measured = links.get(destination)
    if measured is None:
        return expected
    link = measured.get(source)
    if link is None or now_ns - link.measured_ns > LINK_STALE_NS:
        return expected
    return link.bytes_s
