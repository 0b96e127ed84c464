"""One iteration of the mixed worker on its compute thread: loads, computes all rows at once, stores, draws."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from halfmoon.schemas.sampling import SampledToken
from halfmoon.store.errors import StoreError
from halfmoon.workers import hold_points
from halfmoon.workers.mixed.actions import ChunkRows, LoadedBlocks, RunIteration
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.prefill.kept_prompts import KeptPrompts
from halfmoon.workers.sample_requests import next_token, request_of, token_of

if TYPE_CHECKING:
    from halfmoon.store.pool.segment import PoolView


class Made(NamedTuple):
    """Tokens of the rows that draw: of decodes, and of prompts that are whole."""

    decoded: list[SampledToken]
    first: list[SampledToken]
    #: Orders whose prompt was not computed, since it was kept.
    kept: frozenset[str]
    load_ns: int


def run(engine: Any, pool: PoolView | None, step: RunIteration, kept: KeptPrompts) -> Made:
    """On the compute thread. `kept`: this worker's."""
    if hold_points.PLACE is not None:
        for row in step.decodes:
            hold_points.reached(hold_points.DECODE_STEP, len(row.sequence.output), row.sequence.order_id)
    load_ns = 0
    if step.loads:
        started_ns = time.monotonic_ns()
        _load(engine, pool, step.loads)
        load_ns = time.monotonic_ns() - started_ns
    logits, ends, from_kept = _compute(engine, step, kept)
    if pool is not None:
        engine.synchronize()
        for chunk in step.chunks:
            _store(engine.cache, pool, chunk)
    first = [
        next_token(engine, end, chunk.sequence.sampling, chunk.sequence.prompt, [], chunk.scores)
        for chunk, end in zip(step.chunks, ends, strict=True)
        if chunk.draws
    ]
    return Made(_draw(engine, logits, step), first, from_kept, load_ns)


def _load(engine: Any, pool: PoolView | None, loads: Sequence[LoadedBlocks]) -> None:
    assert pool is not None, loads
    for layer in range(engine.cache.layers):
        for load in loads:
            for slot, block in load.blocks:
                engine.cache.write_block(layer, block, pool.layer_block(slot, layer))
    engine.synchronize()  # so that the time taken is that of the copies


def _compute(engine: Any, step: RunIteration, kept: KeptPrompts) -> tuple[Any, list[Any], frozenset[str]]:
    """The logits of the decodes and of each chunk's last token, and the orders whose prompt was not computed."""
    ends: dict[int, Any] = {}
    computed: list[int] = []
    #: Prompts of this iteration by key: the first one is computed, the others are copies of it.
    alike: dict[bytes, list[int]] = {}
    for place, chunk in enumerate(step.chunks):
        if not chunk.kept_key:
            computed.append(place)
        elif (end := kept.restore(chunk.kept_key, engine.cache, chunk.table[0])) is not None:
            ends[place] = end
        elif chunk.kept_key in alike:
            alike[chunk.kept_key].append(place)
        else:
            alike[chunk.kept_key] = []
            computed.append(place)
    logits = None
    if computed or step.decodes:
        chunks = [step.chunks[place] for place in computed]
        logits, made = engine.mixed(
            [PromptRows(each.token_ids, each.start, each.table, each.draws, each.scores) for each in chunks],
            [row.token_id for row in step.decodes],
            [row.position for row in step.decodes],
            [row.table for row in step.decodes],
        )
        ends.update(zip(computed, made, strict=True))
        for place, chunk in zip(computed, chunks, strict=True):
            if chunk.kept_key:
                kept.keep(chunk.kept_key, ends[place], engine.cache, chunk.table[0])
            # At once: of many prompts in one iteration few are kept to its end.
            for other in alike.get(chunk.kept_key, ()):
                ends[other] = kept.restore(chunk.kept_key, engine.cache, step.chunks[other].table[0])
    places = range(len(step.chunks))
    names = frozenset(step.chunks[place].sequence.order_id for place in places if place not in computed)
    return logits, [ends[place] for place in places], names


def _draw(engine: Any, logits: Any, step: RunIteration) -> list[SampledToken]:
    """Rows whose next token is known already draw too, and it is passed over."""
    if not any(row.draws for row in step.decodes):
        return []
    sequences = [row.sequence for row in step.decodes]
    requests = [
        request_of(engine, s.params, s.sampling, s.prompt, s.output, name=s.order_id) for s in sequences
    ]
    sampled = engine.sample_rows(logits, requests)
    return [
        token_of(engine, sampled[place], row.sequence.sampling, logits[place])
        for place, row in enumerate(step.decodes)
        if row.draws
    ]


def _store(cache: Any, pool: PoolView, chunk: ChunkRows) -> None:
    """Into slots that are still the order's: once they are another's, this prompt is not shared, and goes on."""
    order_id = chunk.sequence.order_id
    with contextlib.suppress(StoreError):
        for block, slot in chunk.stores:
            for layer in range(cache.layers):
                with pool.writing(slot, order_id):
                    cache.read_block(layer, block, pool.layer_block(slot, layer))
