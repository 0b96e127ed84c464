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
    at_once = asyncio.create_task(note(words, "never"))
    at_once.cancel()
    await asyncio.wait([cut, at_once])
    print(unasked, *words)

asyncio.run(main())
"""


#: The names of what the delays stand before.
NAMES = """
import asyncio, concurrent.futures.thread as futures, nats.aio.transport as bus, threading
from halfmoon.bus.client import DirectClient
read = asyncio.StreamReader
changed = (futures._WorkItem.run, bus.TcpTransport.read, DirectClient._read_at_once, threading.Thread.start, read.read,
    read.readexactly, read.readuntil, asyncio.create_task)
print(*(each.__name__ for each in changed))
"""


def said(program: str, part: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
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
    assert said(PROGRAM, part) == words


def test_what_the_delays_change_is_where_it_was() -> None:
    """A newer library would lose them in silence."""
    assert said(NAMES, "1") == "late late later begin late late late create\n"
