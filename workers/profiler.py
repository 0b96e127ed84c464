"""Measures the costs of prefill and decode on an engine.

A worker calls `measured_profile` at its start: kept from an earlier one (by model, dtype, device, CPU and threads), or
measured for some four seconds, longer where its times differ (`kept_profile`). An attention worker, which has no
weights, measures its attention alone (`attention_profile`).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers.cost_fit import DecodeTime, PrefillTime, by_prompt, fit_attention, fit_profile
from halfmoon.workers.kept_profile import apart_permille, kept_profile
from halfmoon.workers.model.attention.engine import AttentionEngine
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.part_costs import attention_times, with_parts

_QUICK_BUDGET_S = 2.0
#: Sequences of the step against which a profile is held.
_CHECKED_ROWS = 4
#: Variables that keep PyTorch and oneDNN from a part of the CPU's instructions: other kernels, other bits.
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
#: Of an attention worker's cache.
_ATTENTION_BLOCKS = 16


def measure(engine: Engine, *, budget_s: float) -> CostProfile:
    """Takes about one and a half times `budget_s`, a little more on a slow machine; borrows the engine's free blocks
    meanwhile.

    A third of the time goes to prefill, chunk after chunk of one growing prompt; a third to decode steps, of a few
    batches and contexts in turn; and a third to a step's parts, where attention may run elsewhere.
    """
    size = engine.block_tokens
    longest = engine.config.context_tokens_max // size
    limit = min(engine.allocator.free_blocks, longest)
    assert limit > 0, "measuring needs a free block"
    blocks = engine.allocator.allocate(limit)
    # Pages never written are one page of zeros to the kernel, and read faster than any real KV.
    for block in blocks:
        engine.cache.k[:, block] = 0.01
        engine.cache.v[:, block] = 0.01
    # In exact numerics prompts may be longer than the cache: their later blocks take its blocks once more.
    table = [blocks[i % limit] for i in range(longest if engine.exact else limit)]
    try:
        head_ns = _measure_head(engine, table)
        prefills = _measure_prefill(engine, table, time.monotonic() + budget_s / 2)
        context = min(limit * size, max(t.prompt_tokens for t in prefills))
        decodes = _measure_decode(engine, blocks, context, time.monotonic() + budget_s / 2)
        profile = by_prompt(fit_profile(prefills, decodes), size, head_ns)
        return with_parts(engine, profile, blocks, context, budget_s / 2)
    finally:
        engine.allocator.free(blocks)


def _measure_head(engine: Engine, table: list[int]) -> int:
    """Time that the logits of a prompt's last token add to its last chunk."""
    tokens = max(1, engine.block_tokens // 4)
    with_head, without = (
        min(_time_prefill(engine, table, tokens, 0, logits=wanted).elapsed_ns for _ in range(3))
        for wanted in (True, False)
    )
    return max(0, with_head - without)


def _measure_prefill(engine: Engine, table: list[int], until_s: float) -> list[PrefillTime]:
    size = engine.block_tokens
    _time_prefill(engine, table, size, 0)  # the first call of a shape prepares its kernels
    # A short chunk first: without it the base and the cost per token cannot be separated.
    times = [
        _time_prefill(engine, table, max(1, size // 4), 0),
        _time_prefill(engine, table, max(1, size // 4), 0),
    ]
    at = 0
    # Ever longer strides, so that the square shows within the budget. The KV of skipped chunks is made up.
    while (at + 1) * size <= len(table) * size:
        times.append(_time_prefill(engine, table, size, at * size))
        if time.monotonic() > until_s and len(times) >= 4:
            break
        at = at * 2 + 1
    return _fastest_prefills(times)


def _fastest_prefills(times: Sequence[PrefillTime]) -> list[PrefillTime]:
    # The fastest of repeated measurements counts: a neighbour's noise only adds.
    fastest: dict[tuple[int, int], PrefillTime] = {}
    for t in times:
        known = fastest.get((t.prompt_tokens, t.cached_tokens))
        if known is None or t.elapsed_ns < known.elapsed_ns:
            fastest[t.prompt_tokens, t.cached_tokens] = t
    return list(fastest.values())


def _time_prefill(
    engine: Engine, table: list[int], tokens: int, start: int, *, logits: bool = False
) -> PrefillTime:
    begin = time.perf_counter_ns()
    engine.prefill_chunk([7] * tokens, start, table, want_logits=logits)
    engine.synchronize()
    return PrefillTime(start + tokens, start, time.perf_counter_ns() - begin)


def _measure_decode(
    engine: Engine,
    table: list[int],
    context: int,
    until_s: float,
    *,
    shapes: Sequence[tuple[int, int]] = (),
) -> list[DecodeTime]:
    shapes = shapes or [(1, 16), (1, context), (4, context // 2), (8, 16), (8, context)]
    fastest: dict[tuple[int, int], int] = {}
    rounds = 0
    while rounds < 2 or (time.monotonic() < until_s and rounds < 20):
        for batch, tokens in shapes:
            tokens = max(1, min(tokens, context))
            # Each sequence has a table of its own while there are blocks: shared blocks would share the CPU's cache.
            need = -(-tokens // engine.block_tokens)
            starts = [i * need % (len(table) - need + 1) for i in range(batch)]
            tables = [table[start : start + need] for start in starts]
            begin = time.perf_counter_ns()
            engine.decode([7] * batch, [tokens - 1] * batch, tables)
            engine.synchronize()
            elapsed_ns = time.perf_counter_ns() - begin
            key = (batch, batch * tokens)
            fastest[key] = min(elapsed_ns, fastest.get(key, elapsed_ns))
        rounds += 1
    return [DecodeTime(batch, tokens, elapsed_ns) for (batch, tokens), elapsed_ns in fastest.items()]


def profile_key(engine: Engine) -> str:
    """Names everything that the measured times depend on."""
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else _cpu_name()
    parts = (
        "13", engine.fingerprint, str(engine.dtype), device, torch.get_num_threads(), torch.__version__,
        engine.block_tokens, engine.exact, engine.attention_name,
    )  # fmt: skip
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def measured_profile(engine: Engine, *, budget_s: float = _QUICK_BUDGET_S) -> CostProfile:
    """The profile in the cache folder, or measured now. When several workers start at once, one measures."""
    return kept_profile(
        profile_key(engine),
        lambda: measure(engine, budget_s=budget_s),
        lambda profile: apart_now_permille(engine, profile),
    )


def apart_now_permille(engine: Engine, profile: CostProfile) -> int:
    """How far a profile is from a chunk and a step that are timed now, in thousandths of the shorter."""
    blocks = engine.allocator.allocate(1)
    size, rows = engine.block_tokens, _CHECKED_ROWS
    try:
        chunk_ns = min(_time_prefill(engine, blocks, size, 0, logits=True).elapsed_ns for _ in range(2))
        steps = _measure_decode(engine, blocks, size, time.monotonic(), shapes=[(rows, size)])
    finally:
        engine.allocator.free(blocks)
    step_ns = profile.step_ns(rows, rows * size)
    return apart_permille([(chunk_ns, profile.prefill_ns(size, 0)), (steps[0].elapsed_ns, step_ns)])


def attention_profile(engine: AttentionEngine, *, budget_s: float = _QUICK_BUDGET_S) -> CostProfile:
    """The cost of attention alone, of an engine whose cache holds nothing yet; kept as a profile is."""
    cache, config = engine.cache, engine.config
    parts = (
        "5", config.layers, config.heads, config.kv_heads, config.head_dim, str(engine.dtype), _cpu_name(),
        torch.get_num_threads(), torch.__version__, cache.block_tokens, engine.attention.segment_tokens,
        engine.attention.name,
    )  # fmt: skip

    def measure_now() -> CostProfile:
        blocks = list(range(min(cache.num_blocks, _ATTENTION_BLOCKS)))
        for block in blocks:
            cache.k[:, block] = 0.01
            cache.v[:, block] = 0.01
        context = len(blocks) * cache.block_tokens
        return fit_attention(CostProfile(), attention_times(engine, blocks, context, budget_s / 2))

    def apart_now(profile: CostProfile) -> int:
        again = measure_now()
        return apart_permille([(profile.attention_ns(1, 4, 4_000), again.attention_ns(1, 4, 4_000))])

    return kept_profile(xxhash.xxh3_128_hexdigest(repr(parts).encode()), measure_now, apart_now)


def _cpu_name() -> str:
    """The kind of CPU as the kernel names it, with its instruction set: on virtual machines names alone are vague. And
    what the environment leaves of that set.
    """
    left = [f"{name}={os.environ[name]}" for name in _INSTRUCTIONS if os.environ.get(name)]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join([platform.processor() or platform.machine(), *left])
    wanted = {line.split(":", 1)[0].strip(): line for line in reversed(lines) if ":" in line}
    return " ".join([*(wanted.get(field, "") for field in ("model name", "flags", "Features")), *left])
