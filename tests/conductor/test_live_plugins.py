"""A policy of another package in force at conductors on a real nats-server; one without the package stops by name."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conductor_scripts import S, arrived, prefill, store
from live_conductors import CLUSTER, client, conductor, decisions_of, log_of, reach, replayed, say
from live_conductors import status as status_of
from plugin_packages import site_of

from halfmoon.conductor.core.placement.policies import installed
from halfmoon.conductor.plugins import install_plugins
from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.events import PolicyChanged
from halfmoon.schemas.policy import Policy

QUIET = Policy(heartbeat_ns=100 * S, lost_after_ns=400 * S)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with site_of(tmp_path) as place:
        install_plugins()
        yield place


async def halfmoon(url: str, *words: str, packages: str = "") -> tuple[int, str]:
    """Exit status and standard error of a command, in a process with these packages."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "halfmoon.cli.main", *words, "--nats", url),
        env={**os.environ, "PYTHONPATH": packages},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, err.decode()


async def test_conductors_decide_by_a_plugin_and_one_without_it_stops_by_name(
    nats_url: str, site: Path
) -> None:
    async with client(nats_url) as bus, conductor(nats_url, "c1", QUIET):
        await say(bus, *CLUSTER, prefill(1), store("p1"))
        status, err = await halfmoon(nats_url, "policy", "set", "name=best")
        assert (status, err.startswith("halfmoon: policy set name=best: none of halfmoon, ")) == (1, True)
        assert err.endswith(", sticky, fewest-orders@1\n")
        assert await halfmoon(nats_url, "policy", "set", "name=fewest-orders") == (0, "")
        log = await log_of(bus)
        assert isinstance(log[-1].event, PolicyChanged)
        assert log[-1].event.policy.name == "fewest-orders@1"
        last = await say(bus, *(arrived(f"r{number}", 1_000) for number in range(4)))
        assert (await reach(bus, last, "c1")).plugins == ["fewest-orders@1"]
        orders = await decisions_of(bus, 8)
        chosen = [each.decision.worker_id for each in orders if isinstance(each.decision, StartPrefill)]
        assert chosen == ["p0", "p1", "p0", "p1"]
        assert replayed(await log_of(bus)) == orders
        # A conductor that cannot decide so does not decide.
        status, err = await halfmoon(nats_url, "conductor", "--id", "c2")
        assert status == 1
        assert err.endswith(
            "halfmoon: error: policy fewest-orders@1 is not installed here (plug-ins that are: none)\n"
        )
        assert installed() == ["fewest-orders@1"]


async def test_a_conductor_begins_a_log_under_a_plugin_that_its_option_names(
    nats_url: str, site: Path
) -> None:
    status, err = await halfmoon(nats_url, "conductor", "--id", "c1", "--policy", "fewest-orders")
    assert status != 0
    assert err.startswith("halfmoon: --policy fewest-orders: none of halfmoon, ")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "halfmoon.cli.main", "conductor", "--id", "c1", "--nats", nats_url),
        *("--policy", "fewest-orders"),
        env={**os.environ, "PYTHONPATH": str(site)},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with client(nats_url) as bus:
            assert (await status_of(bus, "c1")).policy.name == "fewest-orders@1"
            last = await say(bus, *CLUSTER, arrived("r0", 1_000))
            await reach(bus, last, "c1")
            assert replayed(await log_of(bus)) == await decisions_of(bus, 2)
    finally:
        process.terminate()
        await process.wait()
