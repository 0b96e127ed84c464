"""Text to token ids and back; chats to token ids, with nobody's text read as a control token. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import tokenizers

from halfmoon.workers.model.loading.errors import in_file
from halfmoon.workers.model.text.chat_taint import render_pieces, split_control
from halfmoon.workers.model.text.chat_template import (
    SECONDS_MAX,
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateSlow,
    plain_messages,
)
from halfmoon.workers.model.text.detokenizer import IncrementalDetokenizer, StopChecker, token_bytes
from halfmoon.workers.model.text.tokenizer_files import TokenizerFiles, read_tokenizer
from halfmoon.workers.model.text.tool_prompts import told_in_messages

__all__ = [
    "ChatTemplateError",
    "ChatTemplateSlow",
    "IncrementalDetokenizer",
    "StopChecker",
    "TextNotEncoded",
    "Tokenizer",
]


class TextNotEncoded(Exception):
    """The tokenizer of this model fails on this text."""


class Tokenizer:
    """A model's tokenizer. Immutable once loaded, so any thread may use it."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self.eos_ids = files.eos_ids
        self.control = dict(files.control)
        self.control_ids = frozenset(files.control.values())
        with in_file(files.tokenizer_file):
            self._bytes, self.text_start = token_bytes(files.with_control, self.control_ids)
        self._template: ChatTemplate | None = None
        if files.chat_template is not None:
            specials = {"bos_token": files.bos_token, "eos_token": files.eos_token}
            with in_file(files.template_file):
                self._template = ChatTemplate(files.chat_template, specials)

    @classmethod
    def load(cls, name_or_path: str) -> Tokenizer:
        """Raises `ModelError`."""
        return cls(read_tokenizer(name_or_path))

    @property
    def quick(self) -> bool:
        """Whether no text can keep the pre-tokenizer busy for longer than its length explains."""
        return self._files.quick

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def call_style(self) -> Literal["hermes", "llama3"]:
        """How the model writes calls of tools, by the words of its template."""
        source = self._template.source if self._template is not None else ""
        llama = '"parameters": ' in source and "<tool_call>" not in source
        return "llama3" if llama else "hermes"

    @property
    def thinks(self) -> bool:
        """Whether its answers may begin with thoughts."""
        return self._template is not None and "</think>" in self._template.source

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """`add_special` adds what the model puts around every text (a begin token, for some).

        With `parse_special` control tokens in `text` are recognised: never set it for what a user wrote.

        Raises `TextNotEncoded`.
        """
        chosen = self._files.with_control if parse_special else self._files.without_control
        return self._encode(chosen, text, add_special=add_special)

    def _encode(self, chosen: tokenizers.Tokenizer, text: str, *, add_special: bool = False) -> list[int]:
        """Raises `TextNotEncoded`."""
        # A batch of one: it lets other threads run meanwhile, and leaves out the offsets.
        try:
            ids: list[int] = chosen.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except (
            BaseException
        ) as error:  # the library raises plain Exception, and its panics are no Exception at all
            raise TextNotEncoded(f"the tokenizer fails on this text: {str(error)[:200]}") from None
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Control tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self)
        return detokenizer.push(list(ids)) + detokenizer.flush()

    def serialized(self) -> str:
        """The content of a tokenizer.json."""
        text: str = self._files.with_control.to_str()
        return text

    def names(self, ids: Iterable[int]) -> list[str]:
        """As the vocabulary writes them; "" for ids beyond it."""
        return [self._files.with_control.id_to_token(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; empty for control tokens and for ids beyond the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        switches: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        seconds_max: float = SECONDS_MAX,
    ) -> list[int]:
        """The chat as token ids, in which every control token is the template's own.

        `continue_final`: it ends where the last message's content does. `switches`: of the template; no strings that
        users wrote, which would be read as the template's. `tools`: for the template, or in the system message where it
        knows none.

        Raises `ChatTemplateError`; `ChatTemplateSlow` when the template takes more than `seconds_max` of CPU;
        `TextNotEncoded`.
        """
        plain = plain_messages(messages)
        first = {name[0] for name in self.control}
        for i, message in enumerate(plain):
            if first & set(message["role"]):
                raise ChatTemplateError(f"messages[{i}].role is {message['role']!r}")
        control = list(self.control)
        if self._template is not None and not self._template.knows_tools:
            plain, tools = told_in_messages(plain, tools or []), None

        def render(changed: list[dict[str, Any]]) -> str:
            *told, given = changed
            text = self._render(told, add_generation_prompt, switches, seconds_max, given["tools"])
            return _cut_behind(text, told[-1]["content"]) if continue_final else text

        # What users write in tools is theirs as much as what they write in messages.
        pieces = render_pieces([*plain, {"tools": tools}], control, render)
        text = "".join(piece for piece, _ in pieces)
        if split_control(text, control) == pieces:
            # Nobody wrote one: the tokenizer splits the text as in training, blanks around control tokens and all.
            ids = self.encode(text, parse_special=True)
            if [i for i in ids if i in self.control_ids] == [
                self.control[p] for p, special in pieces if special
            ]:
                return ids
        ids = []
        for number, (piece, special) in enumerate(pieces):
            chosen = self._files.within if number else self._files.without_control
            ids += [self.control[piece]] if special else self._encode(chosen, piece)
        return ids

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        switches: Mapping[str, Any] | None = None,
        seconds_max: float = SECONDS_MAX,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            switches=switches,
            tools=tools,
            seconds_max=seconds_max,
        )


def _cut_behind(text: str, content: str) -> str:
    """`text` up to the end of the last message's content, which templates may have trimmed."""
    for ending in (content, content.strip()):
        at = text.rfind(ending) if ending else -1
        if at >= 0:
            return text[: at + len(ending)]
    raise ChatTemplateError("continue_final_message: the template does not write the last message as it is")
