"""Replication: a hot prefix gets another holder before the one that has it is a bottleneck.

A prefix is hot when, with the fetch that was just ordered, `Policy.hot_transfers` transfers leave its source at once.
Then one more node, the emptiest of those that lack it, gets an order to copy it. While the copy is on its way the next
request may order it again; an agent that has a block, or is fetching it, does nothing. A copy that nobody reads is
cold, and evicted first (`halfmoon.store.agent.replicas`).

Source: Mooncake (2407.00079), section 6.2 (cache load balancing); the rule is ours.
"""

from __future__ import annotations

from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.placement.prefix_match import transfers_leaving
from halfmoon.conductor.core.state.core_state import State
from halfmoon.schemas.decisions import ReplicateBlocks
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.types import KEY_BYTES


def copy_of_hot_prefix(state: State, request: RequestArrived, prefill: Candidate) -> ReplicateBlocks | None:
    """One more holder of the prefix that `prefill` fetches, when that is hot. Call it after the order is given."""
    hot = state.policy.hot_transfers
    if not hot or not prefill.fetches or prefill.from_ssd:
        return None
    source = prefill.fetches[0].node_id
    if transfers_leaving(state, source, state.at_ns) < hot:
        return None
    keys = request.block_keys[: prefill.cached_blocks * KEY_BYTES]
    # The last block stands for the chain: chains are evicted from their tail.
    holders = state.index.holders(keys[-KEY_BYTES:])
    lacking = [
        (store.slots_used * 1_000_000 // max(1, store.slots), store.node_id)
        for store in state.stores.values()
        if store.node_id not in (*holders, prefill.node_id) and store.suspected_until_ns <= state.at_ns
    ]
    if not lacking:
        return None
    _, target = min(lacking)
    return ReplicateBlocks(node_id=target, source_node_id=source, block_keys=keys, tenant=request.tenant)
