"""Clocks of the processes are set by hours, either way, while a real cluster serves; and processes stop for a minute.

A preloaded library sets the wall clock of every process but nats-server, which is linked statically. The server's own
clock is set in the worlds of chaos and in tests/conductor/test_clock_steps.py.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.harness import Cluster, running
from tests.cluster.prompts import prompt
from tests.cluster.test_failures import nothing_held, whole

#: Seconds.
STEPS = (5 * 3600, -7 * 3600, 0)
STOP_S = 60.0
PROCESSES = ("frontend-0", "prefill-0", "decode-0", "store-prefill-0", "conductor-0")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("HALFMOON_TEST_CLOCKS"), reason="it stops processes for minutes: make test-clocks"
    ),
]


class Clock:
    """The wall clock of every process that is started while it is preloaded."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._shift = mmap.mmap(opened.fileno(), 8)

    def set(self, shift_s: int) -> None:
        self._shift[:] = shift_s.to_bytes(8, "little", signed=True)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clock]:
    """Skipped where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for the library that sets the clock")
    directory = tmp_path_factory.mktemp("clock")
    library, source = directory / "clock_shift.so", Path(__file__).parent / "clock_shift.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    clock = Clock(directory / "shift")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        environment.setenv("CLOCK_SHIFT_FILE", str(directory / "shift"))
        yield clock


@pytest.fixture(scope="module")
def cluster(clock: Clock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(
        tmp_path_factory.mktemp("clocks"), "--ttft-slo-ms", "600000", "--tbt-slo-ms", "60000"
    ) as one:
        yield one


async def ask(cluster: Cluster, length: int, salt: str) -> dict[str, Any]:
    body = {
        "prompt": prompt(length),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.http}/v1/completions", json=body) as reply,
    ):
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
        return answer


async def test_all_clocks_are_set_by_hours_under_requests(cluster: Cluster, clock: Clock) -> None:
    calm = await ask(cluster, 600, "calm")
    began = await cluster.events()
    for step in STEPS:
        asked = [asyncio.ensure_future(ask(cluster, 600, f"{step}{number}")) for number in range(2)]
        await asyncio.sleep(0.5)
        clock.set(step)
        for answer in await asyncio.gather(*asked):
            assert answer["choices"][0]["text"] == calm["choices"][0]["text"]
            assert all(0 <= spent < 600_000 for spent in answer["timing_ms"].values()), answer["timing_ms"]
        after = await ask(cluster, 600, f"after {step}")
        assert after["choices"][0]["text"] == calm["choices"][0]["text"]
    await whole(cluster)
    await nothing_held(cluster)
    # Nobody was lost, and nothing was placed twice, for the sake of a clock.
    kinds = {type(s.event).__name__ for s in await cluster.events(began[-1].seq)}
    assert not kinds & {"WorkerLeft", "StoreLeft", "FrontendLeft", "PrefillFailed", "DecodeFailed"}


@pytest.mark.parametrize("name", PROCESSES)
async def test_a_process_that_stands_still_for_a_minute_goes_on(cluster: Cluster, name: str) -> None:
    """Longer than any lease and deadline: what it holds has been given away, and its late words change nothing."""
    calm = await ask(cluster, 600, "calm")
    asked = [asyncio.ensure_future(ask(cluster, 600, f"{name}{number}")) for number in range(2)]
    await asyncio.sleep(0.7)
    pid = cluster.kill(name, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        if name != "frontend-0":
            meanwhile = await ask(cluster, 600, f"{name} meanwhile") if name != "conductor-0" else calm
            assert meanwhile["choices"][0]["text"] == calm["choices"][0]["text"]
        await asyncio.sleep(max(0.0, STOP_S - time.monotonic() + stopped))
    finally:
        cluster.kill(name, signal.SIGCONT)
    for answer in await asyncio.gather(*asked):
        assert answer["choices"][0]["text"] == calm["choices"][0]["text"]
    assert cluster.pid(name) == pid
    await whole(cluster)
    await nothing_held(cluster)
    again = await ask(cluster, 600, f"{name} again")
    assert again["choices"][0]["text"] == calm["choices"][0]["text"]
