"""Ports of this machine: the one that was asked for, or a free one."""

from __future__ import annotations

import contextlib
import socket

from halfmoon.bus.embedded import free_port
from halfmoon.cli.options import OptionInvalid


def wanted_port(option: str, port: int, host: str) -> int:
    """The port, 0 when none was named. Raises OptionInvalid when it is not free."""
    if port:
        try:
            with socket.create_server((host, port)):
                pass
        except (OSError, OverflowError) as problem:
            raise OptionInvalid(f"{option} {port}: {getattr(problem, 'strerror', None) or problem}") from None
    return port


class PreferredPorts:
    """Ports that nobody asked for by number. Those that were taken are this object's until it is closed: another
    cluster that starts at the same time finds a port free until the server behind it listens.
    """

    def __init__(self) -> None:
        self._claims = contextlib.ExitStack()

    def take(self, port: int) -> int:
        """`port`, or a free one where somebody has it."""
        # A name without a file: the kernel frees it with the process, and it counts for as many as the port does.
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0halfmoon-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            return free_port()
        self._claims.enter_context(claim)
        return port

    def close(self) -> None:
        self._claims.close()
