"""One thread waits for several channels, and for a listener's new ones: in the kernel, whatever kinds they are.

::

    for one in selector.wait(timeout_s=1.0):
        if one is listener:
            selector.add(listener.accept())
        elif (header := one.receive_ready(into)) is not None:
            ...
"""

from __future__ import annotations

import select
import time
from typing import Protocol

from halfmoon.store.transports.tcp.streams import POLL_MS


class Awaited(Protocol):
    """A channel or a listener."""

    def fileno(self) -> int: ...

    def ready(self) -> bool:
        """It has something to do, even where its descriptor is not readable."""

    def restless(self) -> bool:
        """`ready` may change without a word from the kernel."""


class ChannelSelector:
    """See the module. Of one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._awaited: dict[int, Awaited] = {}

    def add(self, one: Awaited) -> None:
        self._epoll.register(one.fileno(), select.EPOLLIN)
        self._awaited[one.fileno()] = one

    def remove(self, one: Awaited) -> None:
        """Before its `close`."""
        self._epoll.unregister(one.fileno())
        del self._awaited[one.fileno()]

    def wait(self, timeout_s: float) -> list[Awaited]:
        """Channels and listeners that have something to do; none when the time is over. A lost channel is among them:
        its next call raises the reason.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            at_once = [one for one in self._awaited.values() if one.ready()]
            left_s = max(0.0, deadline_s - time.monotonic())
            pause_s = 0.0 if at_once else left_s
            if any(one.restless() for one in self._awaited.values()):
                pause_s = min(pause_s, POLL_MS / 1e3)
            told = [self._awaited[number] for number, _ in self._epoll.poll(pause_s)]
            found = at_once + [one for one in told if one not in at_once]
            if found or left_s <= 0:
                return found

    def close(self) -> None:
        self._epoll.close()
