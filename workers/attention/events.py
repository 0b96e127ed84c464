"""Stimuli of a holder of others' KV. LoadHold ends in HoldLoaded."""

from __future__ import annotations

from halfmoon.schemas.lending import HoldRequest
from halfmoon.workers.machines import WorkerEvent


class HoldAsked(WorkerEvent, frozen=True, kw_only=True):
    """A decode worker wants KV of its sequence held here. AnswerHold follows, at once or in the end.

    `ask_id` is the shell's, for the answer.
    """

    ask_id: int
    request: HoldRequest


class HoldLoaded(WorkerEvent, frozen=True, kw_only=True):
    """LoadHold is done. `problem` "": the blocks have the requested KV."""

    hold: int
    problem: str = ""
