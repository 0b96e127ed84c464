"""What a make-believe model says: one text for each request, whoever computes it, and one mark for each KV block.

So the world can check that a client's text is exactly right, whatever died on the way, and that no slot and no
block of a cache ever holds something else than its owner believes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import xxhash

from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import pack_tokens, split_keys
from halfmoon.schemas.policy import Layout

END = 2
LAYERS, BLOCK_TOKENS = 2, 10
#: 10 tokens a block, 1,000 bytes a token.
LAYOUT = Layout(
    model="m",
    model_fingerprint="f",
    layers=LAYERS,
    kv_heads=1,
    head_dim=125,
    block_tokens=BLOCK_TOKENS,
    dtype="bfloat16",
    numerics="exact",
)


@dataclass(frozen=True)
class Text:
    """Of one request. `end_at`: index at which the model would end it."""

    arrived: RequestArrived
    number: int
    end_at: int

    def token(self, index: int) -> int:
        """The token that the model draws after the prompt and `index` tokens."""
        return END if index == self.end_at else 10 + (self.number * 31 + index * 7) % 997

    @cached_property
    def tokens(self) -> list[int]:
        """The whole answer."""
        return [self.token(index) for index in range(min(self.end_at + 1, self.arrived.max_tokens))]

    @property
    def reason(self) -> str:
        return "stop" if self.tokens[-1] == END else "length"

    @cached_property
    def packed_prompt(self) -> bytes:
        return pack_tokens([self.number % 100] * self.arrived.prompt_tokens)

    @cached_property
    def keys(self) -> list[bytes]:
        return split_keys(self.arrived.block_keys)

    def kv(self, place: int) -> bytes:
        """Stands for the KV of one token, of the prompt or of the answer: with its id, that it was computed from."""
        index, mark = place - self.arrived.prompt_tokens, self.mark(place // BLOCK_TOKENS)
        return mark if index < 0 else mark + self.tokens[index].to_bytes(2, "big")

    @cached_property
    def _all_kv(self) -> list[bytes]:
        prompt = self.arrived.prompt_tokens
        whole = [
            mark for block in range(prompt // BLOCK_TOKENS) for mark in [self.mark(block)] * BLOCK_TOKENS
        ]
        return whole + [self.kv(place) for place in range(len(whole), prompt + len(self.tokens))]

    @cached_property
    def _kv_by_heads(self) -> dict[int, list[bytes]]:
        return {}

    def token_kv(self, first_kv_head: int) -> list[bytes]:
        """Those of all tokens, of the KV heads from this one on."""
        found = self._kv_by_heads.get(first_kv_head)
        if found is None:
            found = [mark + bytes([first_kv_head]) for mark in self._all_kv]
            self._kv_by_heads[first_kv_head] = found
        return found

    def mark(self, block: int) -> bytes:
        """Stands for the KV of that block: its key, or for what follows the whole blocks of the prompt one of its
        own.
        """
        marks = self._marks
        while block >= len(marks):
            marks.append(xxhash.xxh3_128_digest(f"{self.arrived.request_id}/{len(marks)}".encode()))
        return marks[block]

    @cached_property
    def _marks(self) -> list[bytes]:
        """As many as were asked for."""
        return list(self.keys)

    def layers(self, first: int, end: int) -> list[list[bytes]]:
        """The marks that all layers of these blocks hold; to compare with, not to change."""
        layers = self._layers
        while end > len(layers):
            layers.append([self.mark(len(layers))] * LAYERS)
        return layers[first:end]

    @cached_property
    def _layers(self) -> list[list[bytes]]:
        return []
