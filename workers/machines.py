"""How a worker is built: a pure machine inside a shell.

The machine (`PrefillState`, `DecodeState`) decides everything and touches nothing: `on(event)` returns the actions
that follow, in the order in which they must be done. It has no clock, no thread and no connection; events carry
the time, and each action that takes time ends in an event. The shell (`PrefillWorker`, `DecodeWorker`) feeds it
events, obeys, and decides nothing. So the same machine runs in a process, in tests that draw every interleaving, and in
a simulated cluster. `validate()` raises AssertionError when an invariant does not hold.

Each role's folder has its events in `events`, its actions in `actions`, its machine in `state`. Here are the events and
actions that machines share.

Source: dask.distributed's `worker_state_machine` (stimulus in, instructions out).
"""

from __future__ import annotations

import msgspec

from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    KvMoved,
    KvMoveRefused,
    PrefillFailed,
    PrefillFinished,
    RequestFinished,
    StageFinished,
)
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.tokens import ResendReply, ResendRequest, TakeReply, TokensSampled


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that a machine decides for: its identity and its equipment. None of it changes in its life."""

    worker_id: str
    incarnation: str
    node_id: str = ""
    layout: Layout
    #: Blocks of the engine's own paged cache.
    kv_blocks: int
    #: KV comes and goes through the node's pool; an engine that computes nothing has none.
    has_store: bool = True
    #: The model's end tokens.
    eos_ids: frozenset[int] = frozenset()


# --- events -------------------------------------------------------------------------------------------------


class WorkerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a worker, by its monotonic clock and by the wall's (0: nobody asks for that)."""

    at_ns: int
    wall_ns: int = 0


class OrderEvent(WorkerEvent, frozen=True, kw_only=True):
    """Something that happened to one order."""

    order_id: str


class OrderCancelled(OrderEvent, frozen=True, kw_only=True):
    """The conductor took an order back."""


class TokensTaken(OrderEvent, frozen=True, kw_only=True):
    """The frontend answered TakeTokens; None: it did not."""

    reply: TakeReply | None


class AnnounceRequested(WorkerEvent, frozen=True, kw_only=True):
    """The conductor does not know this worker: it must drop its orders and join again."""


class WorkerStopped(WorkerEvent, frozen=True, kw_only=True):
    """The worker leaves: nothing more is begun."""


class ResendRequested(WorkerEvent, frozen=True, kw_only=True):
    """A frontend missed tokens; AnswerResend."""

    request: ResendRequest


# --- actions ------------------------------------------------------------------------------------------------


class TakeTokens(msgspec.Struct, frozen=True):
    """Get the order's tokens from its frontend; TokensTaken."""

    frontend_id: str
    request_id: str
    order_id: str


class Report(msgspec.Struct, frozen=True):
    """Append to the log."""

    event: (
        PrefillFinished
        | PrefillFailed
        | StageFinished
        | DecodeStarted
        | RequestFinished
        | DecodeRefused
        | DecodeFailed
        | KvMoved
        | KvMoveRefused
    )


class Deliver(msgspec.Struct, frozen=True):
    """Send new tokens to a frontend."""

    frontend_id: str
    message: TokensSampled


class AnswerResend(msgspec.Struct, frozen=True):
    """Reply to ResendRequested."""

    reply: ResendReply


class Announce(msgspec.Struct, frozen=True):
    """Join again."""


def refusal(taken: TakeReply | None) -> str:
    """Why an order got no tokens."""
    return "the frontend does not answer" if taken is None else "the frontend no longer wants it"
