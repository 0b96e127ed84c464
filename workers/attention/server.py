"""The end that holds segments: answers queries with the states over them. One thread owns it.

A *hold* is a number under which consecutive whole segments of one sequence lie in this worker's cache
(`HeldSegments`). The other end sends once the list of its rows and holds (SLOTS: pairs of row and hold, i32), then asks
layer by layer (QUERY: its rows of q). The answer (PARTIAL) has the state of each segment, in the order of the pairs:
`out` in the model's dtype, as the kernel computes it, then the f32 log-sum-exp. Memory is allocated for a list and for
nothing else of the other end. Where the query is a chunk of one sequence, the pairs name EVERY_ROW, and the answer has
the states of all rows over each segment.

Where the holds have the whole past of sequences, the list is a WHOLE: pairs of hold and tokens, one for each row. Then
each layer's QUERY is followed by a KEY_VALUE, and one answer is for both (`held_caches`). Where they have the last
segments of sequences, and others the first ones (TAILS), it is the same, but the answer is PARTIAL. A channel has a
list of each kind at most; questions name theirs by its number.

Holds grow: APPEND brings tokens (`held`), over a channel of its own. The last message of a push is answered, for the
whole push: DONE, or REFUSED for the first of its messages that was not taken. A hold is asked for once it is complete.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.selector import ChannelSelector
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.errors import RowRefusal
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.held_caches import HeldCaches, HeldTails, problem_of
from halfmoon.workers.attention.slot_list import SlotList
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.model.attention.kernel import Attention, Tensor
from halfmoon.workers.model.paged_cache import PagedCache

log = logging.getLogger(__name__)
#: Of a query: more sequences than a batch has.
ROWS_MAX = 4096
#: In a pair: the rows are all of one sequence.
EVERY_ROW = -1
#: `parts` of a list: of segments, of whole caches, and of their last segments.
STATES, WHOLE, TAILS = 0, 1, 2
WAIT_S = 0.1
_NO_LIST = RowRefusal("slots: there is no list")
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class AttendCounts:
    """Queries over whole caches, and of how many of them attention began before their k and v had come."""

    queries: int = 0
    early: int = 0


@dataclass(slots=True)
class _List:
    """The newest of its kind on a channel."""

    number: int
    kind: int
    slots: SlotList | HeldCaches | None = None
    #: Why there is none of that number; queries for it are on their way already.
    problem: RowRefusal = _NO_LIST

    @property
    def grows(self) -> bool:
        """Queries have no answer of their own: their keys and values follow."""
        return self.kind != STATES


@dataclass(slots=True)
class _Peer:
    """A channel's lists by kind, and its payload that is being received."""

    lists: dict[int, _List] = field(default_factory=dict)
    #: Why a message of the push that is under way was not taken.
    push_problem: str = ""
    receiving: Tensor = _NOTHING
    #: When it was served last, in messages of all.
    served: int = 0


class SegmentServer:
    """`run` serves every channel that connects; `serve` is one message of one channel."""

    def __init__(self, attention: Attention, cache: PagedCache, *, segment_tokens: int, heads: int) -> None:
        self.holds: dict[int, HeldSegments] = {}
        self.counts = AttendCounts()
        self._attention, self._cache = attention, cache
        self._segment_tokens, self._heads = segment_tokens, heads
        self._kv_heads, self._head_dim = (int(size) for size in cache.k.shape[-2:])
        self._peers: dict[WorkerChannel, _Peer] = {}
        self._served = 0
        #: Held while tokens are written to blocks of a hold.
        self._writing = threading.Lock()

    def drop(self, number: int) -> None:
        """From any thread: from its return on, nothing is written to the hold's blocks, and no answer goes out that
        was computed with them.
        """
        with self._writing:
            self.holds.pop(number, None)

    def run(self, listener: ChannelListener, over: Callable[[], bool]) -> None:
        """Serve until `over` returns True; it is asked at least every WAIT_S."""
        selector, channels = ChannelSelector(), list[WorkerChannel]()
        selector.add(listener)
        try:
            while not over():
                found = selector.wait(WAIT_S)
                if listener in found and (channel := listener.accept()) is not None:
                    channels.append(channel)
                    selector.add(channel)
                # One message, then look again: a layer that is begun goes out before another's query makes it wait.
                ready = [one for one in found if isinstance(one, WorkerChannel)]
                if not ready:
                    continue
                channel = min(ready, key=self._turn)
                try:
                    self.serve(channel)
                except ChannelLost as lost:
                    log.info("a channel is over: %s", lost)
                    self._peers.pop(channel, None)
                    selector.remove(channel)
                    channels.remove(channel)
                    channel.close()
        finally:
            for channel in channels:
                channel.close()
            selector.close()

    def _turn(self, channel: WorkerChannel) -> tuple[bool, int]:
        """Rank among the channels that have a message, the least first: one whose layer is begun, then the one that
        waited longest.
        """
        peer = self._peers.setdefault(channel, _Peer())
        begun = any(isinstance(one.slots, HeldCaches) and one.slots.begun for one in peer.lists.values())
        return not begun, peer.served

    @torch.inference_mode()
    def serve(self, channel: WorkerChannel) -> None:
        """Takes the next message, and answers it. Raises ChannelLost."""
        peer = self._peers.setdefault(channel, _Peer())
        self._served += 1
        peer.served = self._served
        header = channel.receive_ready(lambda header: self._memory(peer, header))
        if header is None:
            return
        if header.op is Op.SLOTS:
            self._list(peer, header, channel.peer.message_bytes_max)
        elif header.op is Op.APPEND:
            self._append(channel, peer, header)
        else:
            asked = _list_of(peer, header)
            if isinstance(asked.slots, HeldCaches):
                self._attend_whole(channel, asked.slots, header)
            elif asked.slots is not None:
                self._answer(channel, asked.slots, header)
            elif header.op is Op.KEY_VALUE or not asked.grows:
                self._refuse(channel, header, asked.problem)

    def _refuse(self, channel: WorkerChannel, header: MessageHeader, why: RowRefusal) -> None:
        # A list may name any number as a hold.
        hold = max(0, why.hold)
        refusal = MessageHeader(
            Op.REFUSED, layer=header.layer, rows=hold, step=header.step, slots=header.slots
        )
        channel.send(refusal, memoryview(why.reason.encode()))

    def _append(self, channel: WorkerChannel, peer: _Peer, header: MessageHeader) -> None:
        """Takes one message of a push; answers if it is the last."""
        with self._writing:
            hold = self.holds.get(header.slots)
            problem = f"slots: hold {header.slots} is not here" if hold is None else ""
            if hold is not None and not peer.push_problem:
                problem = hold.problem(header, self._cache)
                if not problem:
                    hold.append(header, peer.receiving, self._cache)
        peer.receiving = _NOTHING
        peer.push_problem = peer.push_problem or problem
        if header.parts:
            return
        if peer.push_problem:
            self._refuse(channel, header, RowRefusal(peer.push_problem, header.slots))
        else:
            channel.send(MessageHeader(Op.DONE, layer=header.layer, step=header.step, slots=header.slots))
        peer.push_problem = ""

    def _memory(self, peer: _Peer, header: MessageHeader) -> memoryview:
        match header.op:
            case Op.SLOTS:
                if header.payload_bytes % 8 or header.rows > ROWS_MAX:
                    raise MessageRefused(
                        f"payload_bytes: {header.payload_bytes} of {header.rows} rows are no pairs"
                    )
                peer.receiving = torch.empty(header.payload_bytes, dtype=torch.uint8)
                return bytes_of(peer.receiving)
            case Op.APPEND:
                # Received whatever the header is: a push is refused where it ends. The channel bounds a message.
                peer.receiving = torch.empty(header.payload_bytes, dtype=torch.uint8)
                return bytes_of(peer.receiving)
            case Op.QUERY | Op.KEY_VALUE:
                return self._rows_memory(peer, header)
            case _:
                raise MessageRefused(f"op: {header.op.name} is not for who holds segments")

    def _rows_memory(self, peer: _Peer, header: MessageHeader) -> memoryview:
        """For rows of q, or of new k and v."""
        asked, new = _list_of(peer, header), header.op is Op.KEY_VALUE
        slots = asked.slots
        row = (2 * self._kv_heads if new else self._heads) * self._head_dim * self._cache.dtype.itemsize
        rows = min(header.rows, ROWS_MAX) if slots is None else slots.rows
        if new and not asked.grows:
            raise MessageRefused("op: KEY_VALUE is not for who holds segments")
        if header.slots != asked.number:
            raise MessageRefused(f"slots: {header.slots} is not the newest list, {asked.number}")
        if header.layer >= self._cache.layers:
            raise MessageRefused(f"layer: {header.layer} of {self._cache.layers}")
        if header.rows != rows or header.payload_bytes != rows * row:
            raise MessageRefused(
                f"rows: {header.rows} in {header.payload_bytes} bytes, where {rows} were due"
            )
        if header.dtype is not DTYPES[self._cache.dtype]:
            raise MessageRefused(f"dtype: {header.dtype.name}, not {DTYPES[self._cache.dtype].name}")
        if slots is not None:
            return bytes_of(slots.new if isinstance(slots, HeldCaches) and new else slots.query)
        peer.receiving = torch.empty(header.payload_bytes, dtype=torch.uint8)
        return bytes_of(peer.receiving)

    def _list(self, peer: _Peer, header: MessageHeader, answer_bytes_max: int) -> None:
        """Takes a list of pairs, instead of the last one of its kind."""
        pairs = [(first, second) for first, second in peer.receiving.view(torch.int32).view(-1, 2).tolist()]
        kind = header.parts if header.parts in (WHOLE, TAILS) else STATES
        taken = peer.lists[kind] = _List(header.slots, kind)
        problem = self._fill(taken, header, pairs, answer_bytes_max)
        taken.problem = problem or taken.problem

    def _fill(
        self, taken: _List, header: MessageHeader, pairs: list[tuple[int, int]], answer_bytes_max: int
    ) -> RowRefusal | None:
        """Returns why it is not taken, or nothing."""
        wanted = [number for number, _ in pairs] if taken.grows else [number for _, number in pairs]
        missing = sorted(set(wanted) - self.holds.keys())
        if missing:
            return RowRefusal(f"slots {header.slots}: hold {missing[0]} is not here", missing[0])
        sizes = {"segment_tokens": self._segment_tokens, "heads": self._heads}
        if taken.grows:
            problem = problem_of(pairs, self.holds)
            if header.parts == TAILS and not problem:
                # As long as they may become: states of each segment that they have room for.
                segments = sum(
                    -(-self.holds[hold].room(self._cache) // self._segment_tokens) for hold in wanted
                )
                if too_large := self._too_large(segments, answer_bytes_max):
                    problem = RowRefusal(too_large)
            if problem is None:
                kind = HeldTails if header.parts == TAILS else HeldCaches
                taken.slots = kind(pairs, self.holds, self._attention, self._cache, **sizes)
            return problem and problem._replace(reason=f"slots {header.slots}: {problem.reason}")
        chunk = all(row == EVERY_ROW for row, _ in pairs)
        if not chunk and any(not 0 <= row < header.rows for row, _ in pairs):
            return RowRefusal(f"slots {header.slots}: a row beyond {header.rows}")
        for number in sorted(set(wanted)):
            hold = self.holds[number]
            if not hold.complete:
                has = f"hold {number} has {hold.tokens} of {hold.expected} tokens"
                return RowRefusal(f"slots {header.slots}: {has}", number)
        if chunk:
            segments = sum(-(-self.holds[hold].tokens // self._segment_tokens) for _, hold in pairs)
            too_large = self._too_large(segments * header.rows, answer_bytes_max)
            if too_large:
                return RowRefusal(f"slots {header.slots}: {too_large}")
        asked = [(max(row, 0), hold) for row, hold in pairs]
        taken.slots = SlotList(header.rows, asked, self.holds, self._cache, chunk=chunk, **sizes)
        return None

    def _too_large(self, states: int, answer_bytes_max: int) -> str:
        """The reason why the state count is wrong; "" if it is right."""
        size = states * self._heads * (self._head_dim * self._cache.dtype.itemsize + 4)
        return f"states of {size} bytes, and {answer_bytes_max} are taken" if size > answer_bytes_max else ""

    def _answer(self, channel: WorkerChannel, slots: SlotList, header: MessageHeader) -> None:
        slots.attend(self._attention, header.layer)
        # Asked after computing: blocks of a hold that was dropped may have had other contents meanwhile.
        problem = self._dropped(slots)
        if problem:
            self._refuse(channel, header, problem)
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

    def _attend_whole(self, channel: WorkerChannel, caches: HeldCaches, header: MessageHeader) -> None:
        """A query begins attention, its k and v end it."""
        if header.op is Op.QUERY:
            self.counts.queries += 1
            self.counts.early += not _has_more(channel)
            caches.ask(header)
            return
        problem = caches.merge(header)
        # Asked after computing, as above.
        with self._writing:
            problem = problem or self._dropped(caches) or caches.keep(header.layer)
        if problem:
            self._refuse(channel, header, problem)
            return
        answer = header._replace(op=caches.answer, payload_bytes=0, sequence=0)
        channel.send(answer, *caches.payload())

    def _dropped(self, slots: SlotList | HeldCaches) -> RowRefusal | None:
        """The first of the list's holds that was dropped or changed; None: all are as they were."""
        gone = [number for number, hold in slots.held.items() if self.holds.get(number) is not hold]
        return RowRefusal(f"hold {gone[0]} was dropped", gone[0]) if gone else None


def _list_of(peer: _Peer, header: MessageHeader) -> _List:
    """The list that a question is about; the newest one where it names none that is here."""
    for one in peer.lists.values():
        if one.number == header.slots:
            return one
    return max(peer.lists.values(), key=lambda one: one.number, default=_List(0, STATES))


def _has_more(channel: WorkerChannel) -> bool:
    """The next message is here already, at least in part."""
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    return channel.ready() or bool(poller.poll(0))
