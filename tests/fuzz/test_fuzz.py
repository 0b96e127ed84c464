"""Each fuzz target for a moment, with fixed seeds; all that was ever found, again. `make fuzz` goes on for as long as
it is told.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.eventually import Late
from tests.fuzz.accumulated import Accumulated
from tests.fuzz.frame import Found, Play, Target, load, played, target_names
from tests.fuzz.parts import Part, Turn, grown, play_part

#: Of a target's inputs of a test. A change is held to its first seeds, all of these among them, by `make fuzz` too.
SHARE = 4


@pytest.mark.parametrize("name", target_names())
def test_a_target_finds_nothing(name: str) -> None:
    target = load(name)
    seed = -1
    try:
        with played(target) as play:
            for file in target.corpus():
                play(file.read_bytes())
            for seed in range(-(-target.test_inputs // SHARE)):
                play(target.input_of(seed))
    except Found as found:
        pytest.fail(f"{name}, seed {seed} (-1: one of the corpus): {found}")


@pytest.mark.pure
@pytest.mark.parametrize("name", target_names())
def test_a_seed_is_one_input(name: str) -> None:
    target = load(name)
    inputs = [target.input_of(seed) for seed in range(20)]
    assert inputs == [target.input_of(seed) for seed in range(20)]
    assert len(set(inputs)) > 10


@pytest.mark.pure
def test_the_page_names_every_target() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fuzzing.md").read_text()
    assert set(re.findall(r"`([a-z_]+)`", page.partition("| --- |")[2].partition("\n\n")[0])) == set(
        target_names()
    )


def sample_turn(found: list[dict[str, Any]]) -> Turn:
    held = [{"rss_bytes": [5, 9]}]
    return Turn("sample", 0, 7, 1.0, 0.5, Counter({"fine": 8}), held=held, found=found)


@pytest.fixture
def little_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of all that fuzzing loads take many seconds."""
    monkeypatch.setattr("tests.fuzz.accumulated.PLAYED", ())
    monkeypatch.setattr("benchmarks.measured.loaded", lambda: {"tests/fuzz/frame.py"})


@pytest.mark.usefixtures("little_is_measured")
def test_figures_add_up_over_runs(tmp_path: Path) -> None:
    target = finding(hangs)
    for _ in range(2):
        kept = Accumulated(tmp_path / "fuzz.json")
        kept.add(target, sample_turn([]))
    figures = Accumulated(tmp_path / "fuzz.json").of(target)
    assert (figures.inputs, figures.next_seed, figures.turns, figures.outcomes) == (16, 8, 2, {"fine": 16})
    assert figures.grown_most == {"rss_bytes": 4}
    assert list(figures.inputs_by_code.values()) == [16]


@pytest.mark.usefixtures("little_is_measured")
def test_the_whole_goes_to_what_lacks_most_and_past_what_has_found_too_much(tmp_path: Path) -> None:
    kept = Accumulated(tmp_path / "fuzz.json")
    bad, good, done = (
        finding(hangs)._replace(name=name, inputs_meant=8 if name == "done" else 90)
        for name in ("bad", "good", "done")
    )
    kept.add(bad, sample_turn([{"problem": "x"}] * 5))
    kept.add(done, sample_turn([]))
    assert kept.next_of([bad, done, good]) == good
    assert kept.next_of([bad, done]) is None


@pytest.mark.pure
def test_what_grows_is_named() -> None:
    warm = {"rss_bytes": 0, "files": 3, "threads": 1}
    assert grown(warm, {"rss_bytes": 1 << 20, "files": 9, "threads": 2}) == ""
    assert grown(warm, {"rss_bytes": 1 << 30, "files": 30, "threads": 1}) == (
        f"rss_bytes grew from 0 to {1 << 30}, files grew from 3 to 30"
    )


def finding(play: Play) -> Target:
    @contextlib.contextmanager
    def playing() -> Iterator[Play]:
        yield play

    return Target("sample", lambda draw: draw.randbytes(4), playing, 0.2, 1, 1)


def raises(_: bytes) -> str:
    return {}["x"]


def logs(_: bytes) -> str:
    try:
        raises(b"")
    except KeyError:
        logging.getLogger("sample").exception("not told to anybody")
    return "fine"


def dies_in_a_thread(_: bytes) -> str:
    thread = threading.Thread(target=raises, args=(b"",))
    thread.start()
    thread.join()
    return "fine"


def hangs(_: bytes) -> str:
    threading.Event().wait()
    return "fine"


@pytest.mark.parametrize("play", [raises, logs, dies_in_a_thread, hangs])
def test_the_frame_finds_what_no_input_may_do(play: Play) -> None:
    with pytest.raises(Found, match=r"KeyError|no end within"), played(finding(play)) as play_one:
        play_one(b"")


@pytest.mark.pure
def test_a_target_that_is_late_on_leaving_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def playing() -> Iterator[Play]:
        yield lambda _: "fine"
        raise Late("its server is gone")

    monkeypatch.setattr("tests.fuzz.parts.load", lambda _: finding(hangs)._replace(playing=playing))
    monkeypatch.setattr("tests.fuzz.parts.signal.signal", lambda *_: None)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    at: Any = context.Value("q", 0)
    play_part("sample", range(3), 60.0, at, context.Event(), there)
    part = msgspec.msgpack.decode(here.recv_bytes(), type=Part)
    assert (part.outcomes, part.problem, at.value) == ({"fine": 3}, "late: its server is gone", -1)
