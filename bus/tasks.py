"""Ending tasks for certain, and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

AGAIN_S = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel, until they have ended; their errors are dropped.

    Once is not enough: `asyncio.wait_for` of Python 3.11, through which NATS requests go, swallows a
    cancellation that comes together with its result.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError. The library may swallow a cancellation: then the work is left to itself."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise TimeoutError(f"nothing within {seconds:g} s")
    task.result()
