"""Rows of a batch that ask others for attention, be it to parts or to whole caches: groups, each with its channels,
and what a loss means. On the compute thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.errors import LenderLost, PartRefused
from halfmoon.workers.attention.remote_places import RemotePlaces
from halfmoon.workers.attention.worker_channels import WorkerChannels
from halfmoon.workers.decode.sequence import DecodeSequence

Known = TypeVar("Known")


class RowGroup(ABC, Generic[Known]):
    """Rows that are computed together. On each channel the other end keeps one list of what it will be asked for, which
    is said again only when it changes.
    """

    def __init__(self, channels: WorkerChannels) -> None:
        self.channels = channels
        #: What was said last, to all of them; None: it is said anew.
        self.known: Known | None = None

    @property
    @abstractmethod
    def asked(self) -> Sequence[RemotePlaces[Any]]:
        """Those who are asked for its rows."""

    def close(self) -> None:
        self.channels.close()
        self.known = None


Group = TypeVar("Group", bound=RowGroup[Any])


class BatchBorrower(ABC, Generic[Group]):
    """One for an engine."""

    def __init__(self, engine: Any, hello: ChannelHello, options: ChannelOptions) -> None:
        self._engine, self._hello, self._options = engine, hello, options
        #: By worker that holds something: where it listens. Written by the loop before a part counts as held.
        self.addresses: dict[str, list[str]] = {}
        self._groups: list[Group] = []
        #: By worker: how long the last step waited for it.
        self.waits_ns: dict[str, int] = {}

    def decode(self, batch: Sequence[DecodeSequence]) -> Any:
        """The engine's logits of the batch's next tokens. Raises LenderLost: none of them counts."""
        tokens = [sequence.output[-1] for sequence in batch]
        lengths, tables = [s.length for s in batch], [s.table for s in batch]
        self._take_waits()
        try:
            logits = self._step(batch, tokens, lengths, tables)
            self.waits_ns = self._take_waits()
            return logits
        except ChannelLost as lost:
            # All are opened anew when they are next wanted.
            self.close()
            raise LenderLost(lost.peer, lost.reason) from None
        except PartRefused as refused:
            for group in self._groups:
                group.known = None
            raise LenderLost(refused.place, str(refused), refused.hold) from None

    def _take_waits(self) -> dict[str, int]:
        found = Counter[str]()
        for group in self._groups:
            for places in group.asked:
                found.update(places.waits_ns)
                places.waits_ns.clear()
        return found

    @abstractmethod
    def _step(
        self,
        batch: Sequence[DecodeSequence],
        tokens: list[int],
        lengths: list[int],
        tables: list[list[int]],
    ) -> Any:
        """As `decode`. Raises LenderLost, ChannelLost, PartRefused."""

    @abstractmethod
    def _new_group(self) -> Group: ...

    def _group(self, number: int) -> Group:
        while len(self._groups) <= number:
            self._groups.append(self._new_group())
        return self._groups[number]

    def close(self) -> None:
        """Closes all channels: those to others may have answers under way, which nobody waits for."""
        for group in self._groups:
            group.close()
