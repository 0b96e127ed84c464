"""A cluster over engines that compute nothing, and what one of them alone would say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import nats

from tests.adapters.fake_engine import next_token
from tests.adapters.fleet import AdaptedFleet
from tests.adapters.harness import FakeEngine
from tests.cluster.harness import Cluster

#: Ten whole blocks of the cluster's, and a little more: computed anew it takes a hundred times as long as what is left.
PROMPT_TOKENS, PROMPT_BLOCKS = 2_580, 10


class FakeFleet(AdaptedFleet):
    """The cluster and its engines, by the names of their workers."""

    def __init__(self, cluster: Cluster, engines: list[FakeEngine], nc: nats.NATS) -> None:
        wires = [engine.wire for engine in engines]
        self.engines = {
            f"{engine.wire}-{wires[:number].count(engine.wire)}": engine
            for number, engine in enumerate(engines)
        }
        super().__init__(cluster, self.engines, nc)

    def fault(self, kind: str, **fields: Any) -> None:
        for each in self.engines.values():
            each.fault(kind, **fields)

    @contextlib.contextmanager
    def refusing(self, status: int, *names: str, **fields: Any) -> Iterator[None]:
        """These engines, or all, refuse each request: with `error`, `headers`, in a stream where it is `streamed`."""
        engines = [self.engines[name] for name in names or self.engines]
        for each in engines:
            each.fault("refuse", status=status, **{"error": {"message": "later"}, **fields})
        try:
            yield
        finally:
            for each in engines:
                each.fault("refuse", status=0)

    def only(self, at: str, status: int = 503) -> contextlib.AbstractContextManager[None]:
        """The other engines take no request."""
        return self.refusing(status, *(name for name in self.names if name != at))

    def other(self, at: str) -> str:
        """The one that is left of two."""
        (name,) = (name for name in self.names if name != at)
        return name


def prompt(number: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return [200 + (number * 6007 + place * 17) % 40_000 for place in range(tokens)]


def answer(ids: list[int], tokens: int) -> list[int]:
    """What one engine alone says."""
    text = list(ids)
    for _ in range(tokens):
        text.append(next_token(text))
    return text[len(ids) :]
