"""Hold points: one thread stands still at an armed one until it is told to go on, and none where nothing is armed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from halfmoon.workers import hold_points
from tests.eventually import eventually_here

STEP = hold_points.DECODE_STEP


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hold_points, "PLACE", tmp_path)
    return tmp_path


def names(place: Path) -> list[str]:
    return sorted(file.name for file in place.iterdir())


def decoding(order_id: str, tokens: int) -> threading.Thread:
    """A thread that reaches each step of an answer."""

    def steps() -> None:
        for number in range(tokens):
            hold_points.reached(STEP, number, order_id)

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    return thread


def test_nothing_holds_where_the_environment_does_not_ask() -> None:
    code = "from halfmoon.workers import hold_points as h; assert h.PLACE is None; h.reached('x', 1, 'y')"
    subprocess.run([sys.executable, "-c", code], check=True, env={}, timeout=60)


def test_nothing_holds_at_a_point_that_is_not_armed(place: Path) -> None:
    (place / hold_points.MOVE).write_text("0")
    hold_points.reached(STEP, 7, "1-0")
    assert names(place) == [hold_points.MOVE]


def test_a_thread_holds_at_its_number_until_it_is_told_to_go_on(place: Path) -> None:
    (place / STEP).write_text("4")
    hold_points.reached(STEP, 3, "1-0")
    assert names(place) == [STEP]
    thread = decoding("1-0", 6)
    eventually_here(lambda: names(place) == [f"{STEP} 1-0"], "it holds")
    thread.join(10 * hold_points.LOOK_S)
    assert thread.is_alive()
    (place / f"{STEP} 1-0").unlink()
    eventually_here(lambda: not thread.is_alive(), "it has gone on")
    assert names(place) == []


def test_one_of_several_holds_and_once(place: Path) -> None:
    (place / STEP).write_text("2")
    threads = [decoding(f"1-{number}", 4) for number in range(4)]
    eventually_here(lambda: sum(thread.is_alive() for thread in threads) == 1, "three have gone past it")
    (held,) = names(place)
    assert threads[int(held[-1])].is_alive()
    (place / held).unlink()
    eventually_here(lambda: not any(thread.is_alive() for thread in threads), "the last one has gone on")
