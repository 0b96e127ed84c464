"""Fixtures of the tests of whole clusters. Each module has a `cluster` of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import nats
import pytest

from tests.cluster.harness import Cluster


@pytest.fixture
async def nc(cluster: Cluster) -> AsyncIterator[nats.NATS]:
    connection = await cluster.connect("client")
    yield connection
    await connection.close()
