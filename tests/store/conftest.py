"""Makes the harness of this folder importable; one nats-server for all tests of the folder, of which none kills it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.bus.embedded import EmbeddedServer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Each test reads the log from where it starts (`Cluster.log`), and gives decisions of its own (`CAUSES`)."""
    server = EmbeddedServer.start(tmp_path_factory.mktemp("nats"))
    yield server.url
    server.stop()
