"""An answer as blocks, as Anthropic's messages and OpenAI's responses have it: thoughts, text, calls of tools.

A block begins when the one before it has ended. The blocks do not depend on how the text was cut.
"""

from __future__ import annotations

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

    def emptied(self) -> AnswerBlock:
        """As it began."""
        return msgspec.structs.replace(self, text="")


class BlockChange(NamedTuple):
    """A change of the block at `place`, which may have changed further since; `text`: what it grew by."""

    change: Literal["begins", "grows", "ends"]
    place: int
    block: AnswerBlock
    text: str = ""


class AnswerBlocks:
    """`push` the text as it comes, `final` with the last of it."""

    def __init__(self, request: OpenRequest, tokenizer: Tokenizer) -> None:
        self._parts = parts_of(request, tokenizer)
        #: All that have begun.
        self.blocks: list[AnswerBlock] = []

    @property
    def calls(self) -> bool:
        """Some tool was called."""
        return any(block.kind == "call" for block in self.blocks)

    def push(self, text: str, *, final: bool) -> list[BlockChange]:
        if self._parts is not None:
            parts = self._parts.push(text, final=final)
        else:
            parts = [AnswerPart(content=text)] if text else []
        changes: list[BlockChange] = []
        for part in parts:
            block = _block_of(part)
            last = self.blocks[-1] if self.blocks else None
            if last is None or (last.kind, last.call) != (block.kind, block.call):
                changes += self._begin(block)
            added = part.arguments or part.content or part.reasoning
            if added:
                self.blocks[-1].text += added
                changes.append(BlockChange("grows", len(self.blocks) - 1, self.blocks[-1], added))
        if final:
            if not self.blocks:  # clients expect one
                changes += self._begin(AnswerBlock("text"))
            changes += self._end()
        return changes

    def _begin(self, block: AnswerBlock) -> list[BlockChange]:
        ended = self._end()
        self.blocks.append(block)
        return [*ended, BlockChange("begins", len(self.blocks) - 1, block)]

    def _end(self) -> list[BlockChange]:
        """The last block ends where the next one begins."""
        return [BlockChange("ends", len(self.blocks) - 1, self.blocks[-1])] if self.blocks else []


def _block_of(part: AnswerPart) -> AnswerBlock:
    if part.call >= 0:
        return AnswerBlock("call", call=part.call, call_id=part.call_id, name=part.name)
    return AnswerBlock("thinking" if part.reasoning else "text")
