"""`make test-delays`: what it makes late is late, and a process that asks for no delay is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "delays"
#: Says whether the first step of a task came before a later call of the loop, and what was imported unasked.
PROGRAM = """
import sys
unasked = "asyncio" in sys.modules
import asyncio

async def note(words, word):
    words.append(word)

async def main():
    words = []
    task = asyncio.create_task(note(words, "task"))
    await asyncio.sleep(0)
    words.append("later")
    await task
    cut = asyncio.create_task(note(words, "cut off"))
    await asyncio.sleep(0)
    cut.cancel()
    await asyncio.wait([cut])
    print(unasked, *words)

asyncio.run(main())
"""


def said(part: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(FOLDER), "HALFMOON_TEST_DELAYS": part},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout


@pytest.mark.parametrize(
    ("part", "words"), [("100", "False later task\n"), ("", "False task later cut off\n")]
)
def test_a_task_is_late_where_that_is_asked_for(part: str, words: str) -> None:
    assert said(part) == words


def test_data_of_the_bus_and_work_of_threads_can_be_late() -> None:
    """The places that the delays change are where they were: a newer library would lose them in silence."""
    found = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import concurrent.futures.thread as threads, nats.aio.transport as bus;"
            "print(threads._WorkItem.run.__name__, bus.TcpTransport.read.__name__)",
        ],
        env={**os.environ, "PYTHONPATH": str(FOLDER), "HALFMOON_TEST_DELAYS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "late late\n"
