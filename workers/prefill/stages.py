"""Stages of an order of a prefill worker, and the rules that are the same for all its orders."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Layout

REASON_CHARACTERS_MAX = 500


def patience_ns(*, full: bool) -> int:
    """How long a full store, or else one that does not answer, is asked again. Without patience a node that restarts
    would use up all placements of a request within milliseconds.
    """
    return (10 if full else 3) * SECOND_NS


class PrefillStage(Enum):
    """Where an order stands."""

    QUEUED = "queued"  # nothing has begun
    TAKING = "taking"  # waits for its tokens
    AWAITING_PREFIX = "awaiting prefix"  # an order before it brings blocks that it can use
    OPENING_PUT = "opening put"  # waits for slots of the own node's pool
    PREPARED = "prepared"  # may compute when its turn comes; its fetch may be under way
    OPENING_PUSH = "opening push"  # waits for slots of the decode node's pool
    COMPUTING = "computing"
    AWAITING_FETCH = "awaiting fetch"  # computes again as soon as its fetch has let go of the slots
    DRAWING = "drawing"  # waits for its first token
    CLOSING = "closing"  # its last layers are on their way to the decode node
    ENDED = "ended"


WAITING_STAGES = (
    PrefillStage.QUEUED,
    PrefillStage.TAKING,
    PrefillStage.AWAITING_PREFIX,
    PrefillStage.OPENING_PUT,
    PrefillStage.PREPARED,
)
#: A store that has no room now is asked again after a pause.
PAUSED_STAGES = (PrefillStage.OPENING_PUT, PrefillStage.OPENING_PUSH)
#: At most one order of a worker is in one of these.
TURN_STAGES = (
    PrefillStage.OPENING_PUSH,
    PrefillStage.COMPUTING,
    PrefillStage.AWAITING_FETCH,
    PrefillStage.DRAWING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRules:
    """Configuration that all orders of a worker share."""

    worker_id: str
    layout: Layout
    has_store: bool
    chunk_tokens: int
    stream_layers: bool
    #: Of the engine's cache, where a prompt must fit there.
    prompt_blocks_max: int | None
    #: The model's end tokens.
    eos_ids: frozenset[int] = frozenset()
