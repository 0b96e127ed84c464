"""Stimuli of the adapter's machine.

    TakeTokens ─▶ TokensTaken      AskEngine ─▶ EngineAsked, then TokensHeard …, at last AnswerBroke where it breaks off

After HangUp nothing more is heard of an order.
"""

from __future__ import annotations

from halfmoon.schemas.decisions import EngineRefusal
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.decode.events import ResendRequested
from halfmoon.workers.machines import (
    AnnounceRequested,
    OrderCancelled,
    OrderEvent,
    TokensTaken,
    WorkerEvent,
    WorkerStopped,
)
from halfmoon.workers.mixed.events import MixedOrdered


class EngineAsked(OrderEvent, frozen=True, kw_only=True):
    """The request is on its way; `cached_blocks` blocks of its prompt were in the engine's cache then."""

    cached_blocks: int


class TokensHeard(OrderEvent, frozen=True, kw_only=True):
    """The engine has drawn these. `finish_reason` with the last ones."""

    tokens: list[SampledToken]
    finish_reason: str = ""


class AnswerBroke(OrderEvent, frozen=True, kw_only=True):
    """No more will come of it. `retryable`: another engine may do better."""

    reason: str
    retryable: bool
    refusal: EngineRefusal | None = None


class EngineLooked(WorkerEvent, frozen=True, kw_only=True):
    """How full the engine's own cache is, in percent of its blocks."""

    cache_percent: float


Event = (
    MixedOrdered
    | OrderCancelled
    | TokensTaken
    | AnnounceRequested
    | WorkerStopped
    | ResendRequested
    | EngineAsked
    | TokensHeard
    | AnswerBroke
    | EngineLooked
)
