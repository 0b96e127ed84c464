"""Tokens to text while they arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import tokenizers
from tokenizers import decoders

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Inverse of byte-level BPE's alphabet. Source: GPT-2, encoder.py, `bytes_to_unicode`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(tokenizer: tokenizers.Tokenizer, control_ids: frozenset[int]) -> tuple[list[bytes], bool]:
    """The bytes of every token, by id, and whether the text's first space is dropped (SentencePiece's
    prefix).
    """
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    table = [b""] * (max(vocab.values()) + 1)
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    alphabet = _byte_of_character()
    # Both walk a name in C: a vocabulary has a hundred thousand names, and a frontend waits for it.
    written, bytes_of = frozenset(alphabet), str.maketrans({c: chr(byte) for c, byte in alphabet.items()})
    for name, i in vocab.items():
        if i in control_ids:
            continue
        if i in added:
            table[i] = added[i].encode()
        elif byte_level:
            known = written.issuperset(name)
            table[i] = name.translate(bytes_of).encode("latin-1") if known else name.encode()
        elif match := _BYTE_TOKEN.fullmatch(name):
            table[i] = bytes([int(match[1], 16)])
        else:
            table[i] = name.replace("▁", " ").encode()
    return table, not byte_level


class TokenBytes(Protocol):
    """The bytes of each token; `Tokenizer` has them."""

    strips_first_space: bool

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens. What `push` and `flush` return, joined, is `decode` of all
    ids.

    A character whose bytes come with several tokens is held back until the last of them, so O(1) a token.
    """

    def __init__(self, tokenizer: TokenBytes, shown: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """`shown`: control tokens that are part of the text, and how they are written there."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space

    def push(self, ids: Sequence[int]) -> str:
        shown, bytes_of = self._shown, self._tokenizer.token_bytes
        raw = b"".join([shown[token] if token in shown else bytes_of(token) for token in ids])
        if self._strip and raw:
            raw, self._strip = raw.removeprefix(b" "), False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The held-back bytes, as U+FFFD: the end of the text came inside a character."""
        return self._decoder.decode(b"", final=True)


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
