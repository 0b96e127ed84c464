"""Finds out whether exact mode holds here: serves one request in several ways, and compares bits.

Exact mode rests on kernels that give one result wherever their operands lie. That is a property of the CPU, of the
build of torch and of the number of threads, which no code can promise: so it is tried, once for each.

So are products of fewer rows, where they are not the row kernel's. Padded to a whole group, those of one sequence take
up to twice their time. A library may add up a product of fewer rows in another order, and does so for some shapes only:
AVX-512 kernels of oneDNN for one row of 1,536 inputs in f32, but not for two. The numbers of rows that change no bit
are found out here.

Fewer rows may take longer all the same: on AMD's Zen 4 a step's products of oneDNN in f32 take 1.2 times as long with
one row as with four to six, and 1.3 times with two. So the numbers are timed as well, in fast numerics too, where any
will do.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from halfmoon.workers.model.engine import Engine, Tensor
from halfmoon.workers.model.loading.cache_files import cache_folder, held_lock, replace_file

AGAIN = "the same prompt computed again, in other blocks"
TOGETHER = "blocks of a prompt computed together"
CACHED = "a prefix that came from a cache"
BATCHED = "a batch"
BLOCKS_MIN = 5
"""Free blocks that the test needs: two requests of two blocks and one of one."""

_STEPS = 2
_ROW_COUNTS = (1, 2, 4, 6, 8, 12)
"""Tried below a whole group; numbers between would gain little."""
_LAYERS_TRIED = 8
"""Of one shape, with other weights: bf16 hides most differences of f32 sums, and shows some in so many."""
_TURNS = 4
"""Of which the fastest counts: what else the machine does only makes them longer."""
_GAIN = 0.97
"""A larger number that takes this part of the time is worth its padding."""


@dataclass(frozen=True)
class Trial:
    """`product_rows` as `Engine` has them, and the ways of `differing_ways` with them."""

    product_rows: tuple[int, ...]
    differing: list[str]


def trial_of(engine: Engine) -> Trial:
    """Takes one to three seconds with a model of 135 M parameters, and in exact numerics `BLOCKS_MIN` free blocks
    meanwhile. Leaves the engine with the `product_rows` found.
    """
    if not engine.exact:
        # The first alone: a larger batch would gain little.
        engine.product_rows = quick_row_counts(engine, _row_counts(engine))[:1]
        return Trial(engine.product_rows, [])
    engine.product_rows = quick_row_counts(engine, invariant_row_counts(engine))
    differing = differing_ways(engine)
    if BATCHED in differing and len(engine.product_rows) > 1:
        engine.product_rows = engine.product_rows[-1:]
        differing = differing_ways(engine)
    return Trial(engine.product_rows, differing)


@torch.inference_mode()
def invariant_row_counts(engine: Engine) -> tuple[int, ...]:
    """Numbers of rows, ascending up to a whole group's: among so many a row has the bits that it has in a whole group,
    wherever it stands in either.
    """
    rows, made = engine.group_rows, _products_of(engine)
    whole = made(slice(0, rows))

    def same(count: int) -> bool:
        parts = [slice(at, at + count) for at in {*range(0, rows - count, count), rows - count}]
        return all(
            torch.equal(few, all_rows[part])
            for part in parts
            for few, all_rows in zip(made(part), whole, strict=True)
        )

    return tuple(count for count in _row_counts(engine) if count == rows or same(count))


@torch.inference_mode()
def quick_row_counts(
    engine: Engine, counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> tuple[int, ...]:
    """Those of `counts`, ascending, beside which no larger one saves time (`_GAIN`). A GPU is not timed: all."""
    if engine.device.type != "cpu":
        return tuple(counts)
    made = _products_of(engine)
    fastest = dict.fromkeys(counts, math.inf)
    for _ in range(_TURNS):
        for count in counts:
            began = clock()
            made(slice(0, count))
            fastest[count] = min(fastest[count], clock() - began)
    return tuple(
        count
        for count in counts
        if all(fastest[more] > _GAIN * fastest[count] for more in counts if more > count)
    )


def _row_counts(engine: Engine) -> tuple[int, ...]:
    """None where rows are computed apart: there any number will do, and the least is the quickest."""
    if engine.rows_apart:
        return ()
    return *(count for count in _ROW_COUNTS if count < engine.group_rows), engine.group_rows


def _products_of(engine: Engine) -> Callable[[slice], list[Tensor]]:
    """A function of some rows of a group, which is always the same: what a few layers make of them, and the logits."""
    model, rows = engine.transformer, engine.group_rows
    layers = model.layers[:: max(1, len(model.layers) // _LAYERS_TRIED)]
    draw = torch.Generator().manual_seed(1)

    def drawn(width: int) -> Tensor:
        return torch.randn(rows, width, generator=draw).to(engine.device, engine.dtype)

    hidden, attended = drawn(engine.config.hidden), drawn(engine.config.heads * engine.config.head_dim)
    cos, sin = model.rotary.rows(torch.arange(rows, device=engine.device))

    def made(part: slice) -> list[Tensor]:
        x, results = hidden[part].clone(), []
        for layer in layers:
            results += [each.clone() for each in layer.project(x, cos[part], sin[part])]
            x = layer.finish(x, attended[part].clone())
            results.append(x.clone())
        return [*results, model.logits(x)]

    return made


def differing_ways(engine: Engine) -> list[str]:
    """The ways of serving a request that give other bits than serving it cold and alone; none where exact mode holds.

    Uses `BLOCKS_MIN` free blocks, and gives them back.
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
        if _prefilled(engine, long, second, chunk_tokens=len(long)) != cold:
            found.append(TOGETHER)
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


def prepare_products(engine: Engine, key: str) -> list[str] | None:
    """Gives the engine its `product_rows`. Returns the `differing_ways`, none in fast numerics; None where they are not
    known and the cache is too small to try.

    Both are from the cache folder where `key` was tried before. It names all that they depend on: model, dtype, CPU,
    threads and build of torch.
    """
    form = f"-{engine.transformer.kernel}"
    if engine.transformer.query_first:
        form += "-query-first"  # other products
    path = cache_folder("profiles") / f"{key}{form}.numerics.json"
    known = _read(path)
    if known is None:
        if engine.exact and engine.allocator.free_blocks < BLOCKS_MIN:
            return None
        with held_lock(path.with_suffix(".lock")):
            known = _read(path)
            if known is None:
                known = trial_of(engine)
                text = json.dumps({"product_rows": known.product_rows, "differing": known.differing})
                replace_file(path, lambda place: place.write_text(text))
    if not engine.exact or known.product_rows[-1:] in ((), (engine.group_rows,)):
        engine.product_rows = known.product_rows
    return known.differing


def _read(path: Path) -> Trial | None:
    try:
        kept = json.loads(path.read_text())
        rows, differing = tuple(kept["product_rows"]), kept["differing"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None
    if not all(type(count) is int and count > 0 for count in rows) or sorted(set(rows)) != list(rows):
        return None
    if not isinstance(differing, list) or not all(isinstance(each, str) for each in differing):
        return None
    return Trial(rows, differing)


def _prefilled(
    engine: Engine, prompt: Sequence[int], table: Sequence[int], *, start: int = 0, chunk_tokens: int = 0
) -> str:
    """Digest of the last token's logits after prefill of `prompt[start:]`, a chunk (0: a block) at a time."""
    logits: Tensor | None = None
    step = chunk_tokens or engine.block_tokens
    for at in range(start, len(prompt), step):
        chunk = prompt[at : at + step]
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
