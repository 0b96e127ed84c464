"""Instructions of a holder of others' KV to its shell, in the imperative."""

from __future__ import annotations

from typing import Protocol

import msgspec

from halfmoon.schemas.lending import HoldRequest

# --- to other processes -------------------------------------------------------------------------------------


class AnswerHold(msgspec.Struct, frozen=True):
    """Reply to HoldAsked. `refused` "": it is held under the number `hold`."""

    ask_id: int
    hold: int = 0
    refused: str = ""


# --- to the thread that attends for others -------------------------------------------------------------------


class OfferHold(msgspec.Struct, frozen=True):
    """From now on, attend to the first `tokens` in these blocks for anyone that asks for `hold`.

    More tokens come over a channel; no question is answered before there are `expected`.
    """

    hold: int
    blocks: list[int]
    tokens: int
    expected: int = 0


class DropHold(msgspec.Struct, frozen=True):
    """Attend to it no longer: its blocks will have other contents."""

    hold: int


# --- to the copy thread -------------------------------------------------------------------------------------


class LoadHold(msgspec.Struct, frozen=True):
    """Bring blocks from the pool of a node of `request` through the own node's into these of the cache; HoldLoaded."""

    hold: int
    request: HoldRequest
    blocks: list[int]


HoldAction = AnswerHold | OfferHold | DropHold | LoadHold


class HoldActions(Protocol):
    """A list of actions that holds theirs too."""

    def append(self, action: HoldAction, /) -> None: ...
