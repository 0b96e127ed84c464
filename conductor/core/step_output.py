"""The output of one step: its decisions, and the grounds of those that are to be explained."""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.conductor.core.explanation import Explanation, MoveGrounds, RoleGrounds
from halfmoon.schemas.decisions import Decision

#: Whether the placements of a request, by its id, are explained.
Explains = Callable[[str], bool]


def explain_all(request_id: str) -> bool:
    return True


def explain_none(request_id: str) -> bool:
    return False


class StepOutput(list[Decision]):
    """StepOutput in order; in `notes` and `moves` the grounds of those on a request for which `explains` is true, in
    `roles` those of changes by load.
    """

    __slots__ = ("explains", "moves", "notes", "roles")

    def __init__(self, explains: Explains = explain_none) -> None:
        self.explains = explains
        self.notes: list[Explanation] = []
        self.moves: list[MoveGrounds] = []
        self.roles: list[RoleGrounds] = []
