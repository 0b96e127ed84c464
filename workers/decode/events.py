"""Stimuli of the decode machine: everything that can happen to a decode worker, in the past tense.

Each carries its time, because the machine has no clock: `at_ns` is monotonic, `wall_ns` is the wall clock.
Every instruction of `halfmoon.workers.decode.actions` that takes time ends in exactly one of them:

    TakeTokens ─▶ TokensTaken      CopyLayers ─▶ LayersCopied      ShareOutput ─▶ OutputShared
    Wake ─▶ EngineIdled            RunStep ─▶ StepEnded, StepFailed
    SwapOut ─▶ SwappedOut          SwapIn ─▶ SwappedIn
    AskHold ─▶ PartHeld, PartNotHeld                               LoadHold ─▶ HoldLoaded

After each of StepEnded, StepFailed, SwappedOut and SwappedIn the shell says EngineIdled: the machine answers it with
the next instruction for the compute thread, or with none until it says Wake.
"""

from __future__ import annotations

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.lending import HoldRequest
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import ResendRequest
from halfmoon.workers.machines import (
    AnnounceRequested,
    OrderCancelled,
    TokensTaken,
    WorkerEvent,
    WorkerStopped,
)

# --- from the conductor -------------------------------------------------------------------------------------


class DecodeOrdered(WorkerEvent, frozen=True, kw_only=True):
    """The conductor placed a request here."""

    order: StartDecode


# --- from frontends -----------------------------------------------------------------------------------------


class ResendRequested(WorkerEvent, frozen=True, kw_only=True):
    """A frontend missed tokens."""

    request: ResendRequest


# --- from decode workers ------------------------------------------------------------------------------------


class HoldAsked(WorkerEvent, frozen=True, kw_only=True):
    """Another decode worker wants segments of its sequence held here. AnswerHold follows, at once or in the end.

    `ask_id` is the shell's, for the answer.
    """

    ask_id: int
    request: HoldRequest


class PartHeld(WorkerEvent, frozen=True, kw_only=True):
    """A lender answered AskHold: it holds the part under the number `hold`. The shell knows where it listens."""

    order_id: str
    worker_id: str
    hold: int


class PartNotHeld(WorkerEvent, frozen=True, kw_only=True):
    """A lender did not take the part of AskHold, or did not answer."""

    order_id: str
    worker_id: str
    reason: str


# --- from store agents and prefill workers ------------------------------------------------------------------


class KvHeard(WorkerEvent, frozen=True, kw_only=True):
    """KV progress. The bus may repeat it, and it may come before its order.

    `author_id`: who said it, by its credentials: a prefill worker, or the node of a store agent.
    """

    author_id: str
    message: KvMessage


class MemoryLost(WorkerEvent, frozen=True, kw_only=True):
    """The node's store agent restarted: its pool is empty."""


# --- from the worker's own threads --------------------------------------------------------------------------


class LayersCopied(WorkerEvent, frozen=True, kw_only=True):
    """The instruction CopyLayers with this number is done."""

    copy_id: int


class HoldLoaded(WorkerEvent, frozen=True, kw_only=True):
    """LoadHold is done. `problem` "": the blocks have what was asked for."""

    hold: int
    problem: str = ""


class EngineIdled(WorkerEvent, frozen=True, kw_only=True):
    """The compute thread has nothing to do."""


class StepEnded(WorkerEvent, frozen=True, kw_only=True):
    """RunStep is done: one token of each sequence of its batch, in the batch's order."""

    tokens: list[SampledToken]
    step_ns: int


class StepFailed(WorkerEvent, frozen=True, kw_only=True):
    """RunStep made no token: `worker_id`, which holds parts of some of the batch, is lost or does not have them."""

    worker_id: str
    reason: str


class SwappedOut(WorkerEvent, frozen=True, kw_only=True):
    """SwapOut is done. `held` is the shell's copy of the blocks; the machine hands it back in SwapIn."""

    held: object


class SwappedIn(WorkerEvent, frozen=True, kw_only=True):
    """SwapIn is done."""


class OutputShared(WorkerEvent, frozen=True, kw_only=True):
    """ShareOutput is done, whether or not the pool took the blocks."""

    order_id: str


# --- from the process ---------------------------------------------------------------------------------------


Event = (
    DecodeOrdered
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
    | EngineIdled
    | StepEnded
    | StepFailed
    | SwappedOut
    | SwappedIn
    | OutputShared
    | WorkerStopped
)
