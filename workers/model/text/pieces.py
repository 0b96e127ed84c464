"""Token ids of a text, looked up piece by piece: words come again, and a tokenizer computes each of them anew.

The steps before a byte-level BPE cut a text into words, and nothing joins these afterwards. Where such a step is known
to cut at certain places, whatever stands around them, the text may be cut there first. Its ids are those of the pieces,
one after the other, and the ids of a piece that was met before are known. A regular expression of Python's finds the
places and a dictionary has the ids, in an eighth to a twentieth of the time that the library takes for the whole text.

A place is before a space (U+0020) behind a character that is no whitespace, or before any other whitespace behind an
ASCII letter or digit. No expression of `FULL` matches across one: each alternative has its whitespace first, except
for line ends (and "/") behind punctuation. Nothing is cut inside of a run of whitespace, since `\\s+(?!\\S)` looks
ahead.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import tokenizers
from tokenizers import models

from halfmoon.workers.model.text.pre_tokenizer_probe import FULL, PARTIAL

#: Each piece is whitespace and what follows it up to the next place; the last may be whitespace alone.
_PIECE = re.compile(r"\s*+\S++(?:(?<![A-Za-z0-9])[^\S ]\s*+\S*+)*+|\s+")

#: Known pieces of one tokenizer; with about 200 bytes each, 13 MB.
PIECES_MAX = 1 << 16
#: Longer ones (a table, base64) hardly come again.
PIECE_CHARACTERS_MAX = 48


class TextNotEncoded(Exception):
    """The tokenizer of this model fails on this text."""


class TextEncoder:
    """The token ids that `tokenizer` gives, which must not change any more. Any thread may use it.

    A prompt of words that are all new takes up to 1.6 times as long as by the tokenizer alone.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = _KnownPieces(tokenizer)
        self._around = _around(tokenizer) if _cuts(tokenizer) else None

    @property
    def cuts(self) -> bool:
        """Whether texts are looked up by pieces; else the tokenizer gets each one whole."""
        return self._around is not None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """`add_special` adds the model's tokens around every text. Raises `TextNotEncoded`."""
        if self._around is None:
            return _encoded(self._tokenizer, text, add_special)
        ids = array("I", b"".join(map(self._known.__getitem__, _PIECE.findall(text)))).tolist()
        if add_special:
            before, behind = self._around
            return [*before, *ids, *behind]
        return ids


class _KnownPieces(dict[str, bytes]):
    """The ids of each piece, packed, computed where it is not there. Raises `TextNotEncoded`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, piece: str) -> bytes:
        packed = array("I", _encoded(self._tokenizer, piece)).tobytes()
        if len(piece) <= PIECE_CHARACTERS_MAX:
            # All are forgotten at once: the frequent ones are soon back, and no order of use has to be kept.
            if len(self) >= PIECES_MAX:
                self.clear()
            self[piece] = packed
        return packed


def _encoded(tokenizer: tokenizers.Tokenizer, text: str, add_special: bool = False) -> list[int]:
    """Raises `TextNotEncoded`."""
    # A batch of one: it lets other threads run meanwhile, and leaves out the offsets.
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        # The library raises plain Exception, and its panics are no Exception at all.
        raise TextNotEncoded(f"the tokenizer fails on this text: {str(error)[:200]}") from None
    return ids


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The tokens before and behind every text; None where they are not simply that."""
    try:
        plain, whole = _encoded(tokenizer, "a"), _encoded(tokenizer, "a", add_special=True)
    except TextNotEncoded:
        return None
    for at in range(len(whole) - len(plain) + 1):
        if plain and whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return None


def _cuts(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether its ids of a text are those of the text's pieces."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.dropout or model.continuing_subword_prefix:
        return False
    if model.end_of_word_suffix or tokenizer.truncation or tokenizer.padding:
        return False
    # A token that was added is found before anything is cut, and may take the whitespace behind it.
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.rstrip or token.single_word or re.search(r"\S\s", token.content) for token in added):
        return False
    # Normalization Form C composes nothing with a space or another whitespace.
    if any(step["type"] != "NFC" for step in _steps(tokenizer.normalizer, "normalizers")):
        return False
    steps = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    kinds = [_kind(step) for step in steps]
    # Behind bytes written as characters a space is none any more.
    bytes_last = all(step["type"] != "ByteLevel" for step in steps[:-1])
    return "full" in kinds and "other" not in kinds and bytes_last


def _steps(part: Any, several: str) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps, in order, as a tokenizer.json has them; `several`: its name for many."""
    if part is None:
        return []
    left, steps = [json.loads(part.__getstate__())], []
    while left:
        step = left.pop(0)
        if step["type"] == "Sequence":
            left[:0] = step[several]
        else:
            steps.append(step)
    return steps


def _kind(step: dict[str, Any]) -> str:
    """ "full": it cuts at each place. "part": it may, and what it does between two does not depend on others."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return "full" if use_regex else "part"
        case {"type": "Digits"}:
            return "part"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return "full" if pattern in FULL else "part" if pattern in PARTIAL else "other"
    return "other"
