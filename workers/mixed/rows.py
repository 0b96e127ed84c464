"""Rows of an iteration, from the batch former's names to the compute thread's tokens, blocks and slots. Pure."""

from __future__ import annotations

from halfmoon.workers.batch_former import PromptChunk, PromptLoad
from halfmoon.workers.mixed.actions import ChunkRows, LoadedBlocks, NextRow
from halfmoon.workers.mixed.request import MixedRequest
from halfmoon.workers.prefill.prompt_chunks import kept_key


def decode_row(request: MixedRequest) -> NextRow:
    """The newest token that is not in the cache yet."""
    output = request.sequence.output
    return NextRow(
        sequence=request.sequence,
        table=request.sequence.table,
        token_id=output[request.drawn - 1],
        position=request.position,
        draws=request.drawn == len(output),
    )


def loaded_blocks(request: MixedRequest, load: PromptLoad) -> LoadedBlocks:
    """The blocks that end within the load: of a cached prefix all are whole."""
    size = request.job.rules.layout.block_tokens
    blocks = range(load.start // size, (load.start + load.tokens) // size)
    return LoadedBlocks(
        order_id=request.order_id,
        blocks=[(request.job.slots[block], request.sequence.table[block]) for block in blocks],
    )


def chunk_rows(request: MixedRequest, chunk: PromptChunk) -> ChunkRows:
    sequence, stop = request.sequence, chunk.start + chunk.tokens
    return ChunkRows(
        sequence=sequence,
        token_ids=sequence.prompt[chunk.start : stop],
        start=chunk.start,
        table=list(sequence.table),
        stores=_stores(request, chunk.start, stop),
        draws=chunk.last,
        kept_key=_kept_key(request, chunk),
        scores=None if request.answered else request.scores,
    )


def _kept_key(request: MixedRequest, chunk: PromptChunk) -> bytes:
    """A name for a prompt that is computed in one piece; one that was preempted and is computed again has none."""
    whole = chunk.start == 0 and chunk.tokens == len(request.sequence.prompt)
    if request.answered or not whole or request.scores is not None:
        return b""
    return kept_key(request.job)


def _stores(request: MixedRequest, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Blocks that are whole after these tokens, to slots that nobody reads yet."""
    job = request.job
    if request.answered or not job.rules.has_store:
        return ()
    size = job.rules.layout.block_tokens
    fixed = {*job.present, *request.stored}
    return tuple(
        (request.sequence.table[block], job.slots[block])
        for block in range(start // size, stop // size)
        if block not in fixed
    )
