"""Instructions of the mixed machine to its shell: those of a prefill until its prompt is computed, those of a decode
from then on, and the iterations that do both.

At most one RunIteration is under way: it is the compute thread's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.workers.decode.actions import EndSpan, Measure, Wake
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.machines import AnswerResend, Deliver
from halfmoon.workers.model.prompt_rows import PromptScores
from halfmoon.workers.prefill.actions import Action as PrefillAction


class ChunkRows(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one prompt from `start` on, whose KV goes to the blocks of `table`.

    `stores` follow: (block of the cache, slot of the node's pool).
    """

    sequence: DecodeSequence
    token_ids: Sequence[int]
    start: int
    table: list[int]
    stores: tuple[tuple[int, int], ...] = ()
    #: A token is to be drawn after its last row.
    draws: bool = False
    #: Names a whole prompt of one block of which further answers are wanted: it may be kept, or have been. b"": not so.
    kept_key: bytes = b""
    #: Gets how likely the tokens behind these are.
    scores: PromptScores | None = None


class LoadedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Cached blocks of one prompt: (slot of the node's pool, block of the cache)."""

    order_id: str
    blocks: Sequence[tuple[int, int]]


class NextRow(msgspec.Struct, frozen=True, kw_only=True):
    """The token `token_id` of one sequence, whose KV goes to `position` in the blocks of `table`. `draws`: the next one
    is to be drawn.
    """

    sequence: DecodeSequence
    table: list[int]
    token_id: int
    position: int
    draws: bool


class RunIteration(msgspec.Struct, frozen=True, kw_only=True):
    """Load, compute all rows at once, store, draw: IterationMade. Nothing changes the sequences until then."""

    loads: list[LoadedBlocks]
    chunks: list[ChunkRows]
    decodes: list[NextRow]
    context_tokens: int


#: Of a job's actions, those between its preparation and its end do not come: its prompt is computed by iterations.
Action = PrefillAction | Deliver | AnswerResend | Wake | Measure | EndSpan | RunIteration
