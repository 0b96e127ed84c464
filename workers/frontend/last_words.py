"""The last message of each request over NATS, told again where a lost connection may have swallowed it.

Core NATS delivers at most once. When the server dies, clients and frontend find the next one each in its own time: an
end that leaves meanwhile reaches nobody, and its client would wait for ever. So the ends of the last seconds are told
again after a reconnect, and each again until the server no longer says that nobody is subscribed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

#: Clients are given so long to find the server again; theirs try every two seconds unless they are told otherwise.
GRACE_S = 10.0
#: An end may have left so long before the loss of the connection was noticed.
KEPT_S = 10.0
AGAIN_S = 0.5
KEPT_BYTES_MAX = 8 << 20


class LastMessage(NamedTuple):
    """As it was sent, at a time of the monotonic clock."""

    subject: str
    payload: bytes
    headers: dict[str, str] | None
    at_s: float


class LastWords:
    """`send(subject, payload, reply subject, headers)` publishes; `probe`: what our reply subjects begin with."""

    def __init__(
        self,
        send: Callable[[str, bytes, str, dict[str, str] | None], None],
        *,
        probe: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._probe = probe
        self._clock = clock
        self._names = (f"end-{number}" for number in itertools.count())
        self._kept: OrderedDict[str, LastMessage] = OrderedDict()
        self._bytes = 0
        self._away = False
        self._grace_until_s = -GRACE_S

    @property
    def in_grace(self) -> bool:
        """The connection is lost, or was a moment ago: who does not listen may be on its way back."""
        return self._away or self._clock() < self._grace_until_s

    def say(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        """Send the end of a request, and keep it for a while."""
        name, now_s = next(self._names), self._clock()
        self._forget(older_than_s=now_s - KEPT_S)
        self._kept[name] = LastMessage(subject, payload, headers, now_s)
        self._bytes += len(payload)
        while self._bytes > KEPT_BYTES_MAX:
            self._drop(next(iter(self._kept)))
        self._send(subject, payload, f"{self._probe}.{name}" if self.in_grace else "", headers)

    def lost(self) -> None:
        """Our connection is lost. Others' messages may come over the next one before `reconnected` is called."""
        self._forget(older_than_s=self._clock() - KEPT_S)
        self._away = True

    def reconnected(self) -> None:
        """Our connection was lost, and is there again."""
        self._away = False
        self._grace_until_s = self._clock() + GRACE_S
        for name in list(self._kept):
            self._again(name)

    def unheard(self, name: str) -> None:
        """The server says that nobody was subscribed."""
        if name in self._kept and self.in_grace:
            asyncio.get_running_loop().call_later(AGAIN_S, self._again, name)

    def _again(self, name: str) -> None:
        end = self._kept.get(name)
        if end is not None:
            self._send(end.subject, end.payload, f"{self._probe}.{name}", end.headers)

    def _forget(self, *, older_than_s: float) -> None:
        if self.in_grace:
            return
        while self._kept and next(iter(self._kept.values())).at_s < older_than_s:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        self._bytes -= len(self._kept.pop(name).payload)
