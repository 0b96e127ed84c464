"""Instructions of the decode machine to its shell, in the imperative. The shell decides nothing.

At most one of RunStep, SwapOut and SwapIn is under way: they are the compute thread's. CopyLayers and ShareOutput
are the copy thread's. `halfmoon.workers.decode.events` says which event ends which instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfmoon.schemas.events import DecodeFailed, DecodeRefused, DecodeStarted, RequestFinished
from halfmoon.schemas.tokens import ResendReply, TokensSampled
from halfmoon.workers.decode.sequence import DecodeSequence

# --- to other processes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeTokens:
    """Get the order's tokens from its frontend; TokensTaken."""

    frontend_id: str
    request_id: str
    order_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """Append to the log."""

    event: DecodeStarted | RequestFinished | DecodeRefused | DecodeFailed


@dataclass(frozen=True, slots=True)
class Announce:
    """Join again."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send new tokens to a frontend."""

    frontend_id: str
    message: TokensSampled


@dataclass(frozen=True, slots=True)
class AnswerResend:
    """Reply to ResendRequested."""

    reply: ResendReply


@dataclass(frozen=True, slots=True)
class Release:
    """Give back what the order holds in the node's pool, `after_ns` from now."""

    order_id: str
    after_ns: int = 0


# --- to the copy thread -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyLayers:
    """Copy single layers of blocks from the node's pool into the engine's cache; LayersCopied.

    `copies` are (layer, slot of the pool, block of the cache).
    """

    copy_id: int
    copies: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ShareOutput:
    """Put generated blocks into the node's pool, under the keys of `tokens`; OutputShared.

    `tokens` are those whose KV is in the cache, `table` their blocks; the pool knows the first `known_blocks`.
    """

    order_id: str
    root_key: bytes
    tokens: list[int]
    known_blocks: int
    table: list[int]
    tenant: str


# --- to the compute thread ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wake:
    """There may be something to compute: say EngineIdled when everything that has come by now is in."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """One token of each sequence; StepEnded. Nothing changes the sequences until then.

    `context_tokens`: of all of them together.
    """

    batch: list[DecodeSequence]
    context_tokens: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy these blocks of the cache to host memory; SwappedOut."""

    table: list[int]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy what SwappedOut brought into these blocks of the cache; SwappedIn."""

    table: list[int]
    held: object


# --- to those who watch -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measure:
    """Observe how long a sequence waited for room in the batch, or for its first step in it."""

    name: Literal["room_wait", "first_step"]
    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class EndSpan:
    """Tell the trace of a request that its decode has ended."""

    sequence: DecodeSequence
    error: str = ""
    cancelled: bool = False


Action = (
    TakeTokens
    | Report
    | Announce
    | Deliver
    | AnswerResend
    | Release
    | CopyLayers
    | ShareOutput
    | Wake
    | RunStep
    | SwapOut
    | SwapIn
    | Measure
    | EndSpan
)
