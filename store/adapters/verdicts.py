"""Verdicts: which keys the store has, as far as an engine's scheduler knows; pure, for the scheduler's thread alone.

Rules:

- A key is asked of the store once, while any request wants to know it. Its verdict holds until the last of them ends.
- A verdict comes within `patience_ns`: a key that the store has not answered by then is missing, so that no request
  waits for a store that is slow or gone.
- A load that failed makes its keys missing. Otherwise a request would find them and fail to load them, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Asked:
    since_ns: int
    #: None: not known yet.
    found: bool | None = None
    request_ids: set[str] = field(default_factory=set)


class Verdicts:
    """See the module."""

    def __init__(self, *, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._asked: dict[bytes, _Asked] = {}
        self._by_request: dict[str, set[bytes]] = {}
        self._unsent: list[bytes] = []
        #: Keys that were called missing because no answer came in time.
        self.late = 0

    def ask(self, key: bytes, request_id: str, now_ns: int) -> bool | None:
        """Whether the store has the key; None: ask again later."""
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(now_ns)
            self._unsent.append(key)
        asked.request_ids.add(request_id)
        self._by_request.setdefault(request_id, set()).add(key)
        if asked.found is None and now_ns - asked.since_ns > self._patience_ns:
            asked.found = False
            self.late += 1
        return asked.found

    def take_unsent(self) -> list[bytes]:
        """Keys that the store is to be asked for now."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def answered(self, keys: Sequence[bytes], found: Iterable[bool]) -> None:
        """The store's answer. It is too late for keys that have a verdict."""
        for key, there in zip(keys, found, strict=True):
            asked = self._asked.get(key)
            if asked is not None and asked.found is None:
                asked.found = there

    def stored(self, keys: Iterable[bytes]) -> None:
        """The store has taken these keys just now."""
        self._decide(keys, True)

    def not_loaded(self, keys: Iterable[bytes]) -> None:
        """A load of these keys failed."""
        self._decide(keys, False)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        for key in self._by_request.pop(request_id, ()):
            asked = self._asked[key]
            asked.request_ids.discard(request_id)
            if not asked.request_ids:
                del self._asked[key]

    def __len__(self) -> int:
        return len(self._asked)

    def _decide(self, keys: Iterable[bytes], found: bool) -> None:
        for key in keys:
            if (asked := self._asked.get(key)) is not None:
                asked.found = found
