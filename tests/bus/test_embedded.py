"""A nats-server of our own at a port that somebody else is faster to take."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.bus.embedded import EmbeddedServer, PortTaken
from tests.ports import HeldPorts


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which whoever connects is greeted with nonsense."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def port_of(server: EmbeddedServer) -> int:
    return int(server.url.rpartition(":")[2])


def drawn(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """These are thought to be free, one after the other."""
    each = iter(ports)
    monkeypatch.setattr("halfmoon.bus.embedded.free_port", lambda host: next(each))


def test_a_port_that_was_asked_for_and_has_somebody_is_an_error_that_names_it(
    tmp_path: Path, taken: int, nats_server: EmbeddedServer
) -> None:
    for port in (taken, port_of(nats_server)):
        with pytest.raises(PortTaken, match=f"does not start on 127.0.0.1:{port}: .*address already in use"):
            EmbeddedServer.start(tmp_path / "second", port=port)


def test_any_port_is_another_one_where_somebody_was_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: int, nats_server: EmbeddedServer
) -> None:
    with HeldPorts() as free:
        drawn(monkeypatch, taken, port_of(nats_server), free)
        second = EmbeddedServer.start(tmp_path / "second")
    try:
        assert second.process.poll() is None
        assert port_of(second) == free
    finally:
        second.stop()


def test_who_is_always_slower_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: int) -> None:
    drawn(monkeypatch, *[taken] * 9)
    with pytest.raises(PortTaken):
        EmbeddedServer.start(tmp_path / "second")


def test_after_its_death_it_has_the_same_port(nats_server: EmbeddedServer) -> None:
    before = port_of(nats_server)
    nats_server.process.kill()
    nats_server.launch_again()
    nats_server.wait()
    assert port_of(nats_server) == before
