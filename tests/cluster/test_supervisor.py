"""The supervisor of `halfmoon up` outlives what its machine lacks: descriptors, disk, a terminal."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.cli.local.output_log import FILE_BYTES_MAX, OutputLog
from halfmoon.cli.local.supervisor import Child, Supervisor

SOON_S = 20.0


async def until(what: object) -> None:
    """Waits until `what()` is true."""
    async with asyncio.timeout(SOON_S):
        while not what():  # type: ignore[operator]
            await asyncio.sleep(0.02)


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
    await until(lambda: deaths)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        await until(lambda: any("cannot be started now" in line for line in lines))
        known = len(deaths)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await until(lambda: len(deaths) > known)
    await supervisor.stop(["child"], within_s=5)


async def test_a_child_that_nobody_could_watch_is_ended_and_started_when_there_are_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is there before the thread that waits for its end."""
    lines: list[str] = []
    deaths: list[int] = []
    supervisor = Supervisor(lambda _, status: deaths.append(status), lambda _, line: lines.append(line))
    log = tmp_path / "child.log"
    log.write_text("")
    child = Child("child", ["no-such-command", "of-this-test"], log)
    await supervisor.start(child)
    begun: list[int] = []

    def no_thread(_: object, pid: int, *__: object) -> None:
        begun.append(pid)
        raise RuntimeError("can't start new thread")

    watcher = type(asyncio.get_child_watcher())
    monkeypatch.setattr(watcher, "add_child_handler", no_thread)
    await until(lambda: len(begun) > 1)
    await until(lambda: not Path(f"/proc/{begun[0]}").exists())
    assert lines.count("warning: cannot be started now: can't start new thread") == 1, "said once"
    known = len(deaths)
    monkeypatch.undo()
    await until(lambda: len(deaths) > known)
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun))
    await supervisor.stop(["child"], within_s=5)


def test_words_to_a_full_disk_are_lost_and_nothing_else() -> None:
    program = "from halfmoon.cli.output import say; say('one'); say('two'); print('goes on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert done.stdout == "goes on\n"


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
