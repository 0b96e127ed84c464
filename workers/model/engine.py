"""Runs a model: chunks of prompts, and steps of a batch, over one paged cache.

Exact mode. The same request gives the same bits whether its prefix was computed here or fetched, whether it
runs alone or in a batch, and wherever its blocks lie, because every row goes through the same operations in
the same shapes:

- prompts lie on an absolute grid, the blocks of the cache, so a prefix hit cannot shift a boundary;
- the row kernels compute each row apart: with them rows of several blocks and sequences share a product. Others see
  one block of a prompt, or in decode one of `product_rows` rows, which give each row the same bits; a batch larger than
  the most of them is several such groups;
- attention runs for each sequence alone, over a row's own block and fixed segments of the tokens before it, whose
  results merge in order (`attention.exact`).

This holds for one build of torch, kind of CPU and number of threads. Fast mode gives it up: chunks of any length and
place, decode's products over the batch as it is. KV of a generated token differs from a prefill of it in both modes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import xxhash

from halfmoon.workers.model.attention.choice import make_attention
from halfmoon.workers.model.attention.exact import (
    CacheElsewhere,
    Elsewhere,
    ExactAttention,
    ExactPlan,
    PartsElsewhere,
)
from halfmoon.workers.model.attention.kernel import Attention, LayerCache, Plan
from halfmoon.workers.model.block_allocator import BlockAllocator
from halfmoon.workers.model.groups import cut, in_turn, rounds
from halfmoon.workers.model.layer_hooks import NO_HOOKS, LayerHooks
from halfmoon.workers.model.linear import TILE_ROWS, whole_tiles
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.paged_cache import LayerBytes, PagedCache
from halfmoon.workers.model.pooled_segments import PooledSegments
from halfmoon.workers.model.prompt_rows import PromptRows, PromptScores
from halfmoon.workers.model.sampling import sample, sample_batch, score
from halfmoon.workers.model.sampling_params import Sampled, SampleRequest, SamplingParams
from halfmoon.workers.model.segments import segment_tokens as default_segment_tokens
from halfmoon.workers.model.transformer import Transformer

if TYPE_CHECKING:
    from halfmoon.workers.model.grammar_masks import GrammarMasks

Tensor = torch.Tensor


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
        group_rows: int = 16,
        segment_tokens: int | None = None,
        query_first: bool = False,
        masks: GrammarMasks | None = None,
        transformer: Transformer | None = None,
    ) -> None:
        """`query_first`: decode sends queries elsewhere before it computes their keys and values; the same bits.
        `masks`: for requests with a grammar, if any. `transformer`: the model's weights, if they are packed already.
        """
        self.config, self.dtype = model.config, model.dtype
        self.model_name, self.fingerprint = model.name, model.fingerprint
        self.exact, self.block_tokens = exact, block_tokens
        with torch.inference_mode():
            # All positions that config.json promises may be more than the model; the table grows for KV elsewhere.
            positions = min(model.config.context_tokens_max, num_blocks * block_tokens)
            packed = transformer or Transformer(model.config, model.weights, query_first=query_first)
            #: For whoever computes rows of its own choice with this engine's cache and attention.
            self.transformer = packed.for_positions(positions)
        self.device = self.transformer.device
        # Outside of inference mode, or only code inside of it could write to the cache.
        self.cache = PagedCache(model.config, num_blocks, block_tokens, model.dtype, self.device)
        self.allocator = BlockAllocator(num_blocks)
        base = make_attention(attention, self.device, model.dtype, block_tokens, exact=exact)
        segment = default_segment_tokens(block_tokens) if segment_tokens is None else segment_tokens
        self.attention: Attention = ExactAttention(base, segment) if exact and segment else base
        #: Sequences of a decode step's group in exact mode, at most.
        self.group_rows = group_rows
        #: Rows that a group of decode has with those of padding, ascending; more than the last are not padded. None
        #: where rows are computed apart. Else each number gives a row in exact mode the bits of the last, which is
        #: `group_rows`: there are others only where `self_test` has seen that they do here. Those that take longer than
        #: a larger one are left out.
        self.product_rows: tuple[int, ...] = (group_rows,) if exact and not self.rows_apart else ()
        self._masks = masks

    @property
    def rows_apart(self) -> bool:
        """Whether the bits of a product's row depend on that row alone."""
        return self.transformer.kernel == "rows"

    @property
    def attention_name(self) -> str:
        return self.attention.name

    def synchronize(self) -> None:
        """Returns when the device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def prefill_chunk(
        self,
        token_ids: Sequence[int],
        start: int,
        block_table: Sequence[int],
        *,
        want_logits: bool = False,
        scores: PromptScores | None = None,
        hooks: LayerHooks = NO_HOOKS,
    ) -> Tensor | None:
        """Computes the KV of tokens `[start, start + len(token_ids))` of one sequence, whose earlier KV is
        cached, or is where `hooks` have it from.

        Returns the last token's logits, f32 `[vocab]`, if wanted; None also when the hooks stopped it between two
        layers. `scores` gets those of the tokens behind these.
        """
        chunk = PromptRows(token_ids, start, block_table, want_logits, scores)
        return in_turn([self._chunk(chunk, hooks)])[0]

    def activation(self, tokens: int) -> Tensor:
        """Memory on the CPU for the residual of a chunk of `tokens`, `[tokens, hidden]`."""
        return torch.empty((tokens, self.config.hidden), dtype=self.dtype)

    @torch.inference_mode()
    def prefill_stage(
        self, chunk: PromptRows, layers: range, before: Tensor | None, hooks: LayerHooks
    ) -> Tensor | None:
        """As `prefill_chunk`, of some layers alone: from the residual `before` them (None: from the
        tokens, whose ids are looked at only then). Returns the residual after them, on the CPU; after the model's last
        one, the logits, as `prefill_chunk`. All layers in stages give the bits of all at once: the residual is passed
        on as it is.
        """
        made: Tensor | None = in_turn([self._chunk_rows(chunk, layers=layers, before=before, hooks=hooks)])[0]
        return made.cpu() if made is not None and layers.stop < self.config.layers else made

    def _pieces(self, chunk: PromptRows) -> list[PromptRows]:
        """Rows that are computed at once."""
        apart = self.rows_apart and self.attention.blocks_apart(self.dtype, self.config.head_dim)
        return chunk.pieces(self.block_tokens, apart=apart) if self.exact else [chunk]

    def _chunk(self, chunk: PromptRows, hooks: LayerHooks = NO_HOOKS) -> Generator[None, None, Tensor | None]:
        """As `prefill_chunk`; yields after each layer. A piece finds there the KV of those before it."""
        *others, last = self._pieces(chunk)
        # A layer of the chunk is in the cache when the last piece's is.
        before = replace(hooks, after_layer=None)
        steps = [self._chunk_rows(piece, hooks=before) for piece in others]
        made = yield from rounds([*steps, self._chunk_rows(last, hooks=hooks)])
        return made[-1]

    def _chunk_rows(
        self,
        chunk: PromptRows,
        *,
        layers: range | None = None,
        before: Tensor | None = None,
        hooks: LayerHooks = NO_HOOKS,
    ) -> Generator[None, None, Tensor | None]:
        """As `_chunk`, of one piece."""
        token_ids, start, block_table = chunk.token_ids, chunk.start, chunk.block_table
        count = len(token_ids)
        self._check(chunk)
        slots = self._slots([block_table] * count, range(start, start + count))
        padded = self._tiled(count)
        x, cos, sin = self._enter(token_ids, range(start, start + count), padded)
        if before is not None:
            x[:count] = before.to(self.device)
        layers = range(self.config.layers) if layers is None else layers
        plan = self._plan([block_table], [count], [start + count], hooks.elsewhere)
        attended = self._room(padded)
        for i in layers:
            layer = self.transformer.layers[i]
            if hooks.should_stop is not None and hooks.should_stop():
                return None
            q, k, v = layer.project(x, cos, sin)
            if hooks.elsewhere is not None:
                hooks.elsewhere.ask(i, q[:count])
            if hooks.before_layer is not None:
                hooks.before_layer(i)
            self._store(i, slots, k[:count], v[:count])
            if hooks.after_layer is not None:
                self.synchronize()
                hooks.after_layer(i)
            self._attend(i, q[:count], k[:count], v[:count], plan, attended)
            x = layer.finish(x, attended.view(padded, -1))
            yield
        if layers.stop < self.config.layers:
            return x[:count]
        self._score(x, chunk)
        if not chunk.want_logits:
            return None
        last = x[count - 1 : count]
        padding = last.new_zeros(self._padded(1) - 1, last.shape[1])
        return self.transformer.logits(torch.cat([last, padding]))[0]

    def _score(self, x: Tensor, chunk: PromptRows) -> None:
        """Rows of a chunk, `[rows, hidden]`, few at a time; in exact mode with padding: each product has one shape."""
        if (scores := chunk.scores) is None:
            return
        behind = scores.after(chunk.start, len(chunk.token_ids))
        scored = []
        for at in range(0, len(behind), TILE_ROWS):
            rows = slice(at, at + TILE_ROWS)
            scored += score(self.transformer.logits(x[rows]), behind[rows], scores.top)
        scores.put(chunk.start, scored)

    def _check(self, chunk: PromptRows) -> None:
        count, end = len(chunk.token_ids), chunk.start + len(chunk.token_ids)
        assert count > 0, "an empty chunk has no last token"
        assert end <= self.config.context_tokens_max, (chunk.start, count, self.config.context_tokens_max)
        if self.exact:
            assert chunk.start % self.block_tokens == 0, (chunk.start, "is off the grid", self.block_tokens)
            assert len(self._pieces(chunk)) == 1, (count, self.block_tokens)

    @torch.inference_mode()
    def mixed(
        self,
        chunks: Sequence[PromptRows],
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """One iteration of chunks of prompts and, beside them, of one token for each sequence that decodes.

        Returns the results of `decode`, None where no sequence decodes, and for each chunk those of `prefill_chunk`;
        one prompt's chunks come in order. All rows share the linear layers' products; in exact mode only where rows are
        computed apart. Elsewhere every group of rows is computed as if it were alone, and so has the same bits; groups
        take turns layer by layer.
        """
        assert len(token_ids) == len(positions) == len(block_tables), (len(token_ids), len(positions))
        assert chunks or token_ids, "an iteration without rows"
        if self.rows_apart or not self.exact:
            return self._fused(chunks, token_ids, positions, block_tables)
        decodes = [
            self._decode_rows(token_ids[rows], positions[rows], block_tables[rows])
            for rows in (self.groups_of(len(token_ids)) if token_ids else [])
        ]
        # A chunk finds in each layer the KV of the one before it: it comes later in every round.
        made: list[Tensor | None] = in_turn([*decodes, *map(self._chunk, chunks)])
        logits = [row for row in made[: len(decodes)] if row is not None]
        return torch.cat(logits) if logits else None, made[len(decodes) :]

    def _fused(
        self,
        chunks: Sequence[PromptRows],
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """`mixed` with shared products: rows of decodes, then those of the chunks, then padding."""
        batch, ids, places = len(token_ids), list(token_ids), list(positions)
        tables = list(block_tables)
        for chunk in chunks:
            count = len(chunk.token_ids)
            ids += chunk.token_ids
            places += range(chunk.start, chunk.start + count)
            tables += [chunk.block_table] * count
        rows, padded = len(ids), self._tiled(len(ids))
        slots = self._slots(tables, places)
        x, cos, sin = self._enter(ids, places, padded)
        plans = []
        if batch:
            decodes = self._plan(block_tables, [1] * batch, [position + 1 for position in positions], None)
            plans.append((slice(0, batch), decodes))
        owns, at = [], batch
        for chunk in chunks:
            owns.append(slice(at, at + len(chunk.token_ids)))
            for piece in self._pieces(chunk):
                self._check(piece)
                count = len(piece.token_ids)
                plan = self._plan([piece.block_table], [count], [piece.start + count], None)
                plans.append((slice(at, at := at + count), plan))
        attended = self._room(padded)
        for i, layer in enumerate(self.transformer.layers):
            q, k, v = layer.project(x, cos, sin)
            self._store(i, slots, k[:rows], v[:rows])
            for own, plan in plans:
                self._attend(i, q[own], k[own], v[own], plan, attended[own])
            x = layer.finish(x, attended.view(padded, -1))
        for chunk, own in zip(chunks, owns, strict=True):
            self._score(x[own], chunk)
        # The widest product of all is for rows that a token is drawn from.
        wanted = [own.stop - 1 for own, chunk in zip(owns, chunks, strict=True) if chunk.want_logits]
        if not batch and not wanted:
            return None, [None] * len(chunks)
        drawn = self.transformer.logits(x[[*range(batch), *wanted]])
        lasts = iter(drawn[batch:])
        return drawn[:batch] if batch else None, [
            next(lasts) if chunk.want_logits else None for chunk in chunks
        ]

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        elsewhere: Sequence[PartsElsewhere | CacheElsewhere | None] = (),
        *,
        groups: int = 1,
        lengths: Sequence[int] = (),
    ) -> Tensor:
        """One token of each sequence: f32 `[batch, vocab]`. Writes the KV of each token behind `lengths` cached ones:
        as many as its position, unless the KV of some was left out.

        In exact mode KV may be elsewhere: segments whose blocks are AWAY in a table, or all of it, where the tables of
        these sequences are not looked at. `elsewhere` has one for each of `groups_of(batch, groups)`, whose rows it
        counts from 0; None where all of a group's are here. While one group waits for answers, the next computes;
        into how many a batch is divided changes no bit.
        """
        batch = len(token_ids)
        assert batch == len(positions) == len(block_tables) > 0, (batch, len(positions), len(block_tables))
        assert len(lengths) in (0, batch), (batch, len(lengths))
        cuts = self.groups_of(batch, groups)
        assert not elsewhere or (self.exact and len(elsewhere) == len(cuts)), (batch, len(elsewhere))
        steps: list[Generator[None, None, Tensor]] = []
        for rows, others in zip(cuts, elsewhere or [None] * len(cuts), strict=True):
            if isinstance(others, CacheElsewhere):
                steps.append(self._decode_away(token_ids[rows], positions[rows], others))
            else:
                inputs = token_ids[rows], positions[rows], block_tables[rows]
                steps.append(self._decode_rows(*inputs, others, lengths=lengths[rows]))
        try:
            logits = in_turn(steps) if elsewhere else [in_turn([step])[0] for step in steps]
        except BaseException:
            for others in elsewhere:
                if others is not None:
                    others.abandon()
            raise
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def groups_of(self, batch: int, groups: int = 1) -> list[slice]:
        """The slices into which `decode` divides `batch` sequences, at least `groups` of them: in exact mode a group
        has at most `group_rows`, in fast mode there is one.
        """
        return cut(batch, self.group_rows, groups) if self.exact else [slice(0, batch)]

    def _decode_rows(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        elsewhere: PartsElsewhere | None = None,
        *,
        lengths: Sequence[int] = (),
    ) -> Generator[None, None, Tensor]:
        """Logits; yields in each layer when the questions to others are under way, and its own part is done."""
        batch = len(token_ids)
        lengths = lengths or positions
        slots = self._slots(block_tables, lengths)
        x, cos, sin, attended = self._enter_decode(token_ids, positions)
        plan = self._plan(block_tables, [1] * batch, [length + 1 for length in lengths], elsewhere)
        for i, layer in enumerate(self.transformer.layers):
            q, k, v = layer.project(x, cos, sin)
            if elsewhere is not None:
                elsewhere.ask(i, q[:batch])
            self._store(i, slots, k[:batch], v[:batch])
            if isinstance(plan, ExactPlan) and isinstance(self.attention, ExactAttention):
                self.attention.begin(q[:batch], k[:batch], v[:batch], self._layer_cache(i), plan)
                yield
                self.attention.finish(plan, attended)
            else:
                self._attend(i, q[:batch], k[:batch], v[:batch], plan, attended)
            x = layer.finish(x, attended.view(len(attended), -1))
        return self.transformer.logits(x)[:batch]

    def _decode_away(
        self, token_ids: Sequence[int], positions: Sequence[int], cache: CacheElsewhere
    ) -> Generator[None, None, Tensor]:
        """Logits; yields in each layer when its attention is under way."""
        batch = len(token_ids)
        x, cos, sin, attended = self._enter_decode(token_ids, positions)
        for i, layer in enumerate(self.transformer.layers):
            q, normed = layer.query(x, cos, sin)
            cache.ask(i, q[:batch])
            k, v = layer.key_value(normed, cos, sin)
            cache.tell(k[:batch], v[:batch])
            yield
            cache.collect(attended)
            x = layer.finish(x, attended.view(len(attended), -1))
        return self.transformer.logits(x)[:batch]

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

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor) -> None:
        """Without rows of padding in `q`, `k` and `v`; `out` may have some."""
        self.attention.attend(q, k, v, self._layer_cache(layer), plan, out)

    def _layer_cache(self, layer: int) -> LayerCache:
        return LayerCache(self.cache.k[layer], self.cache.v[layer])

    def _enter(
        self, token_ids: Sequence[int], positions: Sequence[int], padded: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings `[padded, hidden]` and rotary tables; rows of padding are token 0 at position 0."""
        self.transformer.rotary.reach(max(positions) + 1)
        blank = [0] * (padded - len(token_ids))
        ids = torch.tensor([*token_ids, *blank], dtype=torch.int64, device=self.device)
        cos, sin = self.transformer.rotary.rows(
            torch.tensor([*positions, *blank], dtype=torch.int64, device=self.device)
        )
        return self.transformer.embed(ids), cos, sin

    def _enter_decode(
        self, token_ids: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `_enter`, and room for attention's result."""
        padded = self._padded(len(token_ids))
        return *self._enter(token_ids, positions, padded), self._room(padded)

    def _tiled(self, rows: int) -> int:
        """A chunk's, with the rows of padding (`whole_tiles`)."""
        return rows if self.rows_apart else whole_tiles(rows)

    def _padded(self, rows: int) -> int:
        """A step's, with the rows of padding."""
        return next((count for count in self.product_rows if count >= rows), rows)

    def _room(self, rows: int) -> Tensor:
        """For attention's result; rows of padding stay 0."""
        return torch.zeros(
            rows, self.config.heads, self.config.head_dim, dtype=self.dtype, device=self.device
        )

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

    # The methods below keep torch out of the workers' loops: a row of logits is opaque to them.

    @torch.inference_mode()
    def sample(self, logits_row: Tensor, params: SamplingParams, request: SampleRequest) -> Sampled:
        """One token; `params` stand in for those of `request`."""
        if not request.grammar:
            return sample(logits_row, params, request)
        assert self._masks is not None, "an engine without masks"
        mask = self._masks.mask(request.grammar, request.name, request.output_ids)
        allowed = torch.frombuffer(bytearray(mask.allowed), dtype=torch.uint8)[: self.config.vocab]
        return replace(sample(logits_row, params, request, allowed == 0), cut=mask.cut)

    def prepare_grammar(self, grammar: str) -> None:
        """Compile it before its first mask is wanted. On any thread but those that nobody may wait for."""
        assert self._masks is not None, "an engine without masks"
        self._masks.prepare(grammar)

    @torch.inference_mode()
    def sample_rows(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """One token for each row of `logits`: `[rows, vocab]`, or `[vocab]` as prefill returns it."""
        return sample_batch(logits.view(-1, logits.shape[-1]), requests, self.sample)

    def argmax(self, logits: Tensor) -> list[int]:
        """The largest logit of each row."""
        ids: list[int] = logits.view(-1, logits.shape[-1]).argmax(dim=-1).tolist()
        return ids

    def logits_digest(self, logits_row: Tensor) -> str:
        """xxh3_64 (16 hex digits) of the f32 bytes of one row: equal digests mean equal bits."""
        return xxhash.xxh3_64_hexdigest(logits_row.contiguous().view(-1).cpu().numpy().data)
