"""A test that was late while the machine stood still runs once more, alone; any other does not. Runs of pytest inside,
over tests that are written here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.eventually import Late
from tests.reruns import LATE_MAX, ran_out_of_time

ROOT = Path(__file__).parents[1]

TWO = ("-p", "xdist", "-n", "2")
#: `first_time` takes a name; a file remembers. `late` is late while the meter has seen a gap, which is made up.
FIRST_TIME = """
import ctypes
from pathlib import Path
from time import monotonic
import pytest
from tests.eventually import Late
from tests.stalls import METER, STALL_S

def late(what):
    METER.tick(monotonic() + STALL_S + 1)
    raise Late(what)

def stall():
    # Whoever calls into a library this way keeps the interpreter's lock: no other thread runs meanwhile.
    ctypes.PyDLL(None).usleep(int(1.2e6 * STALL_S))

def first_time(name):
    mark = Path(__file__).with_name(name)
    seen = mark.exists()
    with mark.open("a") as file:
        file.write("x")
    return not seen
"""


def run(directory: Path, source: str, *options: str) -> tuple[int, str]:
    """Status and output of pytest over `source`, with nothing of this project but the plugin, and no plugin that is
    installed but `timeout` and, for `-n`, xdist: to import them all takes longer than to run the tests.
    """
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = realtime\ntimeout = 60\n")
    (directory / "test_inside.py").write_text(FIRST_TIME + source)
    named = ["-p", "tests.reruns", "-p", "timeout", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *named, *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


LATE = (
    TimeoutError(),
    Late("x"),
    subprocess.TimeoutExpired("x", 1),
    ExceptionGroup("x", [Late("y"), TimeoutError()]),
)
NOT_LATE = ValueError("Timeout (>"), OSError("timed out"), ExceptionGroup("x", [Late("y"), ValueError("z")])


@pytest.mark.pure
@pytest.mark.parametrize("error", [*LATE, *NOT_LATE], ids=repr)
def test_late_is_what_says_that_time_ran_out(error: Exception) -> None:
    assert ran_out_of_time(error) is (error in LATE)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one process", marks=pytest.mark.slow),
        pytest.param(TWO, id="two processes"),
    ],
)
def test_a_late_test_that_passes_alone_is_late_and_the_run_is_green(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    status, said = run(
        tmp_path,
        """
@pytest.mark.realtime
def test_slow():
    if first_time("slow"):
        late("the moon")

@pytest.fixture
def server():
    if first_time("server"):
        late("a server")

@pytest.mark.realtime
def test_of_a_server(server): pass

def test_fine(): pass
""",
        *options,
    )
    assert status == 0, said
    assert "1 passed, 2 late" in said
    assert "second runs" in said
    assert re.search(
        r"test_inside\.py::test_slow\n"
        r"    at first: tests\.eventually\.Late: the moon; largest stall 2\.\d\d s, \d+\.\d % stolen\n"
        r"    alone: passed in",
        said,
    )
    assert (tmp_path / "slow").read_text() == "xx"


def test_a_stall_counts_for_the_test_in_which_it_was_and_for_each_that_shares_its_fixture(
    tmp_path: Path,
) -> None:
    status, said = run(
        tmp_path,
        """
@pytest.mark.realtime
def test_stalled():
    if first_time("stalled"):
        stall()
        raise Late("the moon")

@pytest.mark.realtime
def test_stalled_and_fine():
    stall()

@pytest.mark.realtime
def test_only_late():
    first_time("only late")
    raise Late("the sun")

@pytest.fixture(scope="session")
def server():
    if first_time("server"):
        late("a server")

@pytest.mark.realtime
def test_one(server): pass

@pytest.mark.realtime
def test_another(server): pass
""",
    )
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "1 failed, 1 passed, 3 late" in said
    assert re.search("FAILED .*::test_only_late", said)
    assert "Late, and nothing stood still" in said
    assert [(tmp_path / name).read_text() for name in ("stalled", "only late")] == ["xx", "x"]


def test_what_is_wrong_is_red_at_once(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        """
@pytest.mark.realtime
def test_late_and_nothing_stood_still():
    if first_time("still"):
        raise Late("x")

@pytest.mark.realtime
def test_a_wrong_value():
    first_time("value")
    assert 1 == 2

def test_late_and_not_of_real_time():
    if first_time("unmarked"):
        late("x")

@pytest.mark.realtime
def test_wrong_and_late_at_once():
    first_time("both")
    stall()
    raise ExceptionGroup("x", [Late("y"), ValueError("z")])
""",
    )
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "4 failed" in said
    assert [(tmp_path / once).read_text() for once in ("still", "value", "unmarked", "both")] == ["x"] * 4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one process"),
        pytest.param(TWO, id="two processes", marks=pytest.mark.slow),
    ],
)
def test_who_is_late_twice_or_wrong_the_second_time_is_red(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, said = run(
        tmp_path,
        """
@pytest.mark.realtime
def test_never():
    first_time("never")
    late("the moon")

@pytest.mark.realtime
def test_wrong_alone():
    if first_time("wrong"):
        late("the sun")
    assert 1 == 2
""",
        *options,
    )
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "2 failed" in said
    assert "late at first, and alone it failed again" in said
    assert re.search(
        r"test_never\n    at first: .*stolen\n    alone: failed, tests\.eventually\.Late: the moon", said
    )
    assert re.search(r"test_wrong_alone\n    at first: .*stolen\n    alone: failed, assert 1 == 2", said)
    assert [(tmp_path / name).read_text() for name in ("never", "wrong")] == ["xx", "xx"]


def test_a_test_whose_second_run_has_no_end_is_red(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        """
import os
@pytest.mark.realtime
def test_dies():
    if first_time("dies"):
        late("the moon")
    os._exit(0)
""",
    )
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert "no second run came to its end" in said


def test_more_late_tests_than_chance_has_are_red_and_none_runs_again(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        f"""
@pytest.mark.realtime
@pytest.mark.parametrize("number", range({LATE_MAX + 1}))
def test_slow(number):
    if first_time(str(number)):
        late("the moon")
""",
    )
    assert status == pytest.ExitCode.TESTS_FAILED, said
    assert f"{LATE_MAX + 1} failed" in said
    assert f"{LATE_MAX + 1} tests were late" in said
    assert (tmp_path / "0").read_text() == "x"


@pytest.mark.parametrize(
    "processes",
    [pytest.param(("-p", "xdist"), id="one", marks=pytest.mark.slow), pytest.param(TWO, id="two")],
)
def test_the_largest_stall_and_its_test_stand_at_the_end(tmp_path: Path, processes: tuple[str, ...]) -> None:
    status, said = run(tmp_path, "def test_quick(): pass\ndef test_stalled(): stall()\n", *processes)
    assert status == 0, said
    ((seconds, test),) = re.findall(r"^largest stall: (\d+)\.\d\d s in (.*)$", said, re.MULTILINE)
    assert (int(seconds) >= 1, test) == (True, "test_inside.py::test_stalled")
