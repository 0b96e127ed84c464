"""Prompts whose KV was computed in the newest past, by their sketches: which of them are like a given one. And where in
such prompts the documents are that they name.

Only prompts that were computed whole are here: what stands in for a prompt is never handed on. Where their blocks are,
the block index knows. The root key in a sketch keeps tenants and salts apart already; the tenant is compared all the
same, because a sketch is a frontend's word.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import msgspec

from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.similar import bands_of, resemblance_percent
from halfmoon.schemas.types import KEY_BYTES

#: A prompt's sketch and keys are some hundred bytes, in every snapshot.
PROMPTS_MAX = 4096
#: A document's keys are some ten bytes for each hundred tokens.
DOCUMENTS_KNOWN_MAX = 8192


class KnownPrompt(msgspec.Struct, frozen=True):
    """Whole blocks of a prompt that was computed, and its sketch."""

    tenant: str
    sketch: bytes
    block_keys: bytes


class KnownDocument(msgspec.Struct, frozen=True):
    """The blocks, from `first_block` of a prompt on, in which a document is."""

    tenant: str
    first_block: int
    block_keys: bytes


class SimilarIndex(msgspec.Struct, dict=True):
    """Prompts by the last whole block's key, documents by their names, in hexadecimal digits, oldest first; at most
    `PROMPTS_MAX` and `DOCUMENTS_KNOWN_MAX`.
    """

    prompts: dict[str, KnownPrompt] = {}
    documents: dict[str, KnownDocument] = {}

    def add(self, event: RequestArrived) -> None:
        """Its prompt was computed. One that is known already becomes the newest."""
        sketch, block_keys = event.sketch, event.block_keys
        if not bands_of(sketch) or not block_keys:
            return
        name = block_keys[-KEY_BYTES:].hex()
        self._remove(name)
        if len(self.prompts) >= PROMPTS_MAX:
            self._remove(next(iter(self.prompts)))
        self.prompts[name] = KnownPrompt(event.tenant, sketch, block_keys)
        for band in bands_of(sketch):
            self._by_band.setdefault(band, {})[name] = True

    def add_documents(self, event: RequestArrived, block_tokens: int) -> None:
        """As `add`, of the documents of the prompt. Of what is no whole block there is nothing."""
        for document in event.documents:
            first = document.first_token // block_tokens
            end = -(-(document.first_token + document.tokens) // block_tokens)
            block_keys = event.block_keys[first * KEY_BYTES : end * KEY_BYTES]
            if not block_keys:
                continue
            name = document.name.hex()
            self.documents.pop(name, None)
            if len(self.documents) >= DOCUMENTS_KNOWN_MAX:
                del self.documents[next(iter(self.documents))]
            self.documents[name] = KnownDocument(event.tenant, first, block_keys)

    def document(self, tenant: str, name: bytes) -> KnownDocument | None:
        """That of the tenant."""
        known = self.documents.get(name.hex())
        return known if known is not None and known.tenant == tenant else None

    def like(self, tenant: str, sketch: bytes, percent_min: int) -> Iterator[tuple[int, KnownPrompt]]:
        """Resemblance, in percent, and prompt of the tenant: the most alike first, of equals the newest."""
        near = dict.fromkeys(name for band in bands_of(sketch) for name in self._by_band.get(band, ()))
        found = []
        # In the order of age, which neither bands nor a restored snapshot change.
        for age, (name, prompt) in enumerate(self.prompts.items() if near else ()):
            if name in near and prompt.tenant == tenant:
                percent = resemblance_percent(sketch, prompt.sketch)
                if percent >= percent_min:
                    found.append((percent, age, prompt))
        for percent, _, prompt in sorted(found, key=lambda one: one[:2], reverse=True):
            yield percent, prompt

    def _remove(self, name: str) -> None:
        # Before the prompt goes: of a restored index it is made only now.
        by_band = self._by_band
        prompt = self.prompts.pop(name, None)
        if prompt is None:
            return
        for band in bands_of(prompt.sketch):
            del by_band[band][name]
            if not by_band[band]:
                del by_band[band]

    @cached_property
    def _by_band(self) -> dict[bytes, dict[str, bool]]:
        """Follows from `prompts`, and is in no snapshot."""
        found: dict[bytes, dict[str, bool]] = {}
        for name, prompt in self.prompts.items():
            for band in bands_of(prompt.sketch):
                found.setdefault(band, {})[name] = True
        return found
