"""Ports that are held until their server comes, and those that a cluster takes by itself."""

from __future__ import annotations

import socket

import pytest

from halfmoon.cli.local.ports import PreferredPorts
from tests.ports import HeldPorts


def listening(port: int, *, again: bool) -> socket.socket:
    server = socket.socket()
    if again:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("127.0.0.1", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_a_held_port_is_had_by_its_server_alone_and_again() -> None:
    with HeldPorts(count=3) as first:
        for port in range(first, first + 3):
            with pytest.raises(OSError, match="in use"):
                listening(port, again=False)
            for _ in range(2):
                server = listening(port, again=True)
                client = socket.create_connection(("127.0.0.1", port))
                accepted, _ = server.accept()
                with pytest.raises(OSError, match="in use"):
                    listening(port, again=True)
                for one in (accepted, client, server):
                    one.close()
    listening(first, again=True).close()


def test_the_kernel_gives_a_held_port_to_nobody() -> None:
    with HeldPorts() as held:
        others = [HeldPorts() for _ in range(200)]
        assert held not in {other.first for other in others}
        assert len({other.first for other in others}) == 200
        for other in others:
            other.close()


def test_two_clusters_that_start_at_once_take_different_ports() -> None:
    with HeldPorts() as port:
        one, other = PreferredPorts(), PreferredPorts()
        assert one.take(port) == port
        assert other.take(port) != port  # though nobody listens yet
        one.close()
        assert other.take(port) == port
        other.close()
        with listening(port, again=True):
            assert one.take(port) != port
        assert one.take(port) == port
        one.close()
