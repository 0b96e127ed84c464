"""Whether KV of a similar prompt, or of documents, stands in for part of one, and from which nodes it is read.

Decided once the prefill worker is chosen, and only for requests that allow it: their quality is not that of others. It
must leave enough to spare: below some hundred tokens, matching costs more than it saves. A copy on the worker's own
node goes before another; otherwise the reference is read layer by layer while the prompt is computed. Documents that
the request names go before a prompt that is like it.

Source: SemShareKV (arXiv 2509.24832); CacheBlend (arXiv 2405.16444) for documents; the resemblance and the price are
ours.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from halfmoon.conductor.core.placement.fetch_plan import link_bytes_s
from halfmoon.conductor.core.placement.measures import Candidate
from halfmoon.conductor.core.placement.prefix_match import readable_runs
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import transfer_ns
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.similar import Reference, ReferencePart, expected_reuse, reuse_of
from halfmoon.schemas.types import KEY_BYTES

#: Matching, and products of fewer rows, cost so much of a whole prefill (measured on SmolLM2-135M, 722 tokens).
_AROUND_PERCENT = 10
#: A reference of which less is left is passed over.
_HELD_PERCENT_MIN = 75
#: The prefill must become shorter by so much.
_GAIN_PERCENT_MIN = 20
#: References that are looked at, the most alike first.
_LOOKS_MAX = 8


def with_reference(state: State, request: RequestArrived, chosen: Candidate, now_ns: int) -> Candidate:
    """The candidate with a reference, or as it is where none helps."""
    worker = state.workers[chosen.worker_id]
    if not (request.sketch or request.documents) or not _may_use(state, worker, request, chosen):
        return chosen
    tokens = request.prompt_tokens - chosen.cached_tokens
    parts, found = _documents(state, worker, request, chosen.cached_tokens, now_ns)
    if parts:
        reuse = reuse_of(tokens, found, 100 * found // tokens)
        reference = _reference(parts, reuse.resemblance, named=True)
        spared = _priced(state, chosen, reference, reuse.computed_tokens, tokens, now_ns)
        if spared.ttft_ns < chosen.ttft_ns:
            return spared
    alike = state.similar.like(request.tenant, request.sketch, state.policy.similar_percent_min)
    for percent, prompt in islice(alike, _LOOKS_MAX):
        part = _held(state, worker, prompt.block_keys, now_ns)
        if part is not None:
            reference = _reference([part], percent, named=False)
            computed = expected_reuse(tokens, percent).computed_tokens
            spared = _priced(state, chosen, reference, computed, tokens, now_ns)
            # Those that follow are less alike.
            return spared if spared.ttft_ns < chosen.ttft_ns else chosen
    return chosen


def _may_use(state: State, worker: WorkerRecord, request: RequestArrived, chosen: Candidate) -> bool:
    layout, least = worker.layout, state.policy.similar_tokens_min
    return bool(
        least
        and request.prompt_tokens - chosen.cached_tokens >= least
        and layout.numerics == "fast"
        and layout.token_layer_bytes
        and request.prompt_tokens <= worker.kv_blocks * worker.block_tokens
    )


def _documents(
    state: State, worker: WorkerRecord, request: RequestArrived, cached: int, now_ns: int
) -> tuple[list[ReferencePart], int]:
    """Those of the request behind its exact prefix that nodes have, and how many of its tokens they have in all."""
    parts: list[ReferencePart] = []
    taken: dict[bytes, bool] = {}
    found, reached = 0, cached
    for document in sorted(request.documents, key=lambda one: one.first_token):
        end = document.first_token + document.tokens
        known = state.similar.document(request.tenant, document.name)
        if known is None or end <= reached:
            continue
        # Two documents of one prompt have the block between them in common.
        keys = split_keys(known.block_keys)
        fresh = [place for place, key in enumerate(keys) if key not in taken]
        if not fresh or fresh[-1] - fresh[0] >= len(fresh):
            continue
        first, stop = fresh[0], fresh[-1] + 1
        part = _held(state, worker, known.block_keys[first * KEY_BYTES : stop * KEY_BYTES], now_ns)
        if part is not None:
            held = len(part.block_keys) // KEY_BYTES
            parts.append(msgspec.structs.replace(part, first_block=known.first_block + first))
            taken |= dict.fromkeys(keys[first : first + held], True)
            found += min(end - max(reached, document.first_token), held * worker.block_tokens)
            reached = end
    return parts, found


def _held(state: State, worker: WorkerRecord, block_keys: bytes, now_ns: int) -> ReferencePart | None:
    """The longest run of the blocks that a node has, on the worker's own node where that has as many."""
    whole = len(block_keys) // KEY_BYTES
    runs = readable_runs(state, block_keys, now_ns)
    if not runs or runs[0][0] * 100 < whole * _HELD_PERCENT_MIN:
        return None
    blocks, nodes = runs[0]
    first = worker.node_id if worker.node_id in nodes else nodes[0]
    others = [one for one in nodes if one != first]
    return ReferencePart(
        node_id=first,
        block_keys=block_keys[: blocks * KEY_BYTES],
        replicas=others[: state.policy.fetch_replicas],
    )


def _reference(parts: list[ReferencePart], resemblance: int, *, named: bool) -> Reference:
    first = parts[0]
    return Reference(
        node_id=first.node_id,
        block_keys=first.block_keys,
        replicas=first.replicas,
        first_block=first.first_block,
        resemblance=resemblance,
        named=named,
        others=parts[1:],
    )


def _priced(
    state: State, chosen: Candidate, reference: Reference, computed: int, tokens: int, now_ns: int
) -> Candidate:
    """As it is where too little is spared: `computed` of the `tokens` behind the prefix are computed all the same."""
    worker = state.workers[chosen.worker_id]
    percent = 100 * computed // tokens + _AROUND_PERCENT
    if percent > 100 - _GAIN_PERCENT_MIN:
        return chosen
    prefill_ns = chosen.prefill_ns * percent // 100
    read_ns, policy = 0, state.policy
    # One after the other, as the worker reads them.
    for part in reference.parts:
        if part.node_id != worker.node_id:
            bytes_s = link_bytes_s(state.links, worker.node_id, part.node_id, now_ns, policy.link_bytes_s)
            blocks = len(part.block_keys) // KEY_BYTES
            read_ns += transfer_ns(blocks * worker.block_bytes, bytes_s, 1, policy.link_latency_ns)
    return msgspec.structs.replace(
        chosen,
        prefill_ns=prefill_ns,
        ttft_ns=chosen.queue_ns + max(chosen.transfer_ns + read_ns, prefill_ns),
        stages=[],
        chunk_tokens=0,
        reference=reference,
    )
