"""Other ways of batching than the mixed worker's, for comparison with it.

Source: Sarathi-Serve (OSDI'24, arXiv 2403.02310), sections 3 and 5.4.
"""

from __future__ import annotations

from enum import Enum

from halfmoon.workers.batch_former import BatchFormer, Iteration, Member, PromptChunk, Room


class Batching(Enum):
    """Which rows may share an iteration."""

    #: Decodes and chunks together: Sarathi-Serve.
    STALL_FREE = "stall-free"
    #: Chunks within the budget, but decodes in iterations of their own, by turns.
    CHUNKED = "chunked"
    #: Decodes and whole prompts together: Orca.
    HYBRID = "hybrid"
    #: Whole prompts alone; decodes while no prompt waits that fits: vLLM's first scheduler.
    PREFILL_FIRST = "prefill-first"


#: Only these have iterations of decodes alone, or of chunks alone.
_APART = (Batching.CHUNKED, Batching.PREFILL_FIRST)
_WHOLE_PROMPTS = (Batching.HYBRID, Batching.PREFILL_FIRST)


class ComparedFormer(BatchFormer):
    """A `BatchFormer` that batches in any of the ways."""

    def __init__(
        self,
        room: Room,
        *,
        budget_tokens: int,
        sequences_max: int,
        grain_tokens: int = 1,
        batching: Batching,
        replays: bool = False,
    ) -> None:
        super().__init__(
            room,
            budget_tokens=budget_tokens,
            sequences_max=sequences_max,
            grain_tokens=grain_tokens,
            replays=replays,
        )
        self.batching = batching
        #: The last iteration that was made had chunks; the one that is being formed has one.
        self._chunks_made = self._chunk_taken = False

    def form(self) -> Iteration:
        assert self._formed is None, "the last iteration was not made"
        self._chunk_taken = False
        decodes: list[str] = []
        preempted: list[str] = []
        chunks: list[PromptChunk] = []
        admitted: list[str] = []
        apart = self.batching in _APART
        # By turns: after chunks come the decodes, if there are any.
        decode_turn = self.batching is Batching.CHUNKED and self._chunks_made and self._any_decodes()
        if not apart or decode_turn:
            decodes, preempted = self._take_decodes()
        if not decode_turn:
            chunks, admitted = self._take_chunks(decodes, preempted)
        if apart and not decode_turn and not chunks:
            decodes, preempted = self._take_decodes()
        self._formed = Iteration(tuple(decodes), tuple(chunks), tuple(admitted), tuple(preempted))
        return self._formed

    def made(self) -> Iteration:
        batch = super().made()
        self._chunks_made = bool(batch.chunks)
        return batch

    def _any_decodes(self) -> bool:
        return any(member.decodes for member in self._running.values())

    def _take(self, member: Member, left: int, chunks: list[PromptChunk]) -> int:
        left = super()._take(member, left, chunks)
        self._chunk_taken = bool(chunks)
        return left

    def _tokens(self, member: Member, left: int) -> int:
        if self.batching not in _WHOLE_PROMPTS:
            return super()._tokens(member, left)
        rest = member.tokens - member.computed
        # A prompt longer than the budget goes alone.
        return rest if rest <= left or not self._chunk_taken else 0
