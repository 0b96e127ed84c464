"""Figures of all turns that were played, by target, in a file with which another run goes on.

Unlike a world of chaos an input stands for itself, so that other code may go on: how many inputs each version of the
code has borne is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measured import beside, digest_of_all, keep
from tests.fuzz.frame import Target
from tests.fuzz.parts import Turn

#: What the inputs are played against, and what they are made by.
PLAYED = ("bus", "cli", "conductor", "schemas", "store", "workers", "tests/fuzz")
#: A target that has found so much is not played any more.
FOUND_MAX = 5


class Figures(msgspec.Struct):
    """One target. `seconds`: of turns; `cpu_s`: of all processes together. `grown_most`: what a process held more at
    the end of a turn than when it was warm, at most. `inputs_by_code`: by the digest of the code that was played.
    """

    inputs: int = 0
    inputs_meant: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    next_seed: int = 0
    turns: int = 0
    outcomes: dict[str, int] = {}
    grown_most: dict[str, int] = {}
    inputs_by_code: dict[str, int] = {}
    found: list[dict[str, Any]] = []

    def add(self, turn: Turn, code: str) -> None:
        self.inputs += turn.inputs
        self.seconds = round(self.seconds + turn.seconds, 1)
        self.cpu_s = round(self.cpu_s + turn.cpu_s, 1)
        self.next_seed = turn.last + 1
        self.turns += 1
        for outcome, count in turn.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
        for process in turn.held:
            for name, (warm, end) in process.items():
                self.grown_most[name] = max(self.grown_most.get(name, 0), end - warm)
        self.inputs_by_code[code] = self.inputs_by_code.get(code, 0) + turn.inputs
        self.found += turn.found


class _Kept(msgspec.Struct):
    targets: dict[str, Figures] = {}


class Accumulated:
    """What `--out` holds. Raises msgspec.DecodeError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = beside(*PLAYED)
        self._kept = msgspec.json.decode(path.read_bytes(), type=_Kept) if path.exists() else _Kept()

    def of(self, target: Target) -> Figures:
        figures = self._kept.targets.setdefault(target.name, Figures())
        figures.inputs_meant = target.inputs_meant
        return figures

    def next_of(self, targets: list[Target]) -> Target | None:
        """The one that has least of what is meant for it; None: all have theirs, or have found too much."""
        open_ones = [
            target
            for target in targets
            if self.of(target).inputs < target.inputs_meant and len(self.of(target).found) < FOUND_MAX
        ]
        return min(open_ones, key=lambda target: self.of(target).inputs / target.inputs_meant, default=None)

    def add(self, target: Target, turn: Turn) -> None:
        """Counts the turn, and writes the file."""
        self.of(target).add(turn, digest_of_all(self._beside["modules"]))
        self.save()

    def save(self) -> None:
        every = sorted(self._kept.targets.items())
        for _, figures in every:
            figures.outcomes = dict(sorted(figures.outcomes.items()))
        body = {
            "inputs": sum(figures.inputs for _, figures in every),
            "inputs_meant": sum(figures.inputs_meant for _, figures in every),
            "cpu_s": round(sum(figures.cpu_s for _, figures in every), 1),
            "found": sum(len(figures.found) for _, figures in every),
            "targets": {name: msgspec.to_builtins(figures) for name, figures in every},
            "beside": self._beside,
        }
        keep(self._path, body)
