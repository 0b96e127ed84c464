"""A prompt as an engine is given it, chunk by chunk, and the scores of its own tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Tokens `[start, start + len(token_ids))` of one sequence; in exact mode a block of the grid, or its beginning."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    want_logits: bool = False
    """The last token's."""
    scores: PromptScores | None = None
    """Gets those of the tokens behind these, where they are wanted."""
