"""Waiting for what must happen. A test that waits asks here; nothing else in tests looks at a clock.

The bound is one for the whole suite and says nothing about speed: it ends what hangs. Only where a dozen
containers or another engine start, or a long run comes to rest, is a larger one given. A wait that runs out raises
`Late`. What follows from that, tests/reruns.py says.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

#: Seconds. Two busy processes beside the tests and a cold start of ten processes fit into it many times.
BOUND_S = 120.0
#: Of a scenario with all that it waits for.
SCENARIO_S = 2 * BOUND_S
#: Seconds between two looks at a condition.
EVERY_S = 0.02

T = TypeVar("T")


class Late(TimeoutError):
    """A condition did not hold within its bound."""


async def eventually(
    condition: Callable[[], Awaitable[T] | T],
    what: str,
    every_s: float = EVERY_S,
    *,
    bound_s: float | None = None,
) -> T:
    """The first value of `condition` that is true, asked every `every_s` seconds. A coroutine function is awaited at
    each look, and may hang: it is cut off at the bound, BOUND_S or `bound_s` seconds. Raises Late, with `what` was
    waited for and the last value.
    """
    bound_s = BOUND_S if bound_s is None else bound_s
    last: Any = None
    try:
        async with asyncio.timeout(bound_s) as bound:
            while True:
                asked = condition()
                last = await asked if inspect.isawaitable(asked) else asked
                if last:
                    return last
                await asyncio.sleep(every_s)
    except TimeoutError as error:
        if not bound.expired():  # the condition's own
            raise
        raise Late(f"not within {bound_s:.0f} s: {what}; it was {last!r}") from error


@contextlib.contextmanager
def noted_where_late(describe: Callable[[], object]) -> Iterator[None]:
    """A wait that runs out in this block says beside its own words what `describe` then gives."""
    try:
        yield
    except Late as late:
        late.add_note(f"{describe()}")
        raise


async def within(awaitable: Awaitable[T], what: str) -> T:
    """What `awaitable` gives. Raises Late where it hangs, with `what` it was to do; it is cancelled then."""
    try:
        async with asyncio.timeout(BOUND_S) as bound:
            return await awaitable
    except TimeoutError as error:
        if not bound.expired():  # its own
            raise
        raise Late(f"not within {BOUND_S:.0f} s: {what}") from error


def eventually_here(
    condition: Callable[[], T], what: str, every_s: float = EVERY_S, *, bound_s: float | None = None
) -> T:
    """`eventually` for a test without an event loop, or one whose loop must stand still meanwhile."""
    bound_s = BOUND_S if bound_s is None else bound_s
    until = time.monotonic() + bound_s
    while not (last := condition()):
        if time.monotonic() > until:
            raise Late(f"not within {bound_s:.0f} s: {what}; it was {last!r}")
        time.sleep(every_s)
    return last
