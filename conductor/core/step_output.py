"""The output of one step: its decisions, and the grounds of those that are to be explained."""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.conductor.core.explanation import Explanation
from halfmoon.schemas.decisions import Decision

#: Whether the placements of a request, by its id, are explained.
Explains = Callable[[str], bool]


def explain_all(request_id: str) -> bool:
    return True


def explain_none(request_id: str) -> bool:
    return False


class StepOutput(list[Decision]):
    """StepOutput in order; in `notes` the grounds of those on a request for which `explains` is true."""

    __slots__ = ("explains", "notes")

    def __init__(self, explains: Explains = explain_none) -> None:
        self.explains = explains
        self.notes: list[Explanation] = []
