"""A module of this folder that has a `cluster` over `engines` has a `fleet`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.adapters.fake_fleet import FakeFleet
from tests.adapters.harness import FakeEngine
from tests.cluster.harness import Cluster


@pytest.fixture
async def fleet(cluster: Cluster, engines: list[FakeEngine]) -> AsyncIterator[FakeFleet]:
    """With a client of its own."""
    nc = await cluster.connect()
    yield FakeFleet(cluster, engines, nc)
    await nc.close()
