"""KV events of vLLM and SGLang as they come over ZMQ: decoded one by one, so that a bad event costs itself alone.

A payload is msgpack, `[ts, events, rank]` or a map of these names, by the engine's release; an event is a map whose
`type` names it. A hash is a number or bytes and means nothing to us: it only names a block.

Source: vLLM's `distributed/kv_events.py` and SGLang's `disaggregation/kv_events.py`, for the form.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

#: Names are kept: a longer one is no hash.
BlockHash = int | Annotated[bytes, Meta(max_length=64)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
#: Longer ones are no cache salts of ours, nor hashes of pictures.
_EXTRA_CHARACTERS_MAX = 256
#: Some thousand years after 1970.
_TIME_S_MAX = 1e11


class EngineStored(msgspec.Struct, frozen=True, tag="BlockStored", tag_field="type"):
    """Blocks in a row are in the engine's cache; the first one follows `parent_block_hash` (None: a prompt's head)."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, Meta(ge=1, le=65_536)]
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    #: For each block, the parts of its hash beside its tokens: a cache salt with the head's, a LoRA's name, pictures.
    extra_keys: list[list[Any] | None] | None = None
    #: SGLang's, of all of these blocks.
    cache_salt: str | None = None
    #: Of models whose layers keep KV in several ways.
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    @property
    def salt(self) -> str:
        """The cache salt of a prompt's head; "": it has none."""
        keys = (self.extra_keys[0] or []) if self.extra_keys else [self.cache_salt]
        only = keys[0] if len(keys) == 1 else ""
        return only if isinstance(only, str) and len(only) <= _EXTRA_CHARACTERS_MAX else ""


class EngineRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", tag_field="type"):
    """One copy of each of these blocks is gone."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class EngineCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", tag_field="type"):
    """Nothing is in the engine's cache."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class EventBatch(NamedTuple):
    """The events of one payload that could be read, and how many could not."""

    events: list[EngineEvent]
    malformed: int
    #: By the engine's clock; 0: unknown.
    at_s: float = 0.0


class _Batch(msgspec.Struct, array_like=True):
    at_s: Any
    events: list[EngineEvent]


_decoder = msgspec.msgpack.Decoder(_Batch)


def read_batch(payload: bytes) -> EventBatch:
    """Never raises: a payload that is none counts as one malformed event."""
    # Mostly all of it can be read, in a quarter of the time of one event after another.
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return _read_one_by_one(payload)
    return EventBatch(batch.events, 0, _time_of(batch.at_s))


def _read_one_by_one(payload: bytes) -> EventBatch:
    """The events that can be read, where some cannot, or the payload has another form."""
    try:
        decoded = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return EventBatch([], 1)
    at_s, raw = None, None
    if isinstance(decoded, list) and len(decoded) >= 2:
        at_s, raw = decoded[:2]
    elif isinstance(decoded, dict):
        at_s, raw = decoded.get("ts"), decoded.get("events")
    if not isinstance(raw, list):
        return EventBatch([], 1)
    events: list[EngineEvent] = []
    for each in raw:
        try:
            events.append(msgspec.convert(each, EngineEvent))
        except (msgspec.ValidationError, RecursionError):
            continue
    return EventBatch(events, len(raw) - len(events), _time_of(at_s))


def _time_of(at_s: object) -> float:
    """A restart is known by a later time, so one that no clock shows would hide all restarts after it."""
    return at_s if isinstance(at_s, float) and 0 <= at_s <= _TIME_S_MAX else 0.0
