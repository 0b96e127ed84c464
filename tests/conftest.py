"""Fixtures that all tests share: a real nats-server, a fresh one for each test that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.bus.embedded import EmbeddedServer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where two processes share the tests (`make test`), a file is one's, and all clusters are one's: a cluster has as
    many processes as the machine has cores, and kills them by the clock.
    """
    if not config.getoption("loadgroup", False):  # so pytest-xdist has it in each of its processes
        return
    for item in items:
        folder, file = item.path.parent.name, item.path.name
        clusters = folder == "cluster" or file == "test_cluster_log.py"
        item.add_marker(pytest.mark.xdist_group("clusters" if clusters else f"{folder}/{file}"))


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer.start(tmp_path / "nats")
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: EmbeddedServer) -> str:
    return nats_server.url
