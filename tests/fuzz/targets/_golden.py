"""Lines of the golden logs, and changes of them that stay messages: other numbers, names that something else has."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import zstandard

GOLDEN = Path(__file__).parents[2] / "replay" / "golden"
LOGS = ("null", "smollm2", "log_version_1")
NUMBERS = (0, 1, 2, 255, 65536, 10**6, 2**31 - 1, 10**12, 2**53, 2**63 - 2, 2**63 - 1)


@cache
def lines_of(log: str) -> list[bytes]:
    """Without the last one, which counts the others."""
    with (GOLDEN / f"{log}.jsonl.zst").open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read().splitlines()[:-1]


@cache
def values_of(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(log)]


@cache
def _texts(log: str) -> dict[str, list[str]]:
    """What stands in the log under each name of a field."""
    found: dict[str, dict[str, None]] = {}
    for value in values_of(log):
        for place, name in _leaves(value):
            if isinstance(place[name], str):
                found.setdefault(str(name), {})[place[name]] = None
    return {name: list(texts) for name, texts in found.items()}


def plausible(draw: random.Random, log: str, value: dict[str, Any]) -> dict[str, Any]:
    """A copy with one field changed for what it might be."""
    changed = copy.deepcopy(value)
    leaves = [(place, name) for place, name in _leaves(changed) if name not in ("line", "type")]
    if leaves:
        place, name = draw.choice(leaves)
        place[name] = _other(draw, log, str(name), place[name])
    return changed


def _other(draw: random.Random, log: str, name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((*NUMBERS, value + 1, max(0, value - 1), 2 * value))
    if isinstance(value, float):
        return draw.choice((0.0, 1e-300, 1e300, -value, value * 2))
    if isinstance(value, str):
        known = _texts(log).get(name, [])
        return draw.choice([*known, "", "another", value + value, value[: len(value) // 2]])
    return value


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    """Places of everything that is neither list nor mapping: container and key."""
    found: list[tuple[Any, Any]] = []
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for name, inner in entries:
        if isinstance(inner, dict | list):
            found += _leaves(inner)
        else:
            found.append((value, name))
    return found
