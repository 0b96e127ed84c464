"""Control tokens as text: by their names, where a text is to show all of its tokens."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.workers.model.text.detokenizer import IncrementalDetokenizer
from halfmoon.workers.model.text.tokenizer import Tokenizer


class ControlAsText:
    """The bytes of a tokenizer's tokens, of a control token those of its name. For an `IncrementalDetokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text_start = tokenizer.text_start
        self._bytes_of = tokenizer.token_bytes
        self._names = {token_id: name.encode() for name, token_id in tokenizer.control.items()}

    def token_bytes(self, token_id: int) -> bytes:
        return self._names.get(token_id) or self._bytes_of(token_id)


def decode_all(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of all tokens, control tokens too; bytes that are no UTF-8 become U+FFFD."""
    detokenizer = IncrementalDetokenizer(ControlAsText(tokenizer))
    return detokenizer.push(list(ids)) + detokenizer.flush()
