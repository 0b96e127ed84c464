"""Where processes show their metrics, and the list of such places that `halfmoon up` writes for Prometheus."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas.roles import ROLES, ProcessRole

LOOPBACK = "127.0.0.1"
PORT_MAX = 65535


def address(text: str) -> tuple[str, int]:
    """Host and port of `--metrics`; `[::1]:9464` too. Raises OptionInvalid."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise OptionInvalid(f"--metrics: {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


@contextlib.asynccontextmanager
async def shown(
    args: argparse.Namespace,
    registry: CollectorRegistry,
    refresh: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """Within it `registry` is served, if `--metrics` names a port. Raises OptionInvalid when the port is not free."""
    if not args.metrics:
        yield
        return
    # It takes aiohttp along, which a process without it does without.
    from halfmoon.bus.edge.metrics_page import serve_metrics

    host, port = address(args.metrics)
    try:
        server = await serve_metrics(registry, host=host, port=port, refresh=refresh)
    except OSError as problem:
        # Asyncio's own text names the address again.
        why = os.strerror(problem.errno) if problem.errno else problem
        raise OptionInvalid(f"--metrics {args.metrics}: {why}") from None
    try:
        yield
    finally:
        await server.stop()


class Targets:
    """The processes of a cluster on this machine, at one port after another from `base` on; 0: none is
    served.
    """

    def __init__(self, base: int) -> None:
        self._base = base
        self._count = 0
        self._groups: list[dict[str, object]] = []

    def flags(self, role: ProcessRole) -> list[str]:
        """Flags for the command of the next process, which override its environment; a frontend has metrics at its own
        port.

        Raises OptionInvalid when the port is not free.
        """
        if not self._base or ROLES[role].metrics_at_own_port:
            return ["--metrics", ""]
        port = self._base + self._count
        self._count += 1
        try:
            with socket.create_server((LOOPBACK, port)):
                pass
        except (OSError, OverflowError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise OptionInvalid(f"--metrics-port {self._base}: port {port}: {why}") from None
        self.add(role, f"{LOOPBACK}:{port}")
        return ["--metrics", f"{LOOPBACK}:{port}"]

    def add(self, role: str, at: str) -> None:
        """A process that is served at `at` already."""
        self._groups.append({"targets": [at], "labels": {"job": role}})

    def write(self, file: Path) -> str:
        """Write it for Prometheus' `file_sd_configs`; a line for the user, "" when nothing is served."""
        if not self._base:
            return ""
        file.write_text(json.dumps(self._groups, indent=1) + "\n")
        return f"  Metrics  http://{LOOPBACK}:{self._base} and on; all in {file}\n"
