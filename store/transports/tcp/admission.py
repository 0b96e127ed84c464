"""Strangers at the TCP data port: connections that have not proved yet that they know the cluster's secret.

A peer needs some milliseconds for that. So there are few strangers at a time, in all and from one address, and when one
too many comes, the one that has waited longest goes: a client that only holds connections open keeps no peer out. Time
is counted from the connection's begin, however often a byte comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

#: A stranger has this long for its whole proof.
ADMISSION_S = 10.0
#: Strangers at a time.
STRANGERS_MAX = 128
STRANGERS_PER_ADDRESS_MAX = 64

C = TypeVar("C", bound=Hashable)


class Admission(Generic[C]):
    """The strangers, the one that has waited longest first. Not thread safe: its server's lock, or its one thread, sees
    to that.
    """

    def __init__(
        self, *, strangers_max: int = STRANGERS_MAX, per_address_max: int = STRANGERS_PER_ADDRESS_MAX
    ) -> None:
        self._strangers_max = strangers_max
        self._per_address_max = per_address_max
        self._addresses: dict[C, str] = {}
        self._count: Counter[str] = Counter()

    def enter(self, connection: C, address: str) -> C | None:
        """A stranger comes. The stranger that has to go for it; None: there was room."""
        gone: C | None = None
        if self._count[address] >= self._per_address_max:
            gone = next(one for one, at in self._addresses.items() if at == address)
        elif len(self._addresses) >= self._strangers_max:
            gone = next(iter(self._addresses))
        if gone is not None:
            self.leave(gone)
        self._addresses[connection] = address
        self._count[address] += 1
        return gone

    def leave(self, connection: C) -> None:
        """It has proved itself, or is gone. Idempotent."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._count[address] -= 1
        if not self._count[address]:
            del self._count[address]

    def __len__(self) -> int:
        return len(self._addresses)
