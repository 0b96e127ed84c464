"""A real cluster that is told nonsense for a moment; `make fuzz-live` goes on for as long as it is told."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode
from halfmoon.schemas.events import WorkerHeartbeat
from tests.bus.permission_table import Process
from tests.fuzz.live_inputs import POWERS, Known, broken, lie, places_of

PROCESSES = [
    Process("conductor-0", "conductor"),
    Process("frontend-0", "frontend"),
    Process("decode-0", "decode", node="decode-0"),
    Process("store-decode-0", "store", node="decode-0"),
    Process("operator", "operator"),
    Process("client", "client"),
    Process("up", "supervisor"),
]
IDS = ["conductor-0", "decode-0", "frontend-0", subjects.CONDUCTORS]


def payload_of(commands: bytes) -> bytes:
    head, _, rest = commands.partition(b"\r\n")
    words = head.split()
    if words[0] == b"PUB":
        return rest[: int(words[-1])]
    return rest[int(words[-2]) : int(words[-1])]


def test_every_role_says_something_of_each_plane_that_it_may() -> None:
    places = places_of(PROCESSES, IDS)
    assert set(places) == {process.name for process in PROCESSES}
    assert {"decisions", "placements", "snapshots", "status", "view"} <= set(places["conductor-0"]) | set(
        places["frontend-0"]
    )
    assert {"events", "take", "tokens", "hold", "storeOpenPut"} <= set(places["decode-0"])
    assert set(places["client"]) == {"generate", "chat", "tokenize", "cancel", "models", "clusterStatus"}


def test_what_is_broken_fits_no_reader_and_a_lie_mostly_does() -> None:
    known = Known({"worker_id": ["decode-0"], "incarnation": ["i1"]})
    known.learn([WorkerHeartbeat(worker_id="decode-0", incarnation="i1")])
    draw, read = random.Random(1), Counter[str]()
    for channels in places_of(PROCESSES, IDS).values():
        for place in (each for places in channels.values() for each in places):
            commands = broken(draw, known, place)
            if place.kind is None or place.subject.startswith(subjects.API):
                continue
            with pytest.raises(MessageInvalid):
                decode(payload_of(commands), place.kind)
            commands = lie(draw, known, place)
            try:
                message = decode(payload_of(commands), place.kind) if commands else None
                read["lies that are read"] += 1
                assert not isinstance(message, POWERS)
            except MessageInvalid:
                read["others"] += 1
    assert read["lies that are read"] > read["others"] > 0


@pytest.mark.long
@pytest.mark.slow
def test_a_cluster_that_is_told_nonsense_serves_as_before() -> None:
    program = Path(__file__).parent / "live.py"
    done = subprocess.run(
        [sys.executable, str(program), "--seconds", "16", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
