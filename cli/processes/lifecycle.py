"""The life of any process of the cluster: it connects, reports that it is well, and ends on a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from halfmoon.bus.connection import Bus
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.logs import RateLimit
from halfmoon.cli.options import bus_config, stream_limits
from halfmoon.cli.output import say

HEALTH_S = 1.0
#: Within this the log has that a process joined.
JOINED_S = 5.0


def raise_open_files_limit() -> None:
    """Raise the limit to the system's own: each connection is a file, and 1,024 are soon gone."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def say_takes_orders(bus: Bus, who: str) -> None:
    """Report it once the log has that it joined: its subscriptions were sent before that, so the server has them too. A
    server that takes nothing in delays this by a few seconds, and no more.
    """
    await bus.flush(JOINED_S)
    say(f"{who} takes orders")


async def connect(args: argparse.Namespace, name: str) -> Bus:
    """As the options of `add_bus` say; every process does it first of all. Raises BusUnreachable, BusError,
    OptionInvalid.
    """
    raise_open_files_limit()
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimit(burst=500, every_s=0.05))
    return await Bus.connect(bus_config(args, name=name), name=name, limits=stream_limits(args))


def _settle_memory() -> None:
    """Has the collector keep every loaded object, and run less often than for every 700 small objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _touch(file: str) -> None:
    Path(file).touch()


@contextlib.asynccontextmanager
async def healthy(bus: Bus, file: str) -> AsyncIterator[list[asyncio.Task[None]]]:
    """The file is kept fresh within, by the tasks that are given, and gone afterwards; "": none."""
    keeping = [asyncio.create_task(_keep_healthy(bus, file))] if file else []
    try:
        yield keeping
    finally:
        await end_tasks(keeping)
        if file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)


async def _keep_healthy(bus: Bus, file: str) -> None:
    """Keeps a file fresh while the event loop turns and NATS is there: a container's health check looks at it."""
    while True:
        if bus.nc.is_connected:
            _touch(file)
        await asyncio.sleep(HEALTH_S)


def stop_signal() -> asyncio.Event:
    """Set at SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def until_stopped(
    bus: Bus,
    health_file: str,
    *others: asyncio.Future[Any],
    stop: asyncio.Event | None = None,
    over: asyncio.Future[Any] | None = None,
) -> None:
    """Returns at SIGTERM or SIGINT (`stop`, where the process had one before), and when `over` is done; raises the
    error of one of `others`.
    """
    _settle_memory()
    waiting: set[asyncio.Task[Any]] = {asyncio.create_task((stop or stop_signal()).wait())}
    if over is not None:
        waiting.add(asyncio.create_task(asyncio.wait([over])))
    try:
        async with healthy(bus, health_file) as keeping:
            done, _ = await asyncio.wait({*waiting, *keeping, *others}, return_when=asyncio.FIRST_COMPLETED)
            for future in done - waiting:
                future.result()
                raise RuntimeError("a part of the process ended by itself")
    finally:
        await end_tasks(waiting)
