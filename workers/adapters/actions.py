"""Instructions of the adapter's machine to its shell."""

from __future__ import annotations

from typing import Any

import msgspec

from halfmoon.schemas.kv import KvPromised, PrefillResult
from halfmoon.workers.decode.actions import EndSpan
from halfmoon.workers.machines import Announce, AnswerResend, Deliver, Report, TakeTokens


class AskEngine(msgspec.Struct, frozen=True):
    """Send the body of a completion to the engine. `block_keys`: of the prompt, to look them up in its cache.

    `gateway_of`: the frontend whose gateway sends it, in its client's words; `body` has what is to be set in these. "":
    the adapter sends it.
    """

    order_id: str
    request_id: str
    body: dict[str, Any]
    block_keys: bytes
    #: Why it computes a prompt whose KV another engine has; "": it does not.
    computes_again: str = ""
    gateway_of: str = ""


class HangUp(msgspec.Struct, frozen=True):
    """Break off the order's request: the engine drops it then."""

    order_id: str


class TellDecode(msgspec.Struct, frozen=True):
    """To the adapter of the decode half: the prompt is computed, or is about to be, and where its KV is."""

    decode_worker_id: str
    message: PrefillResult | KvPromised


class StepSeen(msgspec.Struct, frozen=True):
    """One step of the engine, inferred from the times of its tokens."""

    step_ns: int
    sequences: int
    context_tokens: int


Action = (
    TakeTokens
    | AskEngine
    | HangUp
    | Deliver
    | Report
    | TellDecode
    | AnswerResend
    | Announce
    | EndSpan
    | StepSeen
)
