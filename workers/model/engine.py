"""Runs a model: chunks of prompts, and steps of a batch, over one paged cache.

Exact mode. The same request gives the same bits whether its prefix was computed here or fetched, whether it
runs alone or in a batch, and wherever its blocks lie, because every row goes through the same operations in
the same shapes:

- prefill runs on an absolute grid, one block of the cache at a time, so a prefix hit cannot shift a boundary;
- matrix products of decode see `decode_rows_multiple` rows, always; a larger batch is several such groups;
- attention runs for each sequence alone, over fixed segments of its tokens, whose results merge in order
  (`attention_exact`).

This holds for one build of torch, kind of CPU and number of threads. Fast mode gives it up: chunks of any
length and place, decode's products over the batch as it is. KV of a generated token differs from a prefill of
it in both modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import xxhash

from halfmoon.workers.model.attention import Attention, Plan
from halfmoon.workers.model.attention_choice import make_attention
from halfmoon.workers.model.attention_exact import Elsewhere, ExactAttention, ExactPlan
from halfmoon.workers.model.block_allocator import BlockAllocator
from halfmoon.workers.model.files import LoadedModel
from halfmoon.workers.model.paged_cache import LayerBytes, PagedCache
from halfmoon.workers.model.pooled_segments import PooledSegments
from halfmoon.workers.model.sampling import sample, sample_batch
from halfmoon.workers.model.sampling_params import Sampled, SampleRequest, SamplingParams
from halfmoon.workers.model.segments import segment_tokens as default_segment_tokens
from halfmoon.workers.model.transformer import Transformer

Tensor = torch.Tensor

_PREFILL_ROWS_MULTIPLE = 16
"""Rows of a chunk are padded to this, so that a packed product is prepared for 16 shapes of a block and not
for 256.
"""


class Engine:
    """One model replica on one device. Not thread safe: one compute thread owns it."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_tokens: int,
        exact: bool,
        attention: str = "auto",
        decode_rows_multiple: int = 16,
        segment_tokens: int | None = None,
    ) -> None:
        self.config, self.dtype = model.config, model.dtype
        self.model_name, self.fingerprint = model.name, model.fingerprint
        self.exact, self.block_tokens = exact, block_tokens
        with torch.inference_mode():
            # A table for all that config.json promises may be larger than the model: it grows where a sequence whose
            # KV lies partly elsewhere is longer than the cache.
            positions = min(model.config.context_tokens_max, num_blocks * block_tokens)
            self._model = Transformer(model.config, model.weights, positions)
        self.device = self._model.device
        # Outside of inference mode, or only code inside of it could write to the cache.
        self.cache = PagedCache(model.config, num_blocks, block_tokens, model.dtype, self.device)
        self.allocator = BlockAllocator(num_blocks)
        base = make_attention(attention, self.device, model.dtype, block_tokens, exact=exact)
        segment = default_segment_tokens(block_tokens) if segment_tokens is None else segment_tokens
        self.attention: Attention = ExactAttention(base, segment) if exact and segment else base
        self.decode_rows_multiple = decode_rows_multiple

    @property
    def attention_name(self) -> str:
        return self.attention.name

    def synchronize(self) -> None:
        """Returns when the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def prefill_chunk(
        self,
        token_ids: Sequence[int],
        start: int,
        block_table: Sequence[int],
        *,
        before_layer: Callable[[int], None] | None = None,
        after_layer: Callable[[int], None] | None = None,
        want_logits: bool = False,
        should_stop: Callable[[], bool] | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Tensor | None:
        """Computes the KV of tokens `[start, start + len(token_ids))` of one sequence, whose earlier KV is
        cached. Segments whose blocks are AWAY in the table are attended to by `elsewhere`, in exact mode.

        `before_layer(i)` returns when layer i of the earlier KV is in the cache (the chunk's own projection, which
        needs none of it, runs before); `after_layer(i)` is called when layer i of this chunk is. Returns
        the last token's logits, f32 `[vocab]`, if wanted. None also when `should_stop` said so between
        two layers: the chunk's KV is then incomplete.
        """
        count = len(token_ids)
        assert count > 0, "an empty chunk has no last token"
        assert start + count <= self.config.context_tokens_max, (start, count, self.config.context_tokens_max)
        if self.exact:
            assert start % self.block_tokens == 0, f"{start} is off the grid of {self.block_tokens} tokens"
            assert count <= self.block_tokens, (count, self.block_tokens)
        slots = self._slots([block_table] * count, range(start, start + count))
        padded = -(-count // _PREFILL_ROWS_MULTIPLE) * _PREFILL_ROWS_MULTIPLE
        x, cos, sin = self._enter(token_ids, range(start, start + count), padded)
        plan = self._plan([block_table], [count], [start + count], elsewhere)
        attended = torch.zeros(
            padded, self.config.heads, self.config.head_dim, dtype=self.dtype, device=self.device
        )
        for i, layer in enumerate(self._model.layers):
            if should_stop is not None and should_stop():
                return None
            q, k, v = layer.project(x, cos, sin)
            if elsewhere is not None:
                elsewhere.ask(i, q[:count])
            if before_layer is not None:
                before_layer(i)
            self._store(i, slots, k[:count], v[:count])
            if after_layer is not None:
                self.synchronize()
                after_layer(i)
            self._attend(i, q, k, v, plan, attended, count)
            x = layer.finish(x, attended.view(padded, -1))
        if not want_logits:
            return None
        last = x[count - 1 : count]
        if self.exact:
            last = torch.cat([last, last.new_zeros(self.decode_rows_multiple - 1, last.shape[1])])
        return self._model.logits(last)[0]

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        elsewhere: Sequence[Elsewhere | None] = (),
    ) -> Tensor:
        """One token of each sequence: f32 `[batch, vocab]`. Writes the KV of each token at its position.

        Segments whose blocks are AWAY in a table are attended to by `elsewhere`, in exact mode: one for each group of
        `decode_rows_multiple` sequences, whose rows it counts from 0; None where all of a group's are here.
        """
        batch = len(token_ids)
        assert batch == len(positions) == len(block_tables) > 0, (batch, len(positions), len(block_tables))
        step = self.decode_rows_multiple if self.exact else batch
        groups = [slice(at, at + step) for at in range(0, batch, step)]
        assert not elsewhere or (self.exact and len(elsewhere) == len(groups)), (batch, len(elsewhere))
        logits = [
            self._decode_rows(token_ids[each], positions[each], block_tables[each], others)
            for each, others in zip(groups, elsewhere or [None] * len(groups), strict=True)
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _decode_rows(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        elsewhere: Elsewhere | None = None,
    ) -> Tensor:
        batch = len(token_ids)
        padded = self.decode_rows_multiple if self.exact else batch
        slots = self._slots(block_tables, positions)
        x, cos, sin = self._enter(token_ids, positions, padded)
        contexts = [position + 1 for position in positions]
        plan = self._plan(block_tables, [1] * batch, contexts, elsewhere)
        attended = torch.zeros(
            padded, self.config.heads, self.config.head_dim, dtype=self.dtype, device=self.device
        )
        for i, layer in enumerate(self._model.layers):
            q, k, v = layer.project(x, cos, sin)
            if elsewhere is not None:
                elsewhere.ask(i, q[:batch])
            self._store(i, slots, k[:batch], v[:batch])
            self._attend(i, q, k, v, plan, attended, batch)
            x = layer.finish(x, attended.view(padded, -1))
        return self._model.logits(x)[:batch]

    def _plan(
        self,
        block_tables: Sequence[Sequence[int]],
        query_tokens: Sequence[int],
        context_tokens: Sequence[int],
        elsewhere: Elsewhere | None,
    ) -> Plan:
        plan = self.attention.plan(block_tables, query_tokens, context_tokens)
        if elsewhere is not None:
            assert isinstance(plan, ExactPlan), plan
            plan.elsewhere = elsewhere
        return plan

    def pooled_segments(self, block: Callable[[int, int], LayerBytes]) -> PooledSegments:
        """Segments of one prompt that `block(number, layer)` has the bytes of, as `prefill_chunk` takes them."""
        assert isinstance(self.attention, ExactAttention), self.attention
        each = self.attention.segment_tokens // self.block_tokens
        layer = replace(self.config, layers=1)
        scratch = PagedCache(layer, each, self.block_tokens, self.dtype, self.device)
        return PooledSegments(self.attention, scratch, block)

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, rows: int
    ) -> None:
        """The first `rows` rows; the others are padding."""
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        self.attention.attend(q[:rows], k[:rows], v[:rows], k_cache, v_cache, plan, out)

    def _enter(
        self, token_ids: Sequence[int], positions: Sequence[int], padded: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings `[padded, hidden]` and rotary tables; rows of padding are token 0 at position 0."""
        self._model.rotary.reach(max(positions) + 1)
        blank = [0] * (padded - len(token_ids))
        ids = torch.tensor([*token_ids, *blank], dtype=torch.int64, device=self.device)
        cos, sin = self._model.rotary.rows(
            torch.tensor([*positions, *blank], dtype=torch.int64, device=self.device)
        )
        return self._model.embed(ids), cos, sin

    def _slots(self, block_tables: Sequence[Sequence[int]], positions: Sequence[int]) -> Tensor:
        """Row of the cache (block * block_tokens + offset) of each position."""
        size = self.block_tokens
        rows = [
            table[position // size] * size + position % size
            for table, position in zip(block_tables, positions, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.cache.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.cache.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    # What follows keeps torch out of the workers' loops: a row of logits is opaque to them.

    @torch.inference_mode()
    def sample(self, logits_row: Tensor, params: SamplingParams, request: SampleRequest) -> Sampled:
        """One token; `params` stand in for those of `request`."""
        return sample(
            logits_row,
            params,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            index=request.index,
            banned_ids=request.banned_ids,
        )

    @torch.inference_mode()
    def sample_rows(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """One token for each row of `logits`: `[rows, vocab]`, or `[vocab]` as prefill returns it."""
        return sample_batch(logits.view(-1, logits.shape[-1]), requests)

    def argmax(self, logits: Tensor) -> list[int]:
        """The largest logit of each row."""
        ids: list[int] = logits.view(-1, logits.shape[-1]).argmax(dim=-1).tolist()
        return ids

    def logits_digest(self, logits_row: Tensor) -> str:
        """xxh3_64 (16 hex digits) of the f32 bytes of one row: equal digests mean equal bits."""
        return xxhash.xxh3_64_hexdigest(logits_row.contiguous().view(-1).cpu().numpy().data)
