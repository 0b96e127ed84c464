"""Errors of attention elsewhere. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class RowRefusal(NamedTuple):
    """Why something is not answered; `hold`: of which sequence alone, 0: of all that was asked."""

    reason: str
    hold: int = 0


class PartRefused(Exception):
    """`place` does not hold what it was asked about; the text says what. `hold`: it is this one, 0: all of it."""

    def __init__(self, place: str, reason: str, hold: int = 0) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.hold = place, hold


class LenderLost(Exception):
    """`worker_id` does not attend to what it held; the text says why. `hold`: not to this one, 0: to nothing."""

    def __init__(self, worker_id: str, reason: str, hold: int = 0) -> None:
        super().__init__(reason)
        self.worker_id, self.hold = worker_id, hold
