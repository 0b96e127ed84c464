"""Stimuli of the adapter's machine.

    TakeTokens ─▶ TokensTaken      AskEngine ─▶ EngineAsked, then TokensHeard …, at last AnswerBroke where it breaks off

`MixedOrdered` is a mixed worker's order, `PromptOrdered` a prefill worker's, `DecodeOrdered` a decode worker's, which
hears of the prefill half by `KvHeard`.

After HangUp nothing more is heard of an order.
"""

from __future__ import annotations

from halfmoon.schemas.decisions import EngineRefusal, StartPrefill
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.decode.events import DecodeOrdered, KvHeard
from halfmoon.workers.machines import (
    AnnounceRequested,
    OrderCancelled,
    OrderEvent,
    ResendRequested,
    TokensTaken,
    WorkerEvent,
    WorkerStopped,
)
from halfmoon.workers.mixed.events import MixedOrdered


class PromptOrdered(WorkerEvent, frozen=True, kw_only=True):
    """The conductor placed the prefill half of a request here."""

    order: StartPrefill


class EngineAsked(OrderEvent, frozen=True, kw_only=True):
    """The request is on its way; `cached_blocks` blocks of its prompt were in the engine's cache then."""

    cached_blocks: int


class TokensHeard(OrderEvent, frozen=True, kw_only=True):
    """The engine has drawn these. `finish_reason` with the last ones."""

    tokens: list[SampledToken]
    finish_reason: str = ""
    #: Where the engine keeps the prompt's KV for another engine, JSON; "": it does not say.
    kv_params: str = ""
    #: They are a whole answer, which was not streamed.
    whole: bool = False


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
    | PromptOrdered
    | DecodeOrdered
    | KvHeard
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
