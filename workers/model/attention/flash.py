"""flash-attn over the paged cache.

flash-attn's page is a multiple of 256 tokens and its dtypes are bf16 and f16; it needs CUDA. Its import can
fail in two ways, by being absent and by having been built for another torch (an `OSError` or an undefined
symbol).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from halfmoon.workers.model.attention.kernel import Attention, LayerCache, Plan, StepRuns, Tensor
from halfmoon.workers.model.attention.states import Partial, StateStack, neutral

PAGE_TOKENS_MULTIPLE = 256


def flash_unavailable(device: torch.device, dtype: torch.dtype, block_tokens: int) -> list[str]:
    """Every reason why flash-attn cannot be used here; empty when it can."""
    reasons: list[str] = []
    if device.type != "cuda":
        reasons.append(f"device is {device.type}, not cuda")
    if dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"dtype is {dtype}, not bfloat16 or float16")
    if block_tokens % PAGE_TOKENS_MULTIPLE:
        reasons.append(f"block_tokens is {block_tokens}, not a multiple of {PAGE_TOKENS_MULTIPLE}")
    try:
        importlib.import_module("flash_attn")
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:
        # RuntimeError: registered twice, or by another build.
        reasons.append(f"flash_attn cannot be imported: {error}")
    return reasons


class FlashAttention(Attention):
    """Sequences with one query each (decode) go as one call; a longer query (prefill) as one call a sequence."""

    name = "flash"

    def __init__(self, block_tokens: int, device: torch.device, *, exact: bool) -> None:
        super().__init__(block_tokens, device)
        # How the keys are split between multiprocessors follows the batch, and the bits with it: exact never
        # splits.
        self._splits = 1 if exact else 0
        module: Any = importlib.import_module("flash_attn")
        self._with_kvcache, self._varlen = module.flash_attn_with_kvcache, module.flash_attn_varlen_func

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor) -> None:
        tables, lengths = self._device_plan(plan)
        sequences = len(plan.sequences)
        rows = sum(plan.query_tokens)
        if rows == sequences:
            o = self._with_kvcache(
                q[:rows].unsqueeze(1),
                cache.k,
                cache.v,
                cache_seqlens=lengths,
                block_table=tables,
                causal=True,
                num_splits=self._splits,
            )
            out[:rows] = o.squeeze(1)
            return
        row = 0
        for i, count in enumerate(plan.query_tokens):
            o = self._with_kvcache(
                q[row : row + count].unsqueeze(0),
                cache.k,
                cache.v,
                cache_seqlens=lengths[i : i + 1],
                block_table=tables[i : i + 1],
                causal=True,
                num_splits=self._splits,
            )
            out[row : row + count] = o.squeeze(0)
            row += count

    def segment_states(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: StepRuns, states: StateStack
    ) -> None:
        """One call for all: each segment is a sequence of its own, with its own pages."""
        if not runs.items:
            return
        if runs.device is None:
            runs.device = self._segment_tables(runs, states)
        rows, places, tables, lengths = runs.device
        o, lse = self._with_kvcache(
            q[rows].unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=lengths,
            block_table=tables,
            causal=False,
            num_splits=1,
            return_softmax_lse=True,
        )
        states.write(places, o.squeeze(1), lse.squeeze(2))

    def partial(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
        if k.shape[0] == 0:
            return neutral(q)
        ends_q = torch.tensor([0, q.shape[0]], dtype=torch.int32, device=q.device)
        ends_k = torch.tensor([0, k.shape[0]], dtype=torch.int32, device=q.device)
        out, lse, _ = self._varlen(
            q, k, v, ends_q, ends_k, q.shape[0], k.shape[0], causal=causal, return_attn_probs=True
        )
        return Partial(out, lse.t().float())

    def _segment_tables(self, runs: StepRuns, states: StateStack) -> tuple[Tensor, ...]:
        """Each segment's row and its state's place, int64, its blocks `[segments, blocks]` and tokens, int32."""
        rows, tables, lengths = [], [], []
        for run in runs.items:
            blocks = -(-run.tokens // self.block_tokens)
            for i in range(run.segments):
                rows.append(run.row)
                tables.append(run.blocks[i * blocks : (i + 1) * blocks])
                lengths.append(run.tokens)
        return (
            torch.tensor(rows, device=self.device),
            runs.places(states),
            self._padded(tables),
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
        )

    def _padded(self, tables: list[list[int]]) -> Tensor:
        """`[sequences, blocks]`, int32; places beyond a table are block 0, which is not read."""
        widest = max(len(table) for table in tables)
        padded = [table + [0] * (widest - len(table)) for table in tables]
        return torch.tensor(padded, dtype=torch.int32, device=self.device)

    def _device_plan(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """`[sequences, blocks]` and `[sequences]`, int32, made by the first layer and kept for the
        others.
        """
        if plan.device_tables is None or plan.device_lengths is None:
            plan.device_tables = self._padded([run.blocks for run in plan.sequences])
            plan.device_lengths = torch.tensor(
                [run.tokens for run in plan.sequences], dtype=torch.int32, device=self.device
            )
        return plan.device_tables, plan.device_lengths
