"""`make test-delays` and `make test-kernels`: what they change is changed in a process that asks for it, and nothing in
another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfmoon.workers.model.linear import multiplies

FOLDER = Path(__file__).parent / "injected"
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


#: What a start finds here: the kernels of products in f32 and bf16, whether the row kernel's take bf16 in pairs, the
#: private operator of attention, whether any number of rows but a whole group's has its bits, and the instructions that
#: PyTorch uses.
FOUND = """
import logging, os, torch
from types import SimpleNamespace
from halfmoon.workers.model import self_test
from halfmoon.workers.model.attention.kernel import SdpaAttention
from halfmoon.workers.model.kernels import tiles
from halfmoon.workers.model.linear import Linear
self_test._products_of = lambda engine: lambda rows: []
logging.disable()  # where nothing is compiled a start says so
print(*(Linear(torch.zeros(16, 16, dtype=dtype)).kernel for dtype in (torch.float32, torch.bfloat16)),
    tiles.multiplies_pairs(), SdpaAttention(16, torch.device("cpu"))._flash is not None,
    len(self_test.invariant_row_counts(SimpleNamespace(group_rows=16, rows_apart=False))) > 1,
    torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""


def said(program: str, **variables: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": str(FOLDER), **variables},
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
    assert said(PROGRAM, HALFMOON_TEST_DELAYS=part) == words


def test_what_the_delays_change_is_where_it_was() -> None:
    """A newer library would lose them in silence."""
    assert said(NAMES, HALFMOON_TEST_DELAYS="1") == "late late later begin late late late create\n"


def found(kernel: str) -> dict[str, str]:
    names = ("f32", "bf16", "pairs", "private", "fewer_rows", "capability", "isa")
    return dict(zip(names, said(FOUND, HALFMOON_TEST_KERNEL=kernel).split(), strict=True))


@pytest.mark.slow
def test_each_kernel_differs_from_what_a_start_finds_in_what_it_is_named_for() -> None:
    here = found("")
    # Where oneDNN has no products of bf16, PyTorch's are plain.
    narrow = "onednn" if multiplies(torch.bfloat16) else "plain"
    libraries = {"f32": "onednn", "bf16": narrow}
    expected = {
        "onednn": libraries,
        "plain": {"f32": "plain", "bf16": "plain"},
        "f32": {"bf16": "rows", "pairs": "False"},
        "amx": {"bf16": narrow},
        "public": {**libraries, "private": "False"},
        "whole": {**libraries, "fewer_rows": "False"},
        "avx2": {"capability": "AVX2", "isa": "AVX2", "bf16": "rows", "pairs": "False"},
        "sse": {"capability": "DEFAULT", "isa": "SSE41", "bf16": "rows", "pairs": "False"},
    }
    for kernel, changed in expected.items():
        assert found(kernel) == {**here, **changed}, kernel
    makefile = (FOLDER.parents[1] / "Makefile").read_text()
    assert re.findall(r"^KERNELS := (.*)$", makefile, re.M) == [" ".join(expected)]
