"""Those whom a batch of rows asks, layer by layer: what is alike whether they hold segments or whole caches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.errors import PartRefused
from halfmoon.workers.attention.tensors import bytes_of
from halfmoon.workers.model.attention.kernel import Tensor


class Place(Protocol):
    """One of them, in the steps of one batch."""

    name: str
    channel: WorkerChannel
    #: For an answer, of exactly its size.
    memory: Tensor


P = TypeVar("P", bound=Place)


class RemotePlaces(Generic[P]):
    """`answer`: what a question is answered with. One thread owns it, and the channels."""

    def __init__(self, answer: Op) -> None:
        self.step = 0
        self._answer = answer
        self._places: list[P] = []
        #: Of the newest list, and the layer of the last question.
        self._number = self._layer = 0
        #: Whose answers are on their way.
        self._asked: list[P] = []
        #: How long each was waited for, ns, since somebody took this away.
        self.waits_ns: Counter[str] = Counter()

    def abandon(self) -> None:
        """Takes the answers that are on their way, for nobody: the channels are good for the next question."""
        asked, self._asked = self._asked, []
        for place in asked:
            try:
                self._hear(place)
            except (ChannelLost, PartRefused):
                continue  # as it will say when it is asked next

    def _hear_all(self, take: Callable[[P], None]) -> None:
        """`take` is called for each answer. Raises ChannelLost and PartRefused, once all that have an answer were
        heard: the channels of the others go on.
        """
        problem: ChannelLost | PartRefused | None = None
        asked, self._asked = self._asked, []
        for place in asked:
            try:
                self._hear(place)
                take(place)
            except (ChannelLost, PartRefused) as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _hear(self, place: P) -> None:
        refusal = bytearray()

        def into(header: MessageHeader) -> memoryview:
            size = header.payload_bytes
            if header.op is Op.REFUSED and size <= place.memory.nbytes:
                refusal.extend(bytes(size))
                return memoryview(refusal)
            if header.op is not self._answer or size != place.memory.nbytes:
                due = f"{self._answer.name} of {place.memory.nbytes}"
                raise MessageRefused(f"payload_bytes: {header.op.name} of {size}, not {due}")
            return bytes_of(place.memory)

        began_ns = time.monotonic_ns()
        header = place.channel.receive(into)
        self.waits_ns[place.name] += time.monotonic_ns() - began_ns
        if (header.layer, header.step, header.slots) != (self._layer, self.step, self._number):
            raise PartRefused(place.name, f"an answer to another question: {header}")
        if header.op is Op.REFUSED:
            raise PartRefused(place.name, refusal.decode(errors="replace"), header.rows)
