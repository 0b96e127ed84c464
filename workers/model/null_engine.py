"""An engine that computes nothing: the same interface as `Engine`, for measuring everything around it.

It has no layers and no KVCache bytes, needs no torch, and answers at once with printable tokens, which depend
on the position alone: a request resumed elsewhere goes on with the same text, as with a real model in exact
mode.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from halfmoon.workers.model.block_allocator import BlockAllocator
from halfmoon.workers.model.layer_hooks import NO_HOOKS, LayerHooks
from halfmoon.workers.model.loading.config import ModelConfig
from halfmoon.workers.model.prompt_rows import PromptRows, PromptScores, ScoredToken
from halfmoon.workers.model.sampling_params import Sampled, SampleRequest, SamplingParams

if TYPE_CHECKING:
    from halfmoon.workers.model.grammar_masks import GrammarMask, GrammarMasks

NullRow = int
"""Stands for a row of logits: the token that is the only likely one."""

_FIRST_ID, _IDS = 65, 26
"""Ids that single printable characters have in byte-level vocabularies, or near them; never a control token.
"""


class NullCache:
    """A cache of blocks without bytes."""

    block_bytes = 0
    layer_block_bytes = 0
    layers = 0

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens

    def read_block(self, layer: int, block: int, destination: object, tokens: int = 0) -> None:
        """Nothing to read."""

    def write_block(self, layer: int, block: int, source: object, tokens: int = 0) -> None:
        """Nothing to write."""


class NullEngine:
    """`config` is that of the model it stands for, with no layers."""

    dtype = "null"
    attention_name = "null"
    model_name = "null"
    fingerprint = "0" * 32
    #: Chunks are whole blocks.
    exact = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int,
        masks: GrammarMasks | None = None,
    ) -> None:
        """`masks`: for requests with a grammar; None: there are none."""
        self.config = replace(config, layers=0)
        self.cache = NullCache(num_blocks, block_tokens)
        self.allocator = BlockAllocator(num_blocks)
        self.block_tokens = block_tokens
        self._masks = masks

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def prefill_chunk(
        self,
        token_ids: Sequence[int],
        start: int,
        block_table: Sequence[int],
        *,
        want_logits: bool = False,
        scores: PromptScores | None = None,
        hooks: LayerHooks = NO_HOOKS,
    ) -> NullRow | None:
        """Without layers, no hook is called, and nothing is elsewhere."""
        count = len(token_ids)
        assert count > 0, "an empty chunk has no last token"
        assert start + count <= self.config.context_tokens_max, (start, count, self.config.context_tokens_max)
        assert start % self.block_tokens == 0, f"{start} is off the grid of {self.block_tokens} tokens"
        assert count <= self.block_tokens, (count, self.block_tokens)
        assert len(block_table) * self.block_tokens >= start + count, (len(block_table), start, count)
        if scores is not None:
            behind = scores.after(start, count)
            scores.put(start, [self._score(start + i, token, scores.top) for i, token in enumerate(behind)])
        return self._token_after(start + count - 1) if want_logits else None

    def decode(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        lengths: Sequence[int] = (),
    ) -> list[NullRow]:
        assert len(token_ids) == len(positions) == len(block_tables) > 0, (len(token_ids), len(positions))
        return [self._token_after(position) for position in positions]

    def mixed(
        self,
        chunks: Sequence[PromptRows],
        token_ids: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> tuple[list[NullRow] | None, list[NullRow | None]]:
        assert chunks or token_ids, "an iteration without rows"
        ends = [
            self.prefill_chunk(
                each.token_ids,
                each.start,
                each.block_table,
                want_logits=each.want_logits,
                scores=each.scores,
            )
            for each in chunks
        ]
        return self.decode(token_ids, positions, block_tables) if token_ids else None, ends

    def _score(self, position: int, token: int, top: int) -> ScoredToken:
        """The one likely token, and then, where `top` asks for more, those behind it, which are equally unlikely."""
        likely, vocab = self._token_after(position), self.config.vocab
        others = [((likely + i) % vocab, 0.0 if not i else float("-inf")) for i in range(min(top, vocab))]
        own = (1, 0.0) if token == likely else (vocab, float("-inf"))
        return ScoredToken(*own, tuple(others))

    def _token_after(self, position: int) -> NullRow:
        return (_FIRST_ID + (position + 1) % _IDS) % self.config.vocab

    def sample(self, logits_row: NullRow, params: SamplingParams, request: SampleRequest) -> Sampled:
        mask = None
        if request.grammar:
            assert self._masks is not None, "an engine without masks"
            mask = self._masks.mask(request.grammar, request.name, request.output_ids)
        token = self._next_allowed(logits_row, request, mask)
        sampled = Sampled(token, cut=mask is not None and mask.cut)
        if params.logprobs is None:
            return sampled
        return replace(sampled, logprob=0.0, top_logprobs=((token, 0.0),) if params.logprobs else ())

    def _next_allowed(self, token: NullRow, request: SampleRequest, mask: GrammarMask | None) -> int:
        """`token`, or the id behind it that may come next; where none may, the next that the grammar allows."""
        if not (mask or request.allowed_ids or request.banned_ids):
            return token
        vocab = self.config.vocab
        ids = [(token + further) % vocab for further in range(vocab)]
        if mask is not None:
            ids = [each for each in ids if mask.allowed[each]]
        wanted = frozenset(request.allowed_ids or ids).difference(request.banned_ids)
        return next((each for each in ids if each in wanted), ids[0])

    def prepare_grammar(self, grammar: str) -> None:
        """As `Engine`."""
        assert self._masks is not None, "an engine without masks"
        self._masks.prepare(grammar)

    def sample_rows(
        self, logits: NullRow | Sequence[NullRow], requests: Sequence[SampleRequest]
    ) -> list[Sampled]:
        rows = [logits] if isinstance(logits, int) else logits
        return [
            self.sample(row, request.params, request) for row, request in zip(rows, requests, strict=False)
        ]

    def argmax(self, logits: NullRow | Sequence[NullRow]) -> list[int]:
        return [logits] if isinstance(logits, int) else list(logits)

    def logits_digest(self, logits_row: NullRow) -> str:
        return xxhash.xxh3_64_hexdigest(struct.pack("<Q", logits_row))
