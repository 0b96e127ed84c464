"""The disk under nats-server is full: what was accepted waits, what is new is refused, and with room again all is well
without a hand's help.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.schemas.events import DecodeStarted
from tests.cluster.harness import Cluster, running
from tests.cluster.steering import last_seq, told
from tests.eventually import BOUND_S, eventually

NULL = ("--prefill", "1", "--decode", "1", "--engine", "null")
DISK_MIB = 64


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, *, leaving: int = 0) -> Path:
    """A file that takes all of it but `leaving` bytes."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        left = free.f_bavail * free.f_frsize - leaving
        while left > 0:
            left -= file.write(bytes(min(left, 1 << 20)))
        while not leaving and file.write(bytes(4096)):
            pass
    return filler


async def ask(
    http: aiohttp.ClientSession, cluster: Cluster, tokens: int = 5
) -> tuple[int, dict[str, Any], Any]:
    body = {"prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with http.post(f"{cluster.http}/v1/completions", json=body) as answer:
        return answer.status, await answer.json(), answer.headers


async def ready(http: aiohttp.ClientSession, cluster: Cluster) -> tuple[int, str]:
    async with http.get(f"{cluster.http}/ready") as answer:
        told = await answer.json()
        return answer.status, told.get("error", {}).get("code", "")


async def until_ready(http: aiohttp.ClientSession, cluster: Cluster, wanted: tuple[int, str]) -> None:
    async def told() -> bool:
        return await ready(http, cluster) == wanted

    await eventually(told, f"/ready tells {wanted}", every_s=0.1)


async def until_unstored(http: aiohttp.ClientSession, cluster: Cluster, seconds: float) -> None:
    """The frontend's oldest fact has waited for so long."""

    async def told() -> bool:
        async with http.get(f"{cluster.http}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        (line,) = [line for line in lines if line.startswith("halfmoon_bus_unstored_seconds ")]
        return float(line.split()[1]) > seconds

    await eventually(told, f"a fact has waited for {seconds} s", every_s=0.1)


def said(cluster: Cluster) -> str:
    return (cluster.directory.parents[1] / f"{cluster.name}.out").read_text()


@pytest.mark.slow
async def test_before_the_disk_is_full_new_requests_are_refused(disk: Path) -> None:
    """And are taken again as soon as there is room: nothing had failed."""
    with running(disk, *NULL, "--log-free-mib-min", "16") as cluster:
        async with aiohttp.ClientSession() as http:
            assert (await ask(http, cluster))[0] == 200
            filler = fill(disk, leaving=8 << 20)
            await until_ready(http, cluster, (503, "log_disk_full"))
            status, told, headers = await ask(http, cluster)
            assert (status, told["error"]["code"], headers["retry-after"]) == (503, "log_disk_full", "1")
            refused, taken = "MiB left; new requests are refused", "MiB left: requests are taken again"
            await eventually(lambda: refused in said(cluster), "a person is told")
            filler.unlink()
            await until_ready(http, cluster, (200, ""))
            assert (await ask(http, cluster))[0] == 200
            await eventually(lambda: taken in said(cluster), "a person is told")
        assert "nats-server" not in said(cluster).partition("ready:")[2].partition("stopped")[0].replace(
            cluster.nats, ""
        )


@pytest.mark.slow
async def test_what_was_accepted_on_a_full_disk_is_answered_when_there_is_room(disk: Path) -> None:
    with running(disk, *NULL, "--log-free-mib-min", "0") as cluster:
        timeout = aiohttp.ClientTimeout(total=BOUND_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            assert (await ask(http, cluster))[0] == 200
            before = await last_seq(cluster)
            under_way = asyncio.ensure_future(ask(http, cluster, 20_000))
            await told(cluster, before, DecodeStarted, 1)
            filler = fill(disk)
            await until_unstored(http, cluster, 1.5)
            waiting = [asyncio.ensure_future(ask(http, cluster)) for _ in range(10)]
            await until_unstored(http, cluster, 4.0)
            assert not any(task.done() for task in waiting)
            filler.unlink()
            answers = await asyncio.gather(*waiting, ask(http, cluster))
            assert await ready(http, cluster) == (200, "")
            answers.append(await under_way)
            assert [status for status, _, _ in answers] == [200] * 12
            assert {told["usage"]["completion_tokens"] for _, told, _ in answers} == {20_000, 5}
        assert "nats-server stores nothing though there is room" in said(cluster)
