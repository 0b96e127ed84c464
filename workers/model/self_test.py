"""Finds out whether exact mode holds here: serves one request in several ways, and compares bits.

Exact mode rests on products of one shape giving one result wherever their operands lie. That is a property of the
CPU, of the build of torch and of the number of threads, which no code can promise: so it is tried, once for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halfmoon.workers.model.engine import Engine, Tensor
from halfmoon.workers.model.loading.cache_files import cache_folder, held_lock, replace_file

AGAIN = "the same prompt computed again, in other blocks"
CACHED = "a prefix that came from a cache"
BATCHED = "a batch"
BLOCKS_MIN = 5
"""Free blocks that the test needs: two requests of two blocks and one of one."""

_STEPS = 2


def differing_ways(engine: Engine) -> list[str]:
    """The ways of serving a request that give other bits than serving it cold and alone; none where exact mode holds.

    Takes about a second with a model of 135 M parameters. Uses `BLOCKS_MIN` free blocks, and gives them back.
    """
    size = engine.block_tokens
    long = [(i * i * 31 + 17 * i) % (engine.config.vocab - 1) for i in range(size + max(1, size // 16))]
    short = long[-max(1, size // 16) :]
    blocks = engine.allocator.allocate(BLOCKS_MIN)
    first, second, third = blocks[:2], [blocks[3], blocks[2]], blocks[4:]
    found = []
    try:
        cold = _prefilled(engine, long, first)
        alone = [cold, *_decoded(engine, [long], [first])[0]]
        short_alone = [_prefilled(engine, short, third), *_decoded(engine, [short], [third])[0]]
        if _prefilled(engine, long, second) != cold:
            found.append(AGAIN)
        _move_block(engine, first[0], second[0])
        if _prefilled(engine, long, second, start=size) != cold:
            found.append(CACHED)
        # Other rows than alone, and a neighbour of another length.
        rows = _decoded(engine, [short, long], [third, second])
        if rows != [short_alone[1:], alone[1:]]:
            found.append(BATCHED)
    finally:
        engine.allocator.free(blocks)
    return found


def known_differing_ways(engine: Engine, key: str) -> list[str] | None:
    """`differing_ways`, from the cache folder where `key` was tried before; None where it cannot be tried.

    `key` names all that the answer depends on: model, dtype, CPU, threads and build of torch.
    """
    if engine.allocator.free_blocks < BLOCKS_MIN:
        return None
    path = cache_folder("profiles") / f"{key}.numerics.json"
    known = _read(path)
    if known is not None:
        return known
    with held_lock(path.with_suffix(".lock")):
        known = _read(path)
        if known is None:
            known = differing_ways(engine)
            text = json.dumps({"differing": known})
            replace_file(path, lambda place: place.write_text(text))
    return known


def _read(path: Path) -> list[str] | None:
    try:
        found = json.loads(path.read_text())["differing"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else None


def _prefilled(engine: Engine, prompt: Sequence[int], table: Sequence[int], *, start: int = 0) -> str:
    """Digest of the last token's logits after prefill of `prompt[start:]`, a block at a time."""
    logits: Tensor | None = None
    for at in range(start, len(prompt), engine.block_tokens):
        chunk = prompt[at : at + engine.block_tokens]
        logits = engine.prefill_chunk(chunk, at, table, want_logits=at + len(chunk) == len(prompt))
    assert logits is not None, (start, len(prompt))
    return engine.logits_digest(logits)


def _decoded(
    engine: Engine, prompts: Sequence[Sequence[int]], tables: Sequence[Sequence[int]]
) -> list[list[str]]:
    """Digests of the logits of `_STEPS` steps of one batch, by sequence."""
    digests: list[list[str]] = [[] for _ in prompts]
    for step in range(_STEPS):
        rows = engine.decode([7] * len(prompts), [len(prompt) + step for prompt in prompts], tables)
        for found, row in zip(digests, rows, strict=True):
            found.append(engine.logits_digest(row))
    return digests


def _move_block(engine: Engine, source: int, target: int) -> None:
    """As a block moves between nodes: raw bytes, layer by layer."""
    buffer = np.empty(engine.cache.layer_block_bytes, dtype=np.uint8)
    for layer in range(engine.config.layers):
        engine.cache.read_block(layer, source, buffer)
        engine.cache.write_block(layer, target, buffer)
