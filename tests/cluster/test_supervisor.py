"""The supervisor of `halfmoon up` outlives what its machine lacks: descriptors, disk, a terminal."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfmoon.cli.local.output_log import FILE_BYTES_MAX, OutputLog
from halfmoon.cli.local.supervisor import Child, Supervisor
from tests.eventually import BOUND_S, eventually


async def test_a_child_that_cannot_be_started_now_is_started_when_there_are_descriptors(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    deaths: list[int] = []
    supervisor = Supervisor(lambda _, status: deaths.append(status), lambda _, line: lines.append(line))
    log = tmp_path / "child.log"
    log.write_text("")
    # A command that ends by itself at once, with a word.
    child = Child("child", ["no-such-command"], log)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    await supervisor.start(child)
    await eventually(lambda: deaths, "the first end")
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        await eventually(lambda: any("cannot be started now" in line for line in lines), "a warning")
        known = len(deaths)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await eventually(lambda: len(deaths) > known, "it is started again, and ends again")
    await supervisor.stop(["child"], within_s=BOUND_S)


async def test_a_child_that_nobody_could_watch_is_ended_and_started_when_there_are_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    deaths: list[int] = []
    supervisor = Supervisor(lambda _, status: deaths.append(status), lambda _, line: lines.append(line))
    log = tmp_path / "child.log"
    log.write_text("")
    child = Child("child", ["no-such-command", "of-this-test"], log)
    await supervisor.start(child)
    begun: list[int] = []

    def begin(words: list[str]) -> None:
        begun.append(os.posix_spawn(words[0], words, os.environ))

    async def nobody_watches(*command: str, **_: Any) -> asyncio.subprocess.Process:
        """The process is there and does not end by itself, and there is no thread that would wait for its end."""
        begin([sys.executable, "-c", "import time; time.sleep(300)", *command[3:]])
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", nobody_watches)
    await eventually(lambda: len(begun) > 1, "two processes that nobody watches")
    await eventually(lambda: not Path(f"/proc/{begun[0]}").exists(), "the first of them is ended")
    assert lines.count("warning: cannot be started now: can't start new thread") == 1, "said once"
    known = len(deaths)
    monkeypatch.undo()
    await eventually(lambda: len(deaths) > known, "it is started again, and ends again")
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun), "all are ended")
    await supervisor.stop(["child"], within_s=BOUND_S)


def test_words_to_a_full_disk_are_lost_and_nothing_else() -> None:
    program = "from halfmoon.cli.output import say; say('one'); say('two'); print('goes on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert done.stdout == "goes on\n"


@pytest.mark.pure
def test_an_output_that_cannot_be_begun_anew_goes_on_in_the_old_file(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.log")
    log.write("x" * FILE_BYTES_MAX)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        log.write("lost")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    log.write("kept")
    log.close()
    assert (tmp_path / "a.log").read_bytes() == b"kept\n"
