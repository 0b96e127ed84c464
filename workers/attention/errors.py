"""Errors of attention elsewhere. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class RowRefusal(NamedTuple):
    """Why something is not answered; `hold`: of which sequence alone, 0: of all that was asked."""

    reason: str
    hold: int = 0


class PartRefused(Exception):
    """`place` does not hold a part that it was asked about; the text names it. `hold` 0: it holds none of them."""

    def __init__(self, place: str, reason: str, hold: int = 0) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.hold = place, hold


class LenderLost(Exception):
    """`worker_id` attends no more to `hold`, or, where that is 0, to any of its holds; the text gives the reason."""

    def __init__(self, worker_id: str, reason: str, hold: int = 0) -> None:
        super().__init__(reason)
        self.worker_id, self.hold = worker_id, hold
