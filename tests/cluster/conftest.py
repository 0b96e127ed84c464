"""Fixtures of the tests of whole clusters. Each module has a `cluster`: its own, or one that several share, because
a cluster whose model computes takes longer to start than most tests of it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import nats
import pytest

from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.holding import Holds, running_with_holds
from tests.cluster.steering import draining
from tests.ports import HeldPorts


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of each role with the real model, and workers that know hold points."""
    # A busy machine may take long to start a worker again.
    flags = ("--worker-wait-s", "120", "--dtype", "float32", *PATIENT)
    with running_with_holds(tmp_path_factory.mktemp("pairs"), *flags) as one:
        yield one


@pytest.fixture(scope="session")
def null(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node of each role, nothing computed; blocks of 16 tokens, and nobody is refused for his times."""
    flags = (
        "--prefill",
        "1",
        "--decode",
        "1",
        "--engine",
        "null",
        "--block-tokens",
        "16",
        "--admission",
        "none",
    )
    with running(tmp_path_factory.mktemp("null"), *flags, "--log-mib-max", "64") as one:
        yield one


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill nodes and one decode node with the real model, a disk and metrics, started under a umask that hides
    nothing. Its workers know hold points. Nobody kills them.
    """
    place = tmp_path_factory.mktemp("small")
    sizes = ("--decode", "1", "--pool-mib", "320", "--log-mib-max", "64", "--dtype", "float32", *PATIENT)
    disk = ("--ssd", str(place / "ssd"), "--ssd-bytes", str(64 << 20))
    ports = HeldPorts(count=7)  # all processes but the frontend, which has metrics at its own
    before = os.umask(0)
    try:
        with running_with_holds(place, *sizes, *disk, "--metrics-port", str(ports.first)) as one:
            # The processes have it by now, and other tests' files are no business of this one's.
            os.umask(before)
            yield one
    finally:
        os.umask(before)
        ports.close()


@pytest.fixture
async def one_prefill_worker(small: Cluster) -> AsyncIterator[None]:
    """The other one gets nothing."""
    async with draining(small, "prefill-1"):
        yield


@pytest.fixture
async def nc(cluster: Cluster) -> AsyncIterator[nats.NATS]:
    connection = await cluster.connect("client")
    yield connection
    await connection.close()


@pytest.fixture
def holds(cluster: Cluster) -> Iterator[Holds]:
    """Of a cluster whose workers know hold points; none holds when the test is over."""
    points = Holds(cluster)
    yield points
    points.go_on()
