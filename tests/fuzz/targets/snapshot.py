"""Snapshots of the core, damaged and hostile ones. Bytes that are none are refused; so is what contradicts itself, when
it comes from a file. (`saved_log` goes on with what is taken.)
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import msgspec

from halfmoon.conductor.core.invariants import check
from halfmoon.conductor.core.machine import Core, SnapshotInvalid
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import mutated_bytes, mutated_json
from tests.fuzz.targets._golden import LOGS, plausible
from tests.fuzz.targets.core_events import BEFORE, snapshot_after

TEST_INPUTS = 300
INPUTS_MEANT = 500_000
DEADLINE_S = 20.0


def make(draw: random.Random) -> bytes:
    log, after = draw.choice(LOGS), draw.choice(BEFORE)
    return changed_snapshot(draw, log, snapshot_after(log, after))


def changed_snapshot(draw: random.Random, log: str, snapshot: bytes) -> bytes:
    """Of the bytes, or of what they say."""
    if draw.random() < 0.2:
        return mutated_bytes(draw, snapshot)
    version, state = msgspec.msgpack.decode(snapshot)
    image = msgspec.msgpack.decode(state.pop("index"))
    match draw.randrange(6):
        case 0:
            state = mutated_json(draw, state)
        case 1:
            image = mutated_json(draw, image)
        case _:
            for _ in range(draw.choice((1, 1, 2))):
                state = plausible(draw, log, state)
    try:
        if isinstance(state, dict):
            state["index"] = msgspec.msgpack.encode(image)
        return msgspec.msgpack.encode([version, state])
    except (OverflowError, UnicodeEncodeError, TypeError, RecursionError):  # values that only JSON can say
        return mutated_bytes(draw, snapshot)


def play(content: bytes) -> str:
    outcome = "taken"
    with contextlib.suppress(SnapshotInvalid):
        core = Core.restore(content)
        outcome = "taken, and contradicts itself"
    try:
        core = Core.restore(content, examined=True)
    except SnapshotInvalid as problem:
        if "\n" in str(problem) or len(str(problem)) > 1000:
            raise Found(f"not one line: {problem}") from None
        return "refused" if outcome == "taken" else outcome
    check(core.state)
    core.digest()
    return "taken"


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    yield play
