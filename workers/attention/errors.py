"""Errors of attention elsewhere. Imports no torch."""

from __future__ import annotations


class PartRefused(Exception):
    """`place` does not hold what it was asked about; the text says what."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


class LenderLost(Exception):
    """`worker_id` does not attend to what it held; the text says why."""

    def __init__(self, worker_id: str, reason: str) -> None:
        super().__init__(reason)
        self.worker_id = worker_id
