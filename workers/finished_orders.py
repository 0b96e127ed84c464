"""Orders that have ended, whose tokens their frontends may have missed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, TypeVar

#: Most finished orders whose tokens can still be sent again, and most bytes of them in memory, which long prompts and
#: the log probabilities of their tokens reach first.
FINISHED_MAX, FINISHED_BYTES_MAX = 512, 64 << 20


class AnsweredOrder(Protocol):
    """The answer to one order."""

    @property
    def order_id(self) -> str: ...

    @property
    def host_bytes(self) -> int:
        """Memory that it takes, about."""


F = TypeVar("F", bound=AnsweredOrder)


class FinishedOrders(OrderedDict[str, F]):
    """Those whose tokens can be sent again, by order, the oldest first."""

    kept_bytes = 0

    def keep(self, answer: F) -> None:
        """It has its last token. The oldest make room; the newest is kept, whatever it takes."""
        self[answer.order_id] = answer
        self.kept_bytes += answer.host_bytes
        while len(self) > 1 and (len(self) > FINISHED_MAX or self.kept_bytes > FINISHED_BYTES_MAX):
            _, oldest = self.popitem(last=False)
            self.kept_bytes -= oldest.host_bytes
