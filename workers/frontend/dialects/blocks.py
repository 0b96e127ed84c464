"""An answer as a row of blocks, as Anthropic's messages and OpenAI's responses have it: thoughts, text, calls of tools.

Each block has its place; one begins when the one before has ended. The blocks do not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from halfmoon.workers.frontend.open_request import OpenRequest
from halfmoon.workers.frontend.openai.answer_parts import AnswerPart
from halfmoon.workers.frontend.openai.chat_parts import parts_of
from halfmoon.workers.model.text.tokenizer import Tokenizer


class AnswerBlock(msgspec.Struct):
    """`text`: so far; of a call its arguments, JSON as text."""

    kind: Literal["thinking", "text", "call"]
    call: int = -1
    call_id: str = ""
    name: str = ""
    text: str = ""


class BlockChange(NamedTuple):
    """A change of the block at `place`; `text`: what it grew by."""

    change: Literal["begins", "grows", "ends"]
    place: int
    block: AnswerBlock
    text: str = ""


class AnswerBlocks:
    """`push` the text as it comes, `final` with the last of it."""

    def __init__(self, request: OpenRequest, tokenizer: Tokenizer) -> None:
        self._parts = parts_of(request, tokenizer)
        self.blocks: list[AnswerBlock] = []

    @classmethod
    def whole(cls, request: OpenRequest, tokenizer: Tokenizer) -> AnswerBlocks:
        """All blocks of an answer that has ended."""
        found = cls(request, tokenizer)
        for _ in found.push(request.text, final=True):
            pass
        return found

    @property
    def calls(self) -> bool:
        """Some tool was called."""
        return any(block.kind == "call" for block in self.blocks)

    def push(self, text: str, *, final: bool) -> Iterator[BlockChange]:
        if self._parts is not None:
            parts = self._parts.push(text, final=final)
        else:
            parts = [AnswerPart(content=text)] if text else []
        for part in parts:
            block = _block_of(part)
            last = self.blocks[-1] if self.blocks else None
            if last is None or (last.kind, last.call) != (block.kind, block.call):
                yield from self._begin(block)
            added = part.arguments or part.content or part.reasoning
            if added:
                self.blocks[-1].text += added
                yield BlockChange("grows", len(self.blocks) - 1, self.blocks[-1], added)
        if final:
            if not self.blocks:  # clients expect one
                yield from self._begin(AnswerBlock("text"))
            yield from self._end()

    def _begin(self, block: AnswerBlock) -> Iterator[BlockChange]:
        yield from self._end()
        self.blocks.append(block)
        yield BlockChange("begins", len(self.blocks) - 1, block)

    def _end(self) -> Iterator[BlockChange]:
        if self.blocks:
            yield BlockChange("ends", len(self.blocks) - 1, self.blocks[-1])


def _block_of(part: AnswerPart) -> AnswerBlock:
    if part.call >= 0:
        return AnswerBlock("call", call=part.call, call_id=part.call_id, name=part.name)
    return AnswerBlock("thinking" if part.reasoning else "text")
