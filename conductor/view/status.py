"""The state of the core for people: statuses of conductor and nodes, and counts."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.capacity import capacity, nowhere_to_hold_for
from halfmoon.conductor.core.placement.policies import installed
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.pool_needs import pool_needs
from halfmoon.conductor.core.state.records import splits_of
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.schemas.status import ConductorStatus, ElasticStatus, NodeStatus, PoolWanted, RequestCounts


def conductor_status(
    core: Core, *, conductor_id: str, caught_up: bool, unstored_ns: int = 0, with_digest: bool = False
) -> ConductorStatus:
    """The status of `core`, as of its last event. `with_digest`: which costs as much as the state is large."""
    state = core.state
    layout = next((worker.layout for worker in state.workers.values()), None)
    return ConductorStatus(
        conductor_id=conductor_id,
        seq=core.seq,
        digest=core.digest() if with_digest else "",
        caught_up=caught_up,
        policy=state.policy,
        plugins=installed(),
        model=layout.model if layout is not None else "",
        block_tokens=layout.block_tokens if layout is not None else 0,
        nodes=node_statuses(state),
        index_blocks=state.index.blocks,
        requests_in_flight=len(state.requests),
        requests_parked=len(state.parked),
        request_tokens_max=min(capacity(state)),
        counts=request_counts(state),
        paused=state.paused,
        weight_version=state.weight_version,
        unstored_ns=unstored_ns,
        elastic=elastic_status(state),
    )


def elastic_status(state: State) -> ElasticStatus:
    """Workers that the pools want now, whether or not anybody changes anything for it."""
    demand = state.demand
    advice = demand.advice
    return ElasticStatus(
        mode=state.policy.elastic,
        pools=[
            PoolWanted(role=role, wanted=need.wanted, workers=need.workers, needed=need.permille)
            for role, need in pool_needs(state).items()
        ],
        changes=demand.changes,
        advised_worker=advice.worker_id if advice is not None else "",
        advised_role=advice.role if advice is not None else "",
        advised_ns=advice.since_ns if advice is not None else 0,
        reason=advice.reason if advice is not None else "",
    )


def request_counts(state: State) -> RequestCounts:
    """Since the log began."""
    return msgspec.convert(msgspec.structs.asdict(state.counters), RequestCounts)


def ssd_counts(state: State) -> dict[str, int]:
    """Blocks that each node holds on SSD, nodes without any left out. Looks at all of them."""
    nodes, every = state.index.ssd_masks
    masks = Counter(every)
    found = {node: sum(masks[mask] for mask in masks if mask >> bit & 1) for bit, node in enumerate(nodes)}
    return {node: blocks for node, blocks in sorted(found.items()) if blocks}


def without_attention(state: State) -> dict[str, str]:
    """Why attention workers can hold no KV for a decode worker, by its id; "": they can, or it keeps its own."""
    return {
        worker.worker_id: nowhere_to_hold_for(state, worker)
        for worker in state.workers.values()
        if worker.batch is not None and worker.prompts is None
    }


def node_statuses(state: State) -> list[NodeStatus]:
    """Workers, store agents, frontends, each by id."""
    nodes = []
    for worker in state.workers.values():
        slow = slow_mark(state, worker)
        orders_state: Literal["ready", "draining"] = "draining" if worker.draining else "ready"
        nodes.append(
            NodeStatus(
                id=worker.worker_id,
                role=worker.role,
                state=orders_state,
                node_id=worker.node_id,
                queued=worker.report.queued,
                running=worker.report.running,
                kv_used=worker.report.kv_blocks_used,
                kv_total=worker.kv_blocks,
                kv_lent=sum(worker.lent.values()),
                orders=len(worker.orders),
                queue_ns=queue_ns(worker, state.at_ns),
                exact_numerics=worker.report.exact_numerics,
                may_become=worker.change.may_become,
                becomes=worker.change.becomes,
                slow_wait_ns=slow.waited_ns if slow is not None else 0,
                slow_expected_ns=slow.expected_ns if slow is not None else 0,
                groups=worker.batch.groups_seen if worker.batch is not None else 0,
                no_attention=nowhere_to_hold_for(state, worker),
                splits=splits_of(state.orders[order_id] for order_id in worker.orders),
            )
        )
    for node_id, store in sorted(state.stores.items()):
        nodes.append(
            NodeStatus(
                id=node_id,
                role="store",
                state="suspected" if store.suspected_until_ns > state.at_ns else "ready",
                node_id=node_id,
                kv_used=store.slots_used,
                kv_total=store.slots,
            )
        )
    for frontend_id, frontend in sorted(state.frontends.items()):
        nodes.append(
            NodeStatus(id=frontend_id, role="frontend", state="ready", running=frontend.open_requests)
        )
    return nodes
