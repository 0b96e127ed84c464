"""Delays where the world may have them, for `make test-delays`: races that a quiet machine never shows become common.

With HALFMOON_TEST_DELAYS set to a number, that many in a hundred of these are late by a random time: the first step of
a process of ours (and of one that is forked), of a task, of a thread and of work handed to one, data that comes from a
stream or from the bus. None of it breaks a promise that Python, the kernel or NATS gives, so a test that fails has
found a fault, or waits for the wrong thing.
"""

from __future__ import annotations

import os
import time
from _random import Random  # without what `random` imports: some tests count modules
from typing import TYPE_CHECKING, Any

from halfmoon_after_import import after_import

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import ModuleType

START_S = 1.0
FORK_S = 0.5
STEP_S = 0.06

_CHANCE = Random()
_PART = int(os.environ.get("HALFMOON_TEST_DELAYS") or 0) / 100


def _late_s(longest_s: float) -> float:
    """0: not this time."""
    return _CHANCE.random() * longest_s if _CHANCE.random() < _PART else 0.0


def _tasks(module: ModuleType) -> None:
    import asyncio

    create_task = module.create_task

    async def late(coroutine: Coroutine[Any, Any, Any], wait_s: float) -> Any:
        await asyncio.sleep(wait_s)
        return await coroutine

    def create(coroutine: Coroutine[Any, Any, Any], **more: Any) -> Any:
        wait_s = _late_s(STEP_S)
        if not wait_s:
            return create_task(coroutine, **more)
        task = create_task(late(coroutine, wait_s), **more)
        # A task that is cancelled before it began never awaits the coroutine, of which Python would complain.
        task.add_done_callback(lambda _: coroutine.close())
        return task

    module.create_task = create  # type: ignore[attr-defined]


def _streams(module: ModuleType) -> None:
    import asyncio

    def delayed(read: Callable[..., Coroutine[Any, Any, bytes]]) -> Callable[..., Coroutine[Any, Any, bytes]]:
        async def late(*words: Any) -> bytes:
            data = await read(*words)
            if wait_s := _late_s(STEP_S):
                await asyncio.sleep(wait_s)
            return data

        return late

    for name in ("read", "readexactly", "readuntil"):
        setattr(module.StreamReader, name, delayed(getattr(module.StreamReader, name)))


def _threads(module: ModuleType) -> None:
    start = module.Thread.start

    def begin(thread: Any) -> None:
        run, wait_s = thread.run, _late_s(STEP_S)

        def late() -> None:
            time.sleep(wait_s)
            run()

        if wait_s:
            thread.run = late
        start(thread)

    module.Thread.start = begin


def _executors(module: ModuleType) -> None:
    run = module._WorkItem.run

    def late(item: Any) -> None:
        time.sleep(_late_s(STEP_S))
        run(item)

    module._WorkItem.run = late


def _bus(module: ModuleType) -> None:
    import asyncio

    read = module.TcpTransport.read

    async def late(transport: Any, most: int) -> Any:
        data = await read(transport, most)
        if wait_s := _late_s(STEP_S):
            await asyncio.sleep(wait_s)
        return data

    module.TcpTransport.read = late


def _client(module: ModuleType) -> None:
    """All data of the bus is read by the transport, which is late."""

    def later(_: Any) -> None:
        pass

    module.DirectClient._read_at_once = later


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "asyncio.streams": _streams,
    "asyncio.tasks": _tasks,
    "concurrent.futures.thread": _executors,
    "halfmoon.bus.client": _client,
    "nats.aio.transport": _bus,
    "threading": _threads,
}


def _ours() -> bool:
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read()
    return b"halfmoon" in words and b"pytest" not in words


def _forked() -> None:
    _CHANCE.seed()
    time.sleep(_late_s(FORK_S))


if _PART:
    after_import(_CHANGES)
    if _ours():
        time.sleep(_late_s(START_S))
        os.register_at_fork(after_in_child=_forked)
