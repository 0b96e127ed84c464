"""Prefill of some rows of a prompt: the KV of the others stands in from a reference.

Layer by layer, K of the reference is turned from its position to the prompt's (the rotary embedding is a rotation, so
the turn by the difference is exact) and V is taken as it is. Layer 0 is computed for all tokens. In each further layer
the rows that the layer before computed give fresh K and V; those whose fresh KV deviates most from what stands in are
computed on, and the others end here, with fresh KV in this layer and what stands in behind it. Rows that nothing stands
in for are computed in every layer.

The paper chooses the rows of a layer by the deviation in the layer before. In layer 0 that says nothing: K and V depend
on the token alone there. So it is the deviation in the layer itself, which costs the projection of some more rows. It
counts the more the later the token stands (`Schedule.last_over_first`).

Source: SemShareKV (arXiv 2509.24832); CacheBlend (arXiv 2405.16444) for the row-subset forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from halfmoon.workers.model.attention.kernel import Attention, LayerCache
from halfmoon.workers.model.attention.states import merge
from halfmoon.workers.model.layer_hooks import NO_HOOKS, LayerHooks
from halfmoon.workers.model.linear import TILE_ROWS, whole_tiles
from halfmoon.workers.model.paged_cache import PagedCache
from halfmoon.workers.model.similar.matching import Matching, match_runs, same_tokens
from halfmoon.workers.model.similar.retention import most_attended
from halfmoon.workers.model.transformer import Rotary, Transformer, rotate

Tensor = torch.Tensor

#: K, as it is cached, and V of one layer of a reference, `[tokens, kv_heads, head_dim]` each; returns when it is there.
ReferenceLayer = Callable[[int], tuple[Tensor, Tensor]]

#: Rows of layer 0 that attend in one call.
_ROWS_AT_ONCE = 256
#: And of the others. A call reads all keys up to its last row, masked: with fewer rows it reads fewer in vain. Below
#: this many a call's own cost counts (64 took 20 to 30 % less than 256 over 800 keys).
_MASKED_ROWS = 64
#: From so many keys before the first of those rows on, these are a call of their own, without a mask: a tenth less time
#: over 2,800 keys. Of fewer the second call costs what it saves.
_UNMASKED_KEYS_MIN = 1024
#: Of the tokens, so many percent must be found in the reference: with fewer, quality and time are no better than
#: computing all.
FOUND_PERCENT_MIN = 40


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many of the tokens are computed in each layer, and which first.

    Layer 0 computes all tokens, layer 1 the share `first` of them, and each further layer `decay` times as many as
    the one before; of these, whole tiles.

    Sets are nested: a token that one layer leaves out has no input for the next. Tokens that the reference lacks are
    the first of them, and are computed even where they are more. Then come those that deviate most: the deviation of
    the last token counts `last_over_first` times as much as that of the first, and of those between in proportion,
    since the text that follows attends to near tokens most.

    The values were measured on SmolLM2-135M, where they come to 16 % of 30 layers, as many as the paper's figure for
    its speed means. The paper publishes the first share alone, 0.4: with it and all places alike 24 % is computed, and
    the result is hardly nearer to a whole prefill (docs/similar.md). 2, 9 and 17 times were no better than 5.
    """

    first: float = 0.25
    decay: float = 0.95
    last_over_first: float = 5.0

    def rows(self, layer: int, tokens: int) -> int:
        """The number of tokens that layer `layer` computes, before it is cut to whole tiles; at least 1."""
        if layer == 0:
            return tokens
        return min(tokens, max(1, round(tokens * self.first * self.decay ** (layer - 1))))


class NotAlike(Exception):
    """The reference has too few of the prompt's tokens. Nothing but layer 0 was computed."""


class _SelectiveEngine(Protocol):
    transformer: Transformer
    cache: PagedCache
    attention: Attention


@dataclass(frozen=True, slots=True)
class SelectiveResult:
    """`logits`: of the last token, f32 `[vocab]`. `found`: tokens that the reference stood in for. `computed`: rows
    that each layer computed.
    """

    logits: Tensor
    found: int
    computed: list[int]

    @property
    def computed_tokens(self) -> int:
        """Token-layers that were computed, over the number of layers."""
        return -(-sum(self.computed) // len(self.computed))


class SelectivePrefill:
    """The end of a prompt, from token `start` on, whose earlier KV is cached or being loaded. For one compute thread,
    in fast numerics.
    """

    def __init__(
        self,
        engine: _SelectiveEngine,
        token_ids: Sequence[int],
        start: int,
        block_table: Sequence[int],
        *,
        schedule: Schedule | None = None,
        matching: Matching | None = None,
        places: Tensor | None = None,
        keep: int = 0,
    ) -> None:
        """`matching`: which tokens stand in; None: those of the runs that both have. `places`: positions of the
        reference's keys, int64 `[tokens]`; None: from 0 on. `keep`: of the tokens from `start` on, each layer keeps so
        many in the cache, in order and without gaps; 0: all, in their places.
        """
        self._model, self._cache, self._attention = engine.transformer, engine.cache, engine.attention
        self._token_ids, self._start, self._table = token_ids, start, block_table
        self._schedule = schedule or Schedule()
        self._matching, self._places = matching, places
        self._positions = torch.arange(start, len(token_ids), device=self._model.device)
        self._keep = keep or len(self._positions)

    @torch.inference_mode()
    def run(self, reference: ReferenceLayer, hooks: LayerHooks = NO_HOOKS) -> SelectiveResult | None:
        """None when `should_stop` said so. Raises NotAlike, and what the hooks and `reference` raise."""
        model = self._model
        model.rotary.reach(len(self._token_ids))
        cos, sin = model.rotary.rows(self._positions)
        slots = self._slots(self._positions)
        prefix = self._slots(torch.arange(self._start, device=model.device))
        x = model.embed(torch.tensor(self._token_ids[self._start :], device=model.device))
        rows = torch.arange(len(self._positions), device=model.device)
        weights = torch.linspace(1.0, self._schedule.last_over_first, len(rows), device=model.device)
        found, computed = 0, []
        for i, layer in enumerate(model.layers):
            if hooks.should_stop is not None and hooks.should_stop():
                return None
            q, k, v = layer.project(x, cos[rows], sin[rows])
            if hooks.before_layer is not None:
                hooks.before_layer(i)
            if i == 0:
                self._store(i, slots, k, v)
                matching = (self._matching or self._match(v, reference(0)[1])).on(model.device)
                found, turn = matching.found, self._turn(matching)
                attended = self._attend_all(q, k, v)
                every_k, every_v = k, v
                keys, _ = self._behind_prefix(i, prefix, k, v)
            else:
                old_k, old_v = reference(i)
                every_k, every_v = rotate(old_k[matching.rows], *turn), old_v[matching.rows]
                deviation = _deviation(k, every_k[rows]) + _deviation(v, every_v[rows])
                deviation *= weights[rows]
                every_k.index_copy_(0, rows, k)
                every_v.index_copy_(0, rows, v)
                self._store(i, slots, every_k, every_v)
                chosen = _chosen(deviation, matching.forced[rows], self._schedule.rows(i, len(slots)))
                rows, q, x = rows[chosen], q[chosen], x[chosen]
                keys, values = self._behind_prefix(i, prefix, every_k, every_v)
                attended = attend_rows(self._attention, q, keys, values, self._positions[rows])
            kept = self._kept(q, keys, self._positions[rows])
            if kept is not None:
                self._store(i, slots[: len(kept)], every_k[kept], every_v[kept])
            if hooks.after_layer is not None:
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
                hooks.after_layer(i)
            computed.append(len(rows))
            x = layer.finish(x, attended.reshape(len(rows), -1))
        return SelectiveResult(model.logits(x[-1:])[0], found, computed)

    def _kept(self, q: Tensor, keys: Tensor, positions: Tensor) -> Tensor | None:
        """Which tokens from the start on a layer keeps; None: all, in their places. `q`: of the rows at `positions`."""
        if self._keep == len(self._positions):
            return None
        return most_attended(q, keys, positions, self._start, self._keep)

    def _match(self, values: Tensor, reference_values: Tensor) -> Matching:
        prompt = self._token_ids
        reference = same_tokens(prompt[self._start :], values, reference_values)
        matching = match_runs(prompt, self._start, reference)
        if matching.found * 100 < FOUND_PERCENT_MIN * len(matching.rows):
            raise NotAlike(f"{matching.found} of {len(matching.rows)} tokens are in the reference")
        return matching

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In layer 0, some rows at a time."""
        attended = torch.zeros_like(q)
        for at in range(0, len(q), _ROWS_AT_ONCE):
            some = slice(at, min(at + _ROWS_AT_ONCE, len(q)))
            rows = some.stop - some.start
            plan = self._attention.plan([self._table], [rows], [self._start + some.stop])
            cache = LayerCache(self._cache.k[0], self._cache.v[0])
            self._attention.attend(q[some], k[some], v[some], cache, plan, attended[some])
        return attended

    def _turn(self, matching: Matching) -> tuple[Tensor, Tensor]:
        """Rotary tables that turn the keys of the matched rows to their places in the prompt."""
        rows = matching.rows
        by = self._positions - (rows if self._places is None else self._places[rows])
        self._model.rotary.reach(int(by.abs().max()) + 1)
        return turn_by(self._model.rotary, by)

    def _behind_prefix(self, layer: int, prefix: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the whole prompt; `prefix`: the slots of its beginning, which is cached."""
        if not self._start:
            return k, v
        cached = (cache[layer].flatten(0, 1)[prefix] for cache in (self._cache.k, self._cache.v))
        keys, values = (torch.cat(pair) for pair in zip(cached, (k, v), strict=True))
        return keys, values

    def _slots(self, positions: Tensor) -> Tensor:
        """Row of the cache of each position."""
        size = self._cache.block_tokens
        table = torch.tensor(self._table, device=positions.device)
        return table[positions // size] * size + positions % size

    def _store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._cache.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self._cache.v[layer].flatten(0, 1).index_copy_(0, slots, v)


def turn_by(rotary: Rotary, by: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for `rotate`: K that carries its position, so many positions (int64 `[rows]`) further on."""
    cos, sin = rotary.rows(by.abs())
    return cos, sin * by.sign().view(-1, 1, 1)


def attend_rows(attention: Attention, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attention of rows at ascending `positions` over the keys of their sequence up to themselves.

    `q` `[rows, heads, head_dim]`, `keys` and `values` `[tokens, kv_heads, head_dim]`.
    """
    made = []
    for some, own in zip(*(torch.split(each, _MASKED_ROWS) for each in (q, positions)), strict=True):
        first, seen = int(own[0]), int(own[-1]) + 1
        if first < _UNMASKED_KEYS_MIN:
            first = 0
        state = attention.partial_at(some, keys[first:seen], values[first:seen], own - first)
        if first:
            state = merge(attention.partial(some, keys[:first], values[:first], causal=False), state)
        made.append(state.out)
    return torch.cat(made)


def _deviation(fresh: Tensor, old: Tensor) -> Tensor:
    """L2 distance of each row, f32 `[rows]`."""
    apart = (fresh.float() - old.float()).flatten(1)
    return (apart * apart).sum(dim=1).sqrt()


def _chosen(deviation: Tensor, forced: Tensor, count: int) -> Tensor:
    """Places, ascending, of the rows that are forced, of the last, and of the others that deviate most: as many as fill
    the last tile of these, or whole tiles of `count` rows in all.
    """
    picked = forced.clone()
    picked[-1] = True
    needed = int(picked.sum())
    rows = min(len(picked), max(count // TILE_ROWS * TILE_ROWS, whole_tiles(needed)))
    others = deviation.masked_fill(picked, -1.0)
    picked[others.topk(rows - needed).indices] = True
    return picked.nonzero().squeeze(1)
