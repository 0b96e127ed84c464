"""Text to token ids and back; chats to token ids, with nobody's text read as a control token. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

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
from halfmoon.workers.model.text.pieces import TextEncoder, TextNotEncoded
from halfmoon.workers.model.text.template_abilities import Abilities, abilities_of
from halfmoon.workers.model.text.template_files import TemplateSource
from halfmoon.workers.model.text.tokenizer_files import TokenizerFiles, read_tokenizer
from halfmoon.workers.model.text.tool_prompts import fitted

__all__ = [
    "ChatTemplateError",
    "ChatTemplateSlow",
    "IncrementalDetokenizer",
    "StopChecker",
    "TextNotEncoded",
    "Tokenizer",
]


#: Behind the content that is to be continued: the last character of Unicode that is anybody's own.
_MARK = "\U0010fffd"


class _Prompt(NamedTuple):
    template: ChatTemplate | None
    abilities: Abilities

    @property
    def source(self) -> str:
        return "" if self.template is None else self.template.source


_NO_TEMPLATE = _Prompt(None, Abilities())


class Tokenizer:
    """A model's tokenizer. Immutable once loaded, so any thread may use it."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self.eos_ids = files.eos_ids
        self.control = dict(files.control)
        self.control_ids = frozenset(files.control.values())
        with in_file(files.tokenizer_file):
            self._bytes, self.text_start = token_bytes(files.with_control, self.control_ids)
        added = [token for token in files.with_control.get_added_tokens_decoder().values() if token.special]
        self._take_space_before = {token.content for token in added if token.lstrip}
        self._take_space_behind = {token.content for token in added if token.rstrip}
        self._with_control = TextEncoder(files.with_control)
        self._without_control = self._within = TextEncoder(files.without_control)
        if files.within is not files.without_control:
            self._within = TextEncoder(files.within)
        self._template = self._tool_template = _NO_TEMPLATE
        if files.chat_template is not None:
            default = _compiled(files, TemplateSource(files.chat_template, files.template_file))
            self._template = self._tool_template = default
        if files.tool_template is not None:
            self._tool_template = _compiled(files, files.tool_template)

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
        source = self._tool_template.source
        llama = '"parameters": ' in source and "<tool_call>" not in source
        return "llama3" if llama else "hermes"

    @property
    def thinks(self) -> bool:
        """Whether its answers may begin with thoughts."""
        return any("</think>" in each.source for each in (self._template, self._tool_template))

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """`add_special` adds the model's tokens around every text (a begin token, for some).

        With `parse_special` control tokens in `text` are recognised: never set it for a user's text.

        Raises `TextNotEncoded`.
        """
        chosen = self._with_control if parse_special else self._without_control
        return chosen.encode(text, add_special=add_special)

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
        users wrote, which would be read as the template's. `tools`: for the template that the model has for them, or
        in a message where it knows none.

        Raises `ChatTemplateError`; `ChatTemplateSlow` when the template takes more than `seconds_max` of CPU;
        `TextNotEncoded`.
        """
        plain = plain_messages(messages)
        first = {name[0] for name in self.control}
        for i, message in enumerate(plain):
            if first & set(message["role"]):
                raise ChatTemplateError(f"messages[{i}].role is {message['role']!r}")
        control = list(self.control)
        prompt = self._tool_template if tools else self._template
        plain, tools = fitted(plain, tools, prompt.abilities)

        def render(changed: list[dict[str, Any]]) -> str:
            *told, given = changed
            told = _marked(told) if continue_final else told
            text = self._render(
                told, add_generation_prompt, switches, seconds_max, given["tools"], prompt=prompt
            )
            return _cut_at_mark(text, told[-1]["content"]) if continue_final else text

        # Users' text in tools is theirs as much as their text in messages.
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
        before = ""
        for i, (piece, special) in enumerate(pieces):
            if special:
                ids.append(self.control[piece])
            else:
                behind = pieces[i + 1][0] if i + 1 < len(pieces) else ""
                piece = piece.lstrip() if before in self._take_space_behind else piece
                piece = piece.rstrip() if behind in self._take_space_before else piece
                ids += (self._within if i else self._without_control).encode(piece)
            before = piece if special else ""
        return ids

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        switches: Mapping[str, Any] | None = None,
        seconds_max: float = SECONDS_MAX,
        tools: list[dict[str, Any]] | None = None,
        *,
        prompt: _Prompt | None = None,
    ) -> str:
        template = (prompt or self._template).template
        if template is None:
            raise ChatTemplateError("the model has no chat template")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            switches=switches,
            tools=tools,
            seconds_max=seconds_max,
        )


def _compiled(files: TokenizerFiles, source: TemplateSource) -> _Prompt:
    with in_file(source.file):
        template = ChatTemplate(source.text, files.template_tokens)
    return _Prompt(template, abilities_of(template))


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last content with a mark behind it, whose space shows whether the template keeps spaces there."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content'] or ''}{_MARK} "}]


def _cut_at_mark(text: str, marked: str) -> str:
    """`text` up to the end of the last message's content, which templates may have trimmed."""
    at = text.rfind(_MARK)
    if at < 0 or marked[: -len(_MARK) - 1].strip() not in text:
        raise ChatTemplateError(
            "continue_final_message: the template does not write the last message as it is"
        )
    begin = text[:at] if text[at + len(_MARK) :].startswith(" ") else text[:at].rstrip()
    # Some templates write a message twice.
    content = marked[: -len(_MARK) - 1]
    return begin.replace(marked, content).replace(marked[:-1], content)
