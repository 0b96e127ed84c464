"""Agreement of conductors: their states after each compared event, and the conductor that must stop. No clock, no I/O.

After every `Policy.digest_events` events each conductor publishes the digest of its state. Where they differ:

- a conductor whose digest fewer share than another one's stops deciding (2 against 1: the one);
- in a tie (1 against 1) each reads the log again into a fresh core; a conductor that does not get its own digest is
  ill, and stops. Where equal code ran, that settles it. Different code may differ in health: then the side goes on that
  runs the code that began the log, and if none does, the one whose code has the smaller name.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from halfmoon.schemas.events import StateDigested

#: Places of the log that are remembered.
POINTS_MAX = 16


class Verdict(Enum):
    """About this conductor's state at one place of the log."""

    #: No conductor differs.
    AGREED = "agreed"
    #: Fewer differ than agree with us.
    MAJORITY = "majority"
    #: As many differ as agree with us.
    TIE = "tie"
    #: More share another digest than ours.
    MINORITY = "minority"


class Agreement:
    """One conductor's view: the digests it computed, and those it read in the log of all."""

    def __init__(self, conductor_id: str, incarnation: str, code_version: str) -> None:
        self._me = conductor_id, incarnation, code_version
        self._own: OrderedDict[int, str] = OrderedDict()
        #: Place, then (id, incarnation, code version), then digest.
        self._said: OrderedDict[int, dict[tuple[str, str, str], str]] = OrderedDict()

    def computed(self, at_seq: int, digest: str) -> None:
        """Note our own digest at a place of the log."""
        self._own[at_seq] = digest
        while len(self._own) > POINTS_MAX:
            self._own.popitem(last=False)

    def heard(self, event: StateDigested) -> bool:
        """Note a conductor's digest. True when it is known to differ from ours."""
        voices = self._said.setdefault(event.at_seq, {})
        voices[event.conductor_id, event.incarnation, event.code_version] = event.digest
        while len(self._said) > POINTS_MAX:
            self._said.popitem(last=False)
        return self._own.get(event.at_seq, event.digest) != event.digest

    def verdict(self, at_seq: int) -> Verdict:
        sides = self._sides(at_seq)
        mine = len(sides.pop(self._own[at_seq]))
        if not sides:
            return Verdict.AGREED
        theirs = max(map(len, sides.values()))
        if mine == theirs:
            return Verdict.TIE
        return Verdict.MAJORITY if mine > theirs else Verdict.MINORITY

    def yields(self, at_seq: int, code_version: str) -> bool:
        """In a tie, when ours was found healthy: True when it is to stop. `code_version` is that of the log."""
        sides = self._sides(at_seq)
        mine = sides[self._own[at_seq]]
        ranks = [
            min((version != code_version, version) for _, _, version in side)
            for side in sides.values()
            if len(side) == len(mine)
        ]
        return min(ranks) < min((version != code_version, version) for _, _, version in mine)

    def own(self, at_seq: int) -> str:
        return self._own[at_seq]

    def describe(self, at_seq: int) -> str:
        """The conductors and their digests, for people."""
        sides = sorted(self._sides(at_seq).items(), key=lambda side: sorted(side[1]))
        return "; ".join(
            f"{', '.join(sorted(name for name, _, _ in voices))}: {digest}" for digest, voices in sides
        )

    def _sides(self, at_seq: int) -> dict[str, list[tuple[str, str, str]]]:
        voices = {**self._said.get(at_seq, {}), self._me: self._own[at_seq]}
        sides: dict[str, list[tuple[str, str, str]]] = {}
        for voice, digest in voices.items():
            sides.setdefault(digest, []).append(voice)
        return sides
