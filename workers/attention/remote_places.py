"""The places that a batch of rows asks for attention, layer by layer, whether they hold some segments of a row or all.

A place has one list for each kind of question (`SegmentServer`), sent once and again when the batch changes. Its
answers come in the order in which questions end.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.errors import PartRefused
from halfmoon.workers.attention.server import EVERY_ROW, STATES, WHOLE
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.loading.config import ModelConfig

#: A part, and the row whose it is.
PartOf = tuple[int, KvPart]


class StatesComing:
    """Memory for an answer of states: `out` of every segment, then the log-sum-exp of every segment."""

    def __init__(
        self,
        segments: Sequence[tuple[int, int]],
        config: ModelConfig,
        dtype: torch.dtype,
        chunk_rows: int = 0,
    ) -> None:
        """`segments`: each one's number in its sequence, and its row; with `chunk_rows` a segment has a state for each
        of the `chunk_rows` rows of one chunk.
        """
        numbers, rows = (torch.tensor([one[at] for one in segments], dtype=torch.int64) for at in (0, 1))
        self._where = (numbers,) if chunk_rows else (numbers, rows)
        each = config.heads, config.head_dim
        sizes = (len(segments), chunk_rows, *each) if chunk_rows else (len(segments), *each)
        out_bytes = math.prod(sizes) * dtype.itemsize
        self.memory = torch.empty(out_bytes + 4 * math.prod(sizes[:-1]), dtype=torch.uint8)
        self._out = self.memory[:out_bytes].view(dtype).view(sizes)
        self._lse = self.memory[out_bytes:].view(torch.float32).view(sizes[:-1])

    def write(self, states: StateStack) -> None:
        states.out[self._where] = self._out.float()
        states.lse[self._where] = self._lse


@dataclass(slots=True, eq=False)
class PlaceList:
    """A list of one place. `kind`: STATES, WHOLE or TAILS."""

    kind: int
    name: str
    channel: WorkerChannel
    kv_heads: range
    #: First query head, and how many.
    heads: tuple[int, int]
    #: Of the batch, each once; and the pairs of its SLOTS.
    rows: Tensor
    pairs: Tensor
    query: Tensor
    #: k and v of the new tokens, where it gets them.
    new: Tensor
    #: The answer, of a list of whole caches; those of others are `states`.
    out: Tensor
    states: StatesComing | None = None
    number: int = 0

    @property
    def memory(self) -> Tensor:
        """For an answer, of exactly its size."""
        return self.out.view(torch.uint8).view(-1) if self.states is None else self.states.memory


class RemotePlaces:
    """One thread owns it, and the channels."""

    def __init__(
        self, channels: Mapping[str, WorkerChannel], config: ModelConfig, dtype: torch.dtype
    ) -> None:
        self._channels, self._config, self._dtype = channels, config, dtype
        self.step = 0
        self._lists: list[PlaceList] = []
        #: Of the newest list, and the layer of the last question.
        self._number = self._layer = 0
        #: Whose answers are on their way, in the order in which they come.
        self._asked: list[PlaceList] = []
        #: How long each place was waited for, ns, since somebody took this away.
        self.waits_ns: Counter[str] = Counter()

    def _list(
        self, kind: int, name: str, rows: Sequence[int], pairs: Sequence[tuple[int, int]], kv_heads: range
    ) -> PlaceList:
        config, count = self._config, len(rows)
        group = config.heads // config.kv_heads
        heads = kv_heads.start * group, len(kv_heads) * group
        query = torch.empty(count, heads[1], config.head_dim, dtype=self._dtype)
        new = 0 if kind == STATES else count
        return PlaceList(
            kind=kind,
            name=name,
            channel=self._channels[name],
            kv_heads=kv_heads,
            heads=heads,
            rows=torch.tensor(rows, dtype=torch.int64),
            pairs=torch.tensor(pairs, dtype=torch.int32),
            query=query,
            new=torch.empty(2, new, len(kv_heads), config.head_dim, dtype=self._dtype),
            out=torch.empty_like(query) if kind == WHOLE else torch.empty(0),
        )

    def _states_of(
        self,
        name: str,
        held: Sequence[PartOf],
        columns: Mapping[int, int] | None = None,
        *,
        chunk_rows: int = 0,
    ) -> PlaceList:
        """For the states over whole segments. `columns`: where a row stands in the states, if not where it does in the
        batch; `chunk_rows`: of one sequence, whose the parts are.
        """
        rows = list(range(chunk_rows)) or sorted({row for row, _ in held})
        pairs = [(EVERY_ROW if chunk_rows else rows.index(row), part.hold) for row, part in held]
        found = self._list(STATES, name, rows, pairs, range(self._config.kv_heads))
        segments = [
            (part.first_segment + i, columns[row] if columns else row)
            for row, part in held
            for i in range(part.segments)
        ]
        found.states = StatesComing(segments, self._config, self._dtype, chunk_rows)
        return found

    def _say(self, lists: list[PlaceList]) -> None:
        """Send `lists`, which questions name from now on."""
        self._lists = lists
        for one in self._lists:
            self._number += 1
            one.number = self._number
            header = MessageHeader(Op.SLOTS, parts=one.kind, rows=len(one.rows), slots=one.number)
            one.channel.send(header, bytes_of(one.pairs))

    def ask(self, layer: int, q: Tensor) -> None:
        """Sends the queries `[rows, heads, head_dim]` of one layer to the holders of their sequences."""
        self._layer = layer
        for one in self._lists:
            torch.index_select(q.narrow(1, *one.heads), 0, one.rows, out=one.query)
            self._send(one, Op.QUERY, one.query)
            if one.kind == STATES:
                self._asked.append(one)

    def _send(self, one: PlaceList, op: Op, rows: Tensor) -> None:
        header = MessageHeader(
            op, DTYPES[self._dtype], layer=self._layer, rows=len(one.rows), step=self.step, slots=one.number
        )
        one.channel.send(header, bytes_of(rows))

    def abandon(self) -> None:
        """Takes the answers that are on their way, for nobody: the channels are good for the next question."""
        asked, self._asked = self._asked, []
        for one in asked:
            try:
                self._hear(one)
            except (ChannelLost, PartRefused):
                continue  # as it will say when it is asked next

    def _hear_all(self) -> list[PlaceList]:
        """Those whose answer is here. Raises ChannelLost and PartRefused, once all that have an answer were heard: the
        channels of the others go on.
        """
        problem: ChannelLost | PartRefused | None = None
        asked, self._asked = self._asked, []
        for one in asked:
            try:
                self._hear(one)
            except (ChannelLost, PartRefused) as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return asked

    def _hear(self, one: PlaceList) -> None:
        refusal, memory = bytearray(), one.memory
        due = Op.OUT if one.kind == WHOLE else Op.PARTIAL

        def into(header: MessageHeader) -> memoryview:
            size = header.payload_bytes
            if header.op is Op.REFUSED and size <= memory.nbytes:
                refusal.extend(bytes(size))
                return memoryview(refusal)
            if header.op is not due or size != memory.nbytes:
                wanted = f"{due.name} of {memory.nbytes}"
                raise MessageRefused(f"payload_bytes: {header.op.name} of {size}, not {wanted}")
            return bytes_of(memory)

        began_ns = time.monotonic_ns()
        header = one.channel.receive(into)
        self.waits_ns[one.name] += time.monotonic_ns() - began_ns
        if (header.layer, header.step, header.slots) != (self._layer, self.step, one.number):
            raise PartRefused(one.name, f"an answer to another question: {header}")
        if header.op is Op.REFUSED:
            raise PartRefused(one.name, refusal.decode(errors="replace"), header.rows)


def by_place(parts: Iterable[PartOf]) -> dict[str, list[PartOf]]:
    """The parts at each place, and their rows, in order."""
    found: dict[str, list[PartOf]] = {}
    for row, part in parts:
        found.setdefault(part.worker_id, []).append((row, part))
    return found
