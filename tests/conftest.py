"""Fixtures that all tests share: a real nats-server, a fresh one for each test that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.bus.embedded import EmbeddedServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer.start(tmp_path / "nats")
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: EmbeddedServer) -> str:
    return nats_server.url
