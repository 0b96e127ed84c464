"""A prompt as an engine is given it, chunk by chunk, and the scores of its own tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class ScoredToken(NamedTuple):
    """How likely a token of the prompt was after those before it; `rank` 1: no token was likelier.

    `top_logprobs` are (token id, logprob), the most likely first.
    """

    rank: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


class PromptScores:
    """Collects the scores of one prompt's tokens, chunk by chunk; of the first, before which there is nothing, none."""

    def __init__(self, prompt_ids: Sequence[int], top: int) -> None:
        """`top`: number of most likely tokens that are kept with each."""
        self.top = top
        self.rows: list[ScoredToken] = []
        self._prompt_ids = prompt_ids

    def after(self, start: int, count: int) -> Sequence[int]:
        """The tokens behind rows `[start, start + count)`: behind the prompt's last one there is none."""
        return self._prompt_ids[start + 1 : start + count + 1]

    def put(self, start: int, rows: Sequence[ScoredToken]) -> None:
        """Those of `after(start, len(rows))`. A prompt may be computed again from its beginning."""
        assert start <= len(self.rows), ("a chunk that was not scored", start, len(self.rows))
        self.rows[start:] = rows


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens `[start, start + len(token_ids))` of one sequence; in exact mode blocks of the grid, the last of which may
    be a block's beginning.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    want_logits: bool = False
    """The last token's."""
    scores: PromptScores | None = None
    """Gets those of the tokens behind these, where they are wanted."""

    def pieces(self, block_tokens: int, *, apart: bool) -> list[PromptRows]:
        """Rows that have the same bits in exact mode when they are computed at once: those of a block, or, where rows
        are computed `apart`, of all blocks but a last one of one token, which is attended to as in decode.
        """
        last = (len(self.token_ids) - 1) // block_tokens * block_tokens
        if apart and last < len(self.token_ids) - 1:
            return [self]
        return self._cut(max(1, last) if apart else block_tokens)

    def _cut(self, tokens: int) -> list[PromptRows]:
        """Into pieces of so many, in order; logits are wanted of the last one alone."""
        count = len(self.token_ids)
        return [
            replace(
                self,
                token_ids=self.token_ids[at : at + tokens],
                start=self.start + at,
                want_logits=self.want_logits and at + tokens >= count,
            )
            for at in range(0, count, tokens)
        ]
