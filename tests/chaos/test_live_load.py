"""The checks of the live chaos run: what core NATS may lose is told from what nobody may; no figure is lost; a process
that grows is found in a run of a minute.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import live_watch
from tests.chaos.live import agreement
from tests.chaos.live_load import Load, contradiction
from tests.chaos.live_watch import Watch
from tests.eventually import eventually

LAST = {"token_ids": [4, 5, 6], "text": "abc"}


def chunk(index: int, tokens: list[int], text: str) -> dict[str, Any]:
    return {"index": index, "token_ids": tokens, "text": text}


WHOLE = [chunk(0, [4], "a"), chunk(2, [], ""), chunk(1, [5, 6], "bc")]


def test_what_came_whole_contradicts_nothing() -> None:
    assert contradiction(WHOLE, LAST, gap_allowed=False) == ""


@pytest.mark.parametrize("lost", [0, 2])
def test_a_gap_is_allowed_where_a_connection_broke(lost: int) -> None:
    heard = [*WHOLE[:lost], *WHOLE[lost + 1 :]]
    assert contradiction(heard, LAST, gap_allowed=True) == ""
    assert contradiction(heard, LAST, gap_allowed=False)


@pytest.mark.parametrize(
    "heard",
    [
        [chunk(0, [4], "a"), chunk(1, [7], "b")],
        [chunk(0, [4], "a"), chunk(0, [4], "a")],
        [chunk(0, [4], "a"), chunk(1, [5, 6], "bd")],
        [chunk(0, [4, 5, 6, 7], "abc")],
    ],
    ids=["another token", "a token twice", "another text", "a token too many"],
)
def test_what_was_heard_must_be_what_stands_at_last(heard: list[dict[str, Any]]) -> None:
    assert contradiction(heard, LAST, gap_allowed=True)


def test_a_process_that_ends_while_it_is_looked_at_leaves_no_empty_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hours of figures were lost for it."""
    watch = Watch(SimpleNamespace(process=SimpleNamespace(pid=os.getpid())), 0.0)  # type: ignore[arg-type]
    watch.look(0.0)
    monkeypatch.setattr(live_watch, "kind_of", lambda pid: "another")
    monkeypatch.setattr(live_watch, "_anonymous_bytes", lambda pid: int("it has ended"))
    watch.look(0.0)
    assert "another" not in watch.figures()
    assert all(figures["rss_mib_max"] > 0 for figures in watch.figures().values())
    assert watch.figures()


#: Takes so much more memory and so many more files at each line, and says when it has.
GROWING = """
import sys
kept = []
for line in sys.stdin:
    mib, files = map(int, line.split())
    kept.append([bytearray(mib << 20), [open("/dev/null") for _ in range(files)]])
    print("done", flush=True)
"""


def watched(seconds: float, mib: int, files: int) -> Watch:
    """A run of so many seconds over one process, which takes so much more at each look."""
    with subprocess.Popen(
        [sys.executable, "-c", GROWING, "growing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = Watch(SimpleNamespace(process=process), seconds)  # type: ignore[arg-type]
        looks = int(seconds / watch.sample_s)
        for number in range(looks):
            print(mib, files, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"
            watch.look(number * watch.sample_s)
        process.stdin.close()
    return watch


@pytest.mark.parametrize("seconds", [60.0, 600.0])
@pytest.mark.parametrize(
    ("mib", "files", "found"), [(1, 0, ["rss"]), (0, 1, ["fds"]), (1, 1, ["rss", "fds"]), (0, 0, [])]
)
def test_a_process_that_grows_is_found_in_a_short_run_too(
    seconds: float, mib: int, files: int, found: list[str]
) -> None:
    assert [words.split()[0] for words in watched(seconds, mib, files).grown()] == found


def test_a_run_that_is_over_before_it_could_look_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_watch, "SETTLED_PART", 2.0)
    assert watched(60.0, 1, 1).grown() == ["no process was old enough to be looked at"]
    monkeypatch.setattr(live_watch, "SETTLED_PART", 0.9)
    (words,) = watched(60.0, 1, 1).grown()
    assert "was looked at 12 times only" in words


class AskedLoad(Load):
    """Nobody asks for anything but whether the frontend answers again, which the test says."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(), random.Random(0), 0)  # type: ignore[arg-type]
        self.now = itertools.count().__next__  # no clock: each look at it is later than the one before
        self.well = True
        self.asked = 0

    async def _answers(self, _: Any) -> bool:
        self.asked += 1
        return self.well

    def lost(self, started: float) -> bool:
        """Whether a connection that is lost now, of a request that began then, is found to be wrong."""
        self.wrong.clear()
        self._note("connection lost", "", (30, 0), started, "")
        return bool(self.wrong)


async def test_a_connection_may_be_lost_until_the_frontend_has_answered_again() -> None:
    load = AskedLoad()
    assert load.lost(load.now())
    load.well, before = False, load.now()
    load.frontend_hit_at = load.now()
    looking = asyncio.create_task(load._look_after_disturbances())
    await eventually(lambda: load.asked > 1, "it was asked in vain")
    assert not load.lost(load.now())
    load.well = True
    await eventually(lambda: not load.disturbed(load.now()), "it has answered")
    assert not load.lost(before)
    assert load.lost(load.now())
    load.lasting += 1
    assert not load.lost(load.now())
    load.lasting -= 1
    looking.cancel()


def test_conductors_agree_where_all_were_seen_at_one_place() -> None:
    apart = {7: {"a": "x", "b": "x"}, 8: {"c": "y"}}
    assert "not yet" in agreement(apart, 3)
    assert agreement({**apart, 9: dict.fromkeys("abc", "z")}, 3) == ""
    assert "differ at 8" in agreement({**apart, 8: {"c": "y", "a": "z"}, 9: dict.fromkeys("abc", "z")}, 3)
