"""What a world is made to have, whatever its seed draws: the situation that a planted fault needs.

A seed says nothing of what its world has for longer than the draws stay as they are. A wish does. It brings what it
rests on, and leaves out what it cannot stand beside; all else is drawn as ever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

#: Some are never wished for, and only in the way: "null", engines that compute nothing.
Feature = Literal[
    "null",
    "exact",
    "clock steps",
    "outgrown caches",
    "lending",
    "moves",
    "planner deaths",
    "attention",
    "splits",
    "roles",
    "mixed",
    "stages",
    "slow holders",
    "similar",
    "crowds",
    "pauses",
]
RESTS_ON: dict[Feature, Feature] = {
    "outgrown caches": "exact",
    "lending": "exact",
    "moves": "lending",
    "planner deaths": "moves",
    "attention": "exact",
    "splits": "attention",
}
APART: list[tuple[Feature, Feature]] = [
    ("null", "exact"),
    ("null", "mixed"),
    ("null", "stages"),
    ("lending", "attention"),
    ("lending", "mixed"),
    ("lending", "stages"),
    ("attention", "roles"),
    ("attention", "mixed"),
    ("attention", "stages"),
    ("roles", "mixed"),
    ("mixed", "stages"),
    ("null", "similar"),
    ("exact", "similar"),
    ("mixed", "similar"),
    ("stages", "similar"),
]


class Wishes:
    """Of one world. Raises ValueError for wishes that no world has together."""

    def __init__(self, wants: Collection[Feature]) -> None:
        self._has = set(wants)
        for feature in wants:
            while feature in RESTS_ON:
                feature = RESTS_ON[feature]
                self._has.add(feature)
        if "slow holders" in self._has and self._has.isdisjoint({"lending", "attention"}):
            raise ValueError("slow holders are holders: wish for lending or attention too")
        self._lacks: set[Feature] = set()
        for one, other in APART:
            if one in self._has and other in self._has:
                raise ValueError(f"no world has {one} and {other}")
            self._lacks |= {other} if one in self._has else {one} if other in self._has else set()

    def drawn(self, feature: Feature, drawn: bool) -> bool:
        """Whether the world has it, `drawn` where no wish says so."""
        return feature in self._has or (drawn and feature not in self._lacks)

    def some(self, feature: Feature, drawn: Any, instead: Any) -> Any:
        """`drawn`, or `instead` where that would leave a wished feature without effect."""
        return instead if feature in self._has and not drawn else drawn
