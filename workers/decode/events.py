"""Stimuli of the decode machine: everything that can happen to a decode worker, in the past tense.

Each carries its time, because the machine has no clock: `at_ns` is monotonic, `wall_ns` is the wall clock.
Every instruction of `halfmoon.workers.decode.actions` that takes time ends in exactly one of them:

    TakeTokens ─▶ TokensTaken      CopyLayers ─▶ LayersCopied      ShareOutput ─▶ OutputShared
    Release ─▶ LeaseConfirmed, where it asks for it
    Wake ─▶ EngineIdled            RunStep ─▶ StepEnded, StepFailed
    SwapOut ─▶ SwappedOut          SwapIn ─▶ SwappedIn
    AskHold ─▶ PartHeld, PartNotHeld                               LoadHold ─▶ HoldLoaded
    PushTokens ─▶ TokensPushed     PushTail ─▶ TailPushed

After each of StepEnded, StepFailed, SwappedOut and SwappedIn the shell gives EngineIdled: the machine answers it with
the next instruction for the compute thread, or with none until its Wake.
"""

from __future__ import annotations

import msgspec

from halfmoon.schemas.decisions import MoveKv, StartDecode
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.attention.events import HoldAsked, HoldLoaded
from halfmoon.workers.machines import (
    AnnounceRequested,
    OrderCancelled,
    ResendRequested,
    TokensTaken,
    WorkerEvent,
    WorkerStopped,
)

# --- from the conductor -------------------------------------------------------------------------------------


class DecodeOrdered(WorkerEvent, frozen=True, kw_only=True):
    """The conductor placed a request here."""

    order: StartDecode


class MoveOrdered(WorkerEvent, frozen=True, kw_only=True):
    """The conductor wants segments of a request that runs here elsewhere."""

    order: MoveKv


class MoveEnded(WorkerEvent, frozen=True, kw_only=True):
    """A move to this worker came to nothing."""

    plan_id: str


# --- from decode workers ------------------------------------------------------------------------------------


class PartHeld(WorkerEvent, frozen=True, kw_only=True):
    """A lender answered AskHold: it holds the part under the number `hold`. The shell knows where it listens.

    `plan_id`: of the move that it was asked for; "": the part was lent from the start.
    """

    order_id: str
    worker_id: str
    hold: int
    plan_id: str = ""


class PartNotHeld(WorkerEvent, frozen=True, kw_only=True):
    """A lender did not take the part of AskHold, or did not answer."""

    order_id: str
    worker_id: str
    reason: str
    plan_id: str = ""


# --- from store agents and prefill workers ------------------------------------------------------------------


class KvHeard(WorkerEvent, frozen=True, kw_only=True):
    """KV progress. The bus may repeat it, and it may come before its order.

    `author_id`: its author by credentials, a prefill worker or the node of a store agent.
    """

    author_id: str
    message: KvMessage


class MemoryLost(WorkerEvent, frozen=True, kw_only=True):
    """The node's store agent restarted: its pool is empty."""


# --- from the worker's own threads --------------------------------------------------------------------------


class LayersCopied(WorkerEvent, frozen=True, kw_only=True):
    """The instruction CopyLayers with this number is done. `problem`: the reason why the copies are of no use."""

    copy_id: int
    problem: str = ""


class TokensPushed(WorkerEvent, frozen=True, kw_only=True):
    """PushTokens is done: the lender has confirmed the tokens, `moved_bytes` of KV; or not, because of `problem`."""

    moved_bytes: int = 0
    problem: str = ""


class TailPushed(WorkerEvent, frozen=True, kw_only=True):
    """PushTail is done. `problem` "": all places have the end of the prompt."""

    order_id: str
    problem: str = ""


class EngineIdled(WorkerEvent, frozen=True, kw_only=True):
    """The compute thread has nothing to do."""


class StepEnded(WorkerEvent, frozen=True, kw_only=True):
    """RunStep is done: one token of each sequence of its batch, in the batch's order.

    `waits_ns`: of the step, for each worker that attended to parts of its sequences.
    """

    tokens: list[SampledToken]
    step_ns: int
    waits_ns: dict[str, int] = msgspec.field(default_factory=dict)


class StepFailed(WorkerEvent, frozen=True, kw_only=True):
    """RunStep made no token: `worker_id`, which holds parts of some of the batch, is lost or does not have them.

    `hold`: this one alone it does not have; 0: all of them are lost.
    """

    worker_id: str
    reason: str
    hold: int = 0


class SwappedOut(WorkerEvent, frozen=True, kw_only=True):
    """SwapOut is done. `held` is the shell's copy of the blocks; the machine hands it back in SwapIn."""

    held: object


class SwappedIn(WorkerEvent, frozen=True, kw_only=True):
    """SwapIn is done."""


class LeaseConfirmed(WorkerEvent, frozen=True, kw_only=True):
    """Release is done. `held`: its slots were nobody else's until then, so the copies are the prompt's KV."""

    order_id: str
    held: bool


class OutputShared(WorkerEvent, frozen=True, kw_only=True):
    """ShareOutput is done, whether or not the pool took the blocks."""

    order_id: str


# --- from the process ---------------------------------------------------------------------------------------


Event = (
    DecodeOrdered
    | MoveOrdered
    | MoveEnded
    | OrderCancelled
    | AnnounceRequested
    | TokensTaken
    | ResendRequested
    | HoldAsked
    | PartHeld
    | PartNotHeld
    | KvHeard
    | MemoryLost
    | LayersCopied
    | HoldLoaded
    | TokensPushed
    | TailPushed
    | EngineIdled
    | StepEnded
    | StepFailed
    | SwappedOut
    | SwappedIn
    | LeaseConfirmed
    | OutputShared
    | WorkerStopped
)
