"""The end that holds segments: answers queries with the states over them. One thread owns it.

A *hold* is a number under which consecutive whole segments of one sequence lie in this worker's cache
(`HeldSegments`). The other end says once for which holds it will ask, and for which of its rows (SLOTS: pairs of row
and hold, i32), then asks layer by layer (QUERY: its rows of q). The answer (PARTIAL) has the state of each segment, in
the order of the pairs: `out` in the model's dtype, which is what the kernel computes, then the f32 log-sum-exp. Nothing
is allocated for the other end beyond what its list needs. Where the query is a chunk of one sequence, the pairs name
EVERY_ROW, and the answer has the states of all rows over each segment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import Dtype, MessageHeader, Op
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.selector import ChannelSelector
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.model.attention import Attention, StepRuns, Tensor, runs_of
from halfmoon.workers.model.attention_states import StateStack
from halfmoon.workers.model.paged_cache import PagedCache

log = logging.getLogger(__name__)
#: Of a query: more sequences than a batch has.
ROWS_MAX = 4096
#: In a pair: the rows are all of one sequence.
EVERY_ROW = -1
WAIT_S = 0.1
DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, of any dtype."""
    raw: np.ndarray = tensor.view(torch.uint8).numpy()
    return raw.data.cast("B")


@dataclass(frozen=True, slots=True)
class HeldSegments:
    """`blocks` of the cache, whose first `tokens` tokens are consecutive segments of one sequence."""

    blocks: list[int]
    tokens: int


@dataclass(slots=True)
class SlotList:
    """For which rows of a query the states over which segments are wanted."""

    rows: int
    runs: StepRuns
    segments: int
    query: Tensor
    states: StateStack
    out: Tensor
    chunk: bool
    """All rows are of one sequence."""
    held: dict[int, HeldSegments]


@dataclass(slots=True)
class _Peer:
    """Per channel: its newest list, and what is being received."""

    number: int = 0
    slots: SlotList | None = None
    #: Why there is no list of that number; queries for it are on their way already.
    problem: str = ""
    receiving: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class SegmentServer:
    """`run` serves whoever connects; `serve` is one message of one channel."""

    def __init__(self, attention: Attention, cache: PagedCache, *, segment_tokens: int, heads: int) -> None:
        self.holds: dict[int, HeldSegments] = {}
        self._attention, self._cache = attention, cache
        self._segment_tokens, self._heads = segment_tokens, heads
        self._head_dim = int(cache.k.shape[-1])
        self._peers: dict[WorkerChannel, _Peer] = {}

    def run(self, listener: ChannelListener, over: Callable[[], bool]) -> None:
        """Until `over` says so, which is asked at least every WAIT_S."""
        selector, channels = ChannelSelector(), list[WorkerChannel]()
        selector.add(listener)
        try:
            while not over():
                for one in selector.wait(WAIT_S):
                    if isinstance(one, WorkerChannel):
                        try:
                            self.serve(one)
                        except ChannelLost as lost:
                            log.info("a channel is over: %s", lost)
                            self._peers.pop(one, None)
                            selector.remove(one)
                            channels.remove(one)
                            one.close()
                    elif (channel := listener.accept()) is not None:
                        channels.append(channel)
                        selector.add(channel)
        finally:
            for channel in channels:
                channel.close()
            selector.close()

    @torch.inference_mode()
    def serve(self, channel: WorkerChannel) -> None:
        """Takes what has come, and answers it. Raises ChannelLost."""
        peer = self._peers.setdefault(channel, _Peer())
        header = channel.receive_ready(lambda header: self._memory(peer, header))
        if header is None:
            return
        if header.op is Op.SLOTS:
            peer.problem = self._list(peer, header, channel.peer.message_bytes_max)
        elif peer.slots is not None:
            self._answer(channel, peer.slots, header)
        else:
            self._refuse(channel, header, peer.problem)

    def _refuse(self, channel: WorkerChannel, header: MessageHeader, reason: str) -> None:
        refusal = MessageHeader(Op.REFUSED, layer=header.layer, step=header.step, slots=header.slots)
        channel.send(refusal, memoryview(reason.encode()))

    def _memory(self, peer: _Peer, header: MessageHeader) -> memoryview:
        match header.op:
            case Op.SLOTS:
                if header.payload_bytes % 8 or header.rows > ROWS_MAX:
                    raise MessageRefused(
                        f"payload_bytes: {header.payload_bytes} of {header.rows} rows are no pairs"
                    )
                peer.receiving = torch.empty(header.payload_bytes, dtype=torch.uint8)
                return bytes_of(peer.receiving)
            case Op.QUERY:
                return self._query_memory(peer, header)
            case _:
                raise MessageRefused(f"op: {header.op.name} is not for who holds segments")

    def _query_memory(self, peer: _Peer, header: MessageHeader) -> memoryview:
        row = self._heads * self._head_dim * self._cache.dtype.itemsize
        slots = peer.slots
        rows = min(header.rows, ROWS_MAX) if slots is None else slots.rows
        if header.slots != peer.number:
            raise MessageRefused(f"slots: {header.slots} is not the newest list, {peer.number}")
        if header.layer >= self._cache.layers:
            raise MessageRefused(f"layer: {header.layer} of {self._cache.layers}")
        if header.rows != rows or header.payload_bytes != rows * row:
            raise MessageRefused(
                f"rows: {header.rows} in {header.payload_bytes} bytes, where {rows} were due"
            )
        if header.dtype is not DTYPES[self._cache.dtype]:
            raise MessageRefused(f"dtype: {header.dtype.name}, not {DTYPES[self._cache.dtype].name}")
        if slots is not None:
            return bytes_of(slots.query)
        peer.receiving = torch.empty(header.payload_bytes, dtype=torch.uint8)
        return bytes_of(peer.receiving)

    def _list(self, peer: _Peer, header: MessageHeader, answer_bytes_max: int) -> str:
        """Takes a list of pairs. Returns why not, or nothing."""
        pairs = peer.receiving.view(torch.int32).view(-1, 2).tolist()
        peer.slots, peer.number = None, header.slots
        chunk = all(row == EVERY_ROW for row, _ in pairs)
        if not chunk and any(not 0 <= row < header.rows for row, _ in pairs):
            return f"slots {header.slots}: a row beyond {header.rows}"
        missing = sorted({hold for _, hold in pairs} - self.holds.keys())
        if missing:
            return f"slots {header.slots}: hold {missing[0]} is not here"
        if chunk:
            segments = sum(-(-self.holds[hold].tokens // self._segment_tokens) for _, hold in pairs)
            size = segments * header.rows * self._heads * (self._head_dim * self._cache.dtype.itemsize + 4)
            if size > answer_bytes_max:
                return f"slots {header.slots}: states of {size} bytes, and {answer_bytes_max} are taken"
        wanted = [(max(row, 0), hold) for row, hold in pairs]
        peer.slots = self._slot_list(header.rows, wanted, chunk=chunk)
        return ""

    def _slot_list(self, rows: int, wanted: Sequence[tuple[int, int]], *, chunk: bool) -> SlotList:
        runs, segments = StepRuns(), 0
        cache = self._cache
        held = {number: self.holds[number] for _, number in wanted}
        for row, number in wanted:
            hold = held[number]
            found = runs_of(
                row, hold.blocks, hold.tokens, self._segment_tokens, cache.block_tokens, cache.device,
                part=segments, column=0,
            )  # fmt: skip
            runs.items += found
            segments += sum(run.segments for run in found)
        shape = (self._heads, self._head_dim)
        each = rows if chunk else 1
        return SlotList(
            rows,
            runs,
            segments,
            torch.empty(rows, *shape, dtype=cache.dtype),
            StateStack(segments, each, *shape, cache.device),
            torch.empty(segments, each, *shape, dtype=cache.dtype),
            chunk,
            held,
        )

    def _answer(self, channel: WorkerChannel, slots: SlotList, header: MessageHeader) -> None:
        k, v = self._cache.k[header.layer], self._cache.v[header.layer]
        if slots.chunk:
            self._attention.chunk_states(slots.query, k, v, slots.runs.items, slots.states)
        else:
            self._attention.segment_states(slots.query, k, v, slots.runs, slots.states)
        slots.out.copy_(slots.states.out)
        # Asked after computing: blocks of a hold that was dropped may have had other contents meanwhile.
        for number, hold in slots.held.items():
            if self.holds.get(number) is not hold:
                self._refuse(channel, header, f"hold {number} was dropped")
                return
        answer = MessageHeader(
            Op.PARTIAL,
            header.dtype,
            group=header.group,
            layer=header.layer,
            parts=slots.segments,
            rows=slots.rows,
            step=header.step,
            slots=header.slots,
        )
        channel.send(answer, bytes_of(slots.out), bytes_of(slots.states.lse))
