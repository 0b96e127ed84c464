"""Makes the harness of this folder importable; one nats-server for all tests of the folder, of which none kills it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.store.agent import open_transports
from tests import nats_in_process

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Each test reads the log from where it starts (`Cluster.log`), and gives decisions of its own (`CAUSES`)."""
    server = EmbeddedServer.start(tmp_path_factory.mktemp("nats"))
    yield server.url
    server.stop()


@pytest.fixture
def nats_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a test that is marked `pure`, where `run_at` has a server within the process; its agents open no port."""
    if request.node.get_closest_marker("pure"):
        monkeypatch.setattr(open_transports, "OPENERS", {"shm": open_transports.open_shm})
        return nats_in_process.URL
    url: str = request.getfixturevalue("server_url")
    return url
