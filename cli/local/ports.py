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


def port_or_free(port: int) -> int:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return port
    return free_port()
