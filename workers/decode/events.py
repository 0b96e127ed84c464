"""Stimuli of the decode machine: everything that can happen to a decode worker, in the past tense.

Each carries its time, because the machine has no clock: `at_ns` is monotonic, `wall_ns` is the wall clock.
Every instruction of `halfmoon.workers.decode.actions` that takes time ends in exactly one of them:

    TakeTokens ─▶ TokensTaken      CopyLayers ─▶ LayersCopied      ShareOutput ─▶ OutputShared
    Wake ─▶ EngineIdled            RunStep ─▶ StepEnded            SwapOut ─▶ SwappedOut     SwapIn ─▶ SwappedIn

After each of StepEnded, SwappedOut and SwappedIn the shell says EngineIdled: the machine answers it with the next
instruction for the compute thread, or with none until it says Wake.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import ResendRequest, TakeReply


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """Something that happened to the worker."""

    at_ns: int
    wall_ns: int


# --- from the conductor -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReceived(WorkerEvent):
    """The conductor placed a request here."""

    order: StartDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCancelled(WorkerEvent):
    """The conductor took an order back."""

    order_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRequested(WorkerEvent):
    """The conductor does not know this worker: it must drop its orders and join again."""


# --- from frontends -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensTaken(WorkerEvent):
    """The frontend answered; None: it did not."""

    order_id: str
    reply: TakeReply | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendRequested(WorkerEvent):
    """A frontend missed tokens."""

    request: ResendRequest


# --- from store agents and prefill workers ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHeard(WorkerEvent):
    """KV progress. The bus may repeat it, and it may come before its order."""

    message: KvMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLost(WorkerEvent):
    """The node's store agent restarted: its pool is empty."""


# --- from the worker's own threads --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersCopied(WorkerEvent):
    """The instruction CopyLayers with this number is done."""

    copy_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdled(WorkerEvent):
    """The compute thread has nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(WorkerEvent):
    """RunStep is done: one token of each sequence of its batch, in the batch's order."""

    tokens: list[SampledToken]
    step_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut(WorkerEvent):
    """SwapOut is done. `held` is the shell's copy of the blocks; the machine hands it back in SwapIn."""

    held: object


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedIn(WorkerEvent):
    """SwapIn is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShared(WorkerEvent):
    """ShareOutput is done, whether or not the pool took the blocks."""

    order_id: str


# --- from the process ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(WorkerEvent):
    """The worker leaves: nothing more is begun."""


Event = (
    OrderReceived
    | OrderCancelled
    | AnnounceRequested
    | TokensTaken
    | ResendRequested
    | KvHeard
    | MemoryLost
    | LayersCopied
    | EngineIdled
    | StepEnded
    | SwappedOut
    | SwappedIn
    | OutputShared
    | WorkerStopped
)
