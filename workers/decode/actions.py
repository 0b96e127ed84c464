"""Instructions of the decode machine to its shell, in the imperative. The shell decides nothing.

At most one of RunStep, SwapOut and SwapIn is under way: they are the compute thread's. CopyLayers and ShareOutput
are the copy thread's. `halfmoon.workers.decode.events` pairs each instruction with the event that ends it.

Both are msgspec's structs: a frozen dataclass takes several times as long to make, and each token makes some.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from halfmoon.schemas.lending import HoldRequest, KvPart
from halfmoon.workers.attention.actions import HoldAction
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.machines import Announce, AnswerResend, Deliver, Report, TakeTokens

# --- to other processes -------------------------------------------------------------------------------------


class Release(msgspec.Struct, frozen=True):
    """Give back the order's slots of the node's pool, `after_ns` from now. With `confirm`: LeaseConfirmed."""

    order_id: str
    after_ns: int = 0
    confirm: bool = False


class AskHold(msgspec.Struct, frozen=True):
    """Ask `worker_id`, `after_ns` from now, to hold blocks of a sequence of this worker's; PartHeld, PartNotHeld."""

    worker_id: str
    request: HoldRequest
    after_ns: int = 0


# --- to the copy thread -------------------------------------------------------------------------------------


class CopyLayers(msgspec.Struct, frozen=True):
    """Copy single layers of blocks from the node's pool into the engine's cache; LayersCopied.

    `copies` are (layer, slot of the pool, block of the cache); `epochs` are (slot, epoch): as long as these are the
    slots' epochs, their bytes are the order's. `tail` is (slot, tokens) where the prompt ends within a block: no more
    of that slot is the order's.
    """

    copy_id: int
    copies: tuple[tuple[int, int, int], ...]
    epochs: tuple[tuple[int, int], ...]
    tail: tuple[int, int] = (-1, 0)


class PushTokens(msgspec.Struct, frozen=True):
    """Send the KV of `tokens` tokens to a lender's `hold`, from its token `first` on; TokensPushed.

    They are read from `blocks` of the cache, and begin in the first of them where `first` lies in its block.
    """

    order_id: str
    plan_id: str
    worker_id: str
    hold: int
    blocks: list[int]
    first: int
    tokens: int


class PushTail(msgspec.Struct, frozen=True):
    """Send the prompt's last `tokens` tokens, in `block` of the engine's cache, to the holders of the tokens before
    them (`parts`), to be those from the hold's token `first_token` on; TailPushed.
    """

    order_id: str
    block: int
    first_token: int
    tokens: int
    parts: tuple[KvPart, ...]


class ShareOutput(msgspec.Struct, frozen=True):
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


class Wake(msgspec.Struct, frozen=True):
    """There may be something to compute: give EngineIdled when all events that have come by now are in."""


class RunStep(msgspec.Struct, frozen=True):
    """One token of each sequence; StepEnded. Nothing changes the sequences until then.

    `context_tokens`: of all of them together.
    """

    batch: list[DecodeSequence]
    context_tokens: int


class SwapOut(msgspec.Struct, frozen=True):
    """Copy these blocks of the cache to host memory; SwappedOut."""

    table: list[int]


class SwapIn(msgspec.Struct, frozen=True):
    """Copy the blocks that SwappedOut brought into these blocks of the cache; SwappedIn."""

    table: list[int]
    held: object


# --- for traces and metrics ---------------------------------------------------------------------------------


class Measure(msgspec.Struct, frozen=True):
    """Observe how long a sequence waited for room in the batch, or for its first step in it."""

    name: Literal["room_wait", "first_step"]
    elapsed_ns: int


class EndSpan(msgspec.Struct, frozen=True):
    """End the decode span in the trace of a request."""

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
    | AskHold
    | HoldAction
    | CopyLayers
    | PushTokens
    | PushTail
    | ShareOutput
    | Wake
    | RunStep
    | SwapOut
    | SwapIn
    | Measure
    | EndSpan
)
