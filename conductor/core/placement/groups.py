"""Groups of prefill workers that compute one prompt together: each has some layers, chunks flow through.

The worker that was chosen for the prompt has the last layers, the slots of its node's pool and the first token; idle
workers of the same layout join it, each with a range of layers before that. No worker with an order joins, and some of
the idle ones are left for the next request, so under load there are no groups; and each further worker must take off
enough of the time. A short prompt stays on one worker by the same rule: with few chunks the stages wait for each other.

Stage m has the share s_m of each chunk's time. The last stage ends no later than `max(s)·t + (1 - max(s))·c` after the
first began, t being the time of all chunks on one worker and c that of the longest one; with equal shares and chunks
that get longer (attention) just then.

Source: Mooncake (ARXIV), section 5.1 (chunked pipeline parallelism); the rule is ours.
"""

from __future__ import annotations

import msgspec

from halfmoon.conductor.core.placement.fetch_plan import link_bytes_s
from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import transfer_ns
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.decisions import LayerStage


def in_group(state: State, alone: Candidate, tokens: int, now_ns: int) -> Candidate:
    """The candidate with the workers that join it for a prompt of `tokens`; unchanged where none should."""
    most, last = _size_max(state), state.workers[alone.worker_id]
    if most < 2 or not _joins(state, last, last, tokens):
        return alone
    others = [
        worker
        for worker in state.loads.prefill.workers
        if worker is not last and _joins(state, worker, last, tokens)
    ]
    cached = alone.cached_tokens
    others.sort(key=lambda worker: worker.cost.prefill_ns(tokens, cached))
    best, times = alone, [alone.prefill_ns]
    for size in range(2, min(most, len(others) + 1, last.layout.layers) + 1):
        # The worker with the last layers also takes in all KV and draws the token: it has the fewest layers.
        members = [*others[: size - 1], last]
        chunk_tokens, prefill_ns = _best_chunks(state, members, tokens, cached, now_ns)
        times.append(prefill_ns)
        if prefill_ns * 100 <= best.prefill_ns * (100 - state.policy.group_gain_percent):
            best = msgspec.structs.replace(
                alone,
                prefill_ns=prefill_ns,
                ttft_ns=alone.queue_ns + max(alone.transfer_ns, prefill_ns),
                stages=_stages(members),
                chunk_tokens=chunk_tokens,
            )
    return msgspec.structs.replace(best, group_ns=times)


def _size_max(state: State) -> int:
    """The largest group at present.

    A request that comes while a group computes waits for all of it. So under `spare` as many workers as arrivals find
    busy on average stay out of the group, though they may idle at this moment. Without this a chat service's prompts,
    many of which arrive at once, waited 4 to 8 percent longer than without groups; with one standard deviation more of
    them no groups formed there.
    """
    most, workers = state.policy.prefill_group, state.loads.prefill.workers
    if state.policy.group_from == "idle":
        return most
    return min(most, (1_000 * len(workers) - state.offered.busy_permille + 500) // 1_000)


def _joins(state: State, worker: WorkerRecord, last: WorkerRecord, tokens: int) -> bool:
    return (
        worker.prompts is not None
        and bool(worker.prompts.stage_addresses)
        and not worker.orders
        and worker.layout == last.layout
        and worker.learning.enabled
        and tokens <= min(worker.kv_blocks * worker.block_tokens, worker.context_tokens_max)
        and state.takes_orders(worker)
    )


def _stages(members: list[WorkerRecord]) -> list[LayerStage]:
    """Layers as even as they can be, the first stages one more."""
    each, more = divmod(members[-1].layout.layers, len(members))
    stages, first = [], 0
    for place, worker in enumerate(members):
        assert worker.prompts is not None, worker
        layers = each + (place < more)
        stages.append(
            LayerStage(
                worker_id=worker.worker_id,
                first_layer=first,
                layers=layers,
                addresses=worker.prompts.stage_addresses,
            )
        )
        first += layers
    return stages


def _best_chunks(
    state: State, members: list[WorkerRecord], tokens: int, cached: int, now_ns: int
) -> tuple[int, int]:
    """Tokens of a chunk, and the time from the first chunk's begin to the last one's end."""
    block, last = members[-1].block_tokens, members[-1]
    sizes = [block]
    # In exact numerics several blocks may be one chunk only where rows are computed apart, which no worker tells.
    while last.layout.numerics == "fast" and sizes[-1] < tokens - cached:
        sizes.append(2 * sizes[-1])
    times = [(_pipeline_ns(state, members, tokens, cached, size, now_ns), size) for size in sizes]
    prefill_ns, size = min(times)
    return size, prefill_ns


def _pipeline_ns(
    state: State, members: list[WorkerRecord], tokens: int, cached: int, chunk: int, now_ns: int
) -> int:
    last, size = members[-1], len(members)
    layers = last.layout.layers
    widest = -(-layers // size)
    uncached = tokens - cached
    chunks = -(-uncached // chunk)
    begun = cached + (chunks - 1) * chunk
    # Stages are as fast as the slowest worker. In fast numerics each chunk has the fixed cost of a prefill again; in
    # exact ones the chunks are those that costs are measured with.
    base_ns = max(worker.cost.prefill_base_ns for worker in members)
    extra_ns = base_ns * (chunks - 1) if last.layout.numerics == "fast" else 0
    all_ns = max(worker.cost.prefill_ns(tokens, cached) for worker in members) - base_ns + extra_ns
    # The last chunk may be short.
    ends = [(tokens, begun), (begun, begun - chunk)] if chunks > 1 else [(tokens, begun)]
    longest_ns = max(worker.cost.prefill_ns(*end) for worker in members for end in ends) - base_ns
    compute_ns = base_ns + (widest * all_ns + (layers - widest) * longest_ns) // layers
    policy = state.policy
    kv_bytes = last.layout.token_layer_bytes
    hop_ns = link_ns = prefix_ns = 0
    for place, worker in enumerate(members[:-1]):
        assert worker.prompts is not None, worker
        activation_bytes = worker.prompts.activation_bytes
        bytes_s = link_bytes_s(state.links, last.node_id, worker.node_id, now_ns, policy.link_bytes_s)
        sent = widest * kv_bytes + activation_bytes
        # The KV of all stages comes over the last one's link.
        link_ns += transfer_ns(uncached * sent, bytes_s, 1, 0)
        prefix_ns += transfer_ns(cached * widest * kv_bytes, bytes_s, 1, 0)
        # By way of the last stage, which all have a channel to.
        hops = 1 if place == len(members) - 2 else 2
        hop_ns += hops * transfer_ns(
            min(chunk, uncached) * activation_bytes, bytes_s, 1, policy.link_latency_ns
        )
    return max(compute_ns, link_ns) + hop_ns + prefix_ns
