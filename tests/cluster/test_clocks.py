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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.numbers import SECOND_NS
from tests.cluster.harness import Cluster, all_ready, running
from tests.cluster.prompts import prompt
from tests.cluster.test_failures import nothing_held
from tests.eventually import eventually, within

#: Seconds.
STEPS = (5 * 3600, -7 * 3600, 0)
#: Longer than any lease (60 s), with a writer's grace.
STOP_S = 62
#: Stopped together; the last field says whether the others can serve meanwhile.
STOPPED = (
    (("prefill-0", "decode-0"), True),
    (("store-prefill-0", "store-decode-1"), True),
    (("frontend-0", "conductor-0"), False),
)
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


async def placed(cluster: Cluster, after: int, count: int) -> None:
    """Returns when so many requests have arrived after this event, and each has a placement."""

    async def all_placed() -> bool:
        events = [stamped.event for stamped in await cluster.events(after)]
        arrived = {event.request_id for event in events if isinstance(event, RequestArrived)}
        orders = [o.decision for o in await cluster.decisions() if isinstance(o.decision, StartPrefill)]
        return len(arrived & {order.request_id for order in orders}) == count

    await eventually(all_placed, f"{count} requests are placed", every_s=0.05)


async def a_minute_later(cluster: Cluster, than_ns: int) -> bool:
    """The newest event is STOP_S later than `than_ns`, by the server's clock, which nobody has set. Whoever is not
    stopped tells of itself each second.
    """
    return (await cluster.events())[-1].at_ns >= than_ns + STOP_S * SECOND_NS


async def test_all_clocks_are_set_by_hours_under_requests(cluster: Cluster, clock: Clock) -> None:
    calm = await ask(cluster, 600, "calm")
    began = await cluster.events()
    for step in STEPS:
        before = (await cluster.events())[-1].seq
        asked = [asyncio.ensure_future(ask(cluster, 600, f"{step}{number}")) for number in range(2)]
        await placed(cluster, before, len(asked))
        clock.set(step)
        for answer in await asyncio.gather(*asked):
            assert answer["choices"][0]["text"] == calm["choices"][0]["text"]
            assert all(0 <= spent < 600_000 for spent in answer["timing_ms"].values()), answer["timing_ms"]
        after = await ask(cluster, 600, f"after {step}")
        assert after["choices"][0]["text"] == calm["choices"][0]["text"]
    await all_ready(cluster)
    await nothing_held(cluster)
    # Nobody was lost, and nothing was placed twice, for the sake of a clock.
    kinds = {type(s.event).__name__ for s in await cluster.events(began[-1].seq)}
    assert not kinds & {"WorkerLeft", "StoreLeft", "FrontendLeft", "PrefillFailed", "DecodeFailed"}


@pytest.mark.parametrize(("names", "serves"), STOPPED, ids=["+".join(names) for names, _ in STOPPED])
async def test_processes_that_stand_still_for_a_minute_go_on(
    cluster: Cluster, names: tuple[str, ...], serves: bool
) -> None:
    """Longer than any lease and deadline: what they hold has been given away, and their late words change nothing."""
    calm = await ask(cluster, 600, "calm")
    began = (await cluster.events())[-1].seq
    asked = [asyncio.ensure_future(ask(cluster, 600, f"{names}{number}")) for number in range(2)]
    await placed(cluster, began, len(asked))
    pids = [cluster.kill(name, signal.SIGSTOP) for name in names]
    stopped_ns = (await cluster.events())[-1].at_ns
    try:
        if serves:
            meanwhile = await ask(cluster, 600, f"{names} meanwhile")
            assert meanwhile["choices"][0]["text"] == calm["choices"][0]["text"]
        await eventually(lambda: a_minute_later(cluster, stopped_ns), "a minute has gone by", every_s=1.0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    for answer in await within(asyncio.gather(*asked), "those that were under way are answered"):
        assert answer["choices"][0]["text"] == calm["choices"][0]["text"]
    assert [cluster.pid(name) for name in names] == pids
    await all_ready(cluster)
    await nothing_held(cluster)
    again = await ask(cluster, 600, f"{names} again")
    assert again["choices"][0]["text"] == calm["choices"][0]["text"]
