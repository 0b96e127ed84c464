"""Tokens to text while they arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

from halfmoon.workers.model.loading.errors import ModelUnsupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DECODERS = "ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip as Llama and Gemma have them"


def _byte_of_character() -> dict[str, int]:
    """Inverse of byte-level BPE's alphabet. Source: GPT-2, encoder.py, `bytes_to_unicode`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStart:
    """Losses of the beginning of a text: encoding put them there (SentencePiece's prefix).

    The first token loses `dropped` wherever it stands in it; then the text loses up to `strip_max` times `strip`.
    """

    dropped: bytes = b""
    strip: bytes = b""
    strip_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Steps of a tokenizer's decoder: on the name of a token, and on the beginning of a text."""

    byte_level: bool = False
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    before: str = ""
    start: TextStart = TextStart()

    def text(self, name: str) -> str:
        for old, new in self.replaced:
            name = name.replace(old, new)
        return self.before + name


def _steps(decoder: tokenizers.decoders.Decoder | None) -> _Steps:
    """Raises `ModelUnsupported` for a step that would have to see more of the text than one token."""
    if decoder is None:  # the library writes words with blanks between them
        return _Steps(before=" ", start=TextStart(strip=b" ", strip_max=1))
    byte_level = byte_fallback = fused = False
    replaced: list[tuple[str, str]] = []
    start = TextStart()
    for step in _flat(json.loads(decoder.__getstate__())):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}:
                replaced.append((mark, " "))
                if scheme != "never":
                    start = TextStart(dropped=b" ")
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                old and not fused
            ) or len(old) == 1:
                replaced.append((old, new))
            case {"type": "Strip", "content": str(character), "start": int(count), "stop": 0} if fused:
                start = TextStart(strip=character.encode(), strip_max=count)
            case _:
                raise ModelUnsupported("decoder", step, _DECODERS)
    return _Steps(
        byte_level=byte_level, byte_fallback=byte_fallback, replaced=tuple(replaced), start=start
    )  # fmt: skip


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder, in order."""
    if step.get("type") == "Sequence":
        for inner in step["decoders"]:
            yield from _flat(inner)
    else:
        yield step


def token_bytes(
    tokenizer: tokenizers.Tokenizer, control_ids: frozenset[int]
) -> tuple[list[bytes], TextStart]:
    """The bytes of every token, by id, and the bytes that a text loses at its beginning.

    Raises `ModelUnsupported`.
    """
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    table = [b""] * (max(vocab.values()) + 1)
    steps = _steps(tokenizer.decoder)
    alphabet = _byte_of_character()
    # Both walk a name in C: a vocabulary has a hundred thousand names, and a frontend waits for it.
    written, bytes_of = frozenset(alphabet), str.maketrans({c: chr(byte) for c, byte in alphabet.items()})
    for name, i in vocab.items():
        if i in control_ids:
            continue
        if steps.byte_level:
            known = i not in added and written.issuperset(name)
            table[i] = name.translate(bytes_of).encode("latin-1") if known else name.encode()
        elif steps.byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            table[i] = bytes([int(match[1], 16)])
        else:
            table[i] = steps.text(name).encode()
    return table, steps.start


class TokenBytes(Protocol):
    """The bytes of each token, and the bytes that the first ones lose; `Tokenizer` has them."""

    text_start: TextStart

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens. The results of `push` and `flush`, joined, are `decode` of all ids.

    A character whose bytes come with several tokens is held back until the last of them, so O(1) a token.
    """

    def __init__(self, tokenizer: TokenBytes, after: Iterable[int] = ()) -> None:
        """`after`: tokens that stand before those pushed. Any text among them, and no space is lost at the seam."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        start = tokenizer.text_start
        within = start != TextStart() and any(tokenizer.token_bytes(token) for token in after)
        self._dropped = b"" if within else start.dropped
        self._strip_left = 0 if within else start.strip_max

    def push(self, ids: Sequence[int]) -> str:
        if self._dropped or self._strip_left:
            raw = b"".join(self._begun(self._tokenizer.token_bytes(token)) for token in ids)
        else:
            raw = b"".join(self._tokenizer.token_bytes(token) for token in ids)
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The held-back bytes, as U+FFFD: the end of the text came inside a character."""
        return self._decoder.decode(b"", final=True)

    def _begun(self, raw: bytes) -> bytes:
        """The bytes of one token, without those that the beginning of the text loses."""
        if raw and self._dropped:
            raw, self._dropped = raw.replace(self._dropped, b""), b""
        strip = self._tokenizer.text_start.strip
        while raw and self._strip_left:
            if raw.startswith(strip):
                raw, self._strip_left = raw.removeprefix(strip), self._strip_left - 1
            else:
                self._strip_left = 0
        return raw


class StopChecker:
    """Cuts a text at the first stop string that is complete, however the text is cut into pushes.

    Of stop strings that end at the same character the longest counts. Text that may be the start of one is
    held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown, without any of the stop string, and the stop string once one is complete."""
        if self._hit is not None:
            return "", self._hit
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._hit = min(found)
            self._held = ""
            return text[:at], self._hit
        hold = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    def flush(self) -> str:
        """The held-back text: it ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
