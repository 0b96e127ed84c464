"""Each fuzz target for a moment, with fixed seeds; all that was ever found, again. `make fuzz` goes on for as long as
it is told.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from tests.fuzz.frame import Found, Play, Target, load, played, target_names


@pytest.mark.parametrize("name", target_names())
def test_a_target_finds_nothing(name: str) -> None:
    target = load(name)
    seed = -1
    try:
        with played(target) as play:
            for file in target.corpus():
                play(file.read_bytes())
            for seed in range(target.test_inputs):
                play(target.input_of(seed))
    except Found as found:
        pytest.fail(f"{name}, seed {seed} (-1: one of the corpus): {found}")


@pytest.mark.parametrize("name", target_names())
def test_a_seed_is_one_input(name: str) -> None:
    target = load(name)
    inputs = [target.input_of(seed) for seed in range(20)]
    assert inputs == [target.input_of(seed) for seed in range(20)]
    assert len(set(inputs)) > 10


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
    time.sleep(5)
    return "fine"


@pytest.mark.parametrize("play", [raises, logs, dies_in_a_thread, hangs])
def test_the_frame_finds_what_no_input_may_do(play: Play) -> None:
    with pytest.raises(Found, match=r"KeyError|no end within"), played(finding(play)) as play_one:
        play_one(b"")
