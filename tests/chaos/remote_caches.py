"""A make-believe decode worker's end of caches that lie at attention workers: `Borrower`, without its channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from halfmoon.workers.attention.errors import RowRefusal
from halfmoon.workers.decode.actions import PushTail
from halfmoon.workers.decode.sequence import DecodeSequence
from tests.chaos.attention_workers import AttentionWorker, Row
from tests.chaos.texts import BLOCK_TOKENS, LAYERS, Text

if TYPE_CHECKING:
    from tests.chaos.decode_workers import DecodeWorker


class Lost(NamedTuple):
    """A place that does not answer, or refuses."""

    worker_id: str
    reason: str
    #: This one alone; 0: all that it holds.
    hold: int = 0


AWAY = RowRefusal("it is away")


class RemoteCaches:
    """See the module. A place is told anew which rows it has when they are not those that it expects."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.worker, self.world = worker, worker.world
        #: The life of each place that its newest answer named: it listens elsewhere in another.
        self.addresses: dict[str, int] = {}
        self._known: dict[str, list[Row]] | None = None
        self._number = 0

    def begin(self, batch: list[DecodeSequence]) -> Lost | None:
        """Says which rows are where, if the places do not know it from the last step."""
        rows: dict[str, list[Row]] = {}
        for sequence in batch:
            covered = 0
            for part in sequence.parts:
                said = (sequence.order_id, part.worker_id, part.hold)
                assert said in self.worker.told, ("I100 counts as held what nobody said", said)
                blocks = sequence.blocks_of(part)
                first = blocks.start * BLOCK_TOKENS
                tokens = sequence.length - first if part.grows else len(blocks) * BLOCK_TOKENS
                # By heads all have its end; by sequence each begins where the one before ends.
                assert first == covered, (
                    "I101 parts overlap, or leave a gap",
                    sequence.order_id,
                    part.worker_id,
                )
                covered += 0 if part.grows else tokens
                rows.setdefault(part.worker_id, []).append(Row(part.hold, tokens, first, part.grows))
        self.world.net.counts["steps split by sequence"] += any(
            not row.grows for some in rows.values() for row in some
        )
        if rows == self._known:
            return None
        self._known, self._number = None, self._number + 1
        for worker_id, some in rows.items():
            place = self._reached(worker_id)
            problem = AWAY if place is None else place.take_list(self._name, some)
            if problem:
                return Lost(worker_id, *problem)
        self._known = rows
        return None

    @property
    def _name(self) -> str:
        return f"{self.worker.process_id}/{self.worker.life}/{self._number}"

    def _reached(self, worker_id: str) -> AttentionWorker | None:
        place = self.world.attention_worker(worker_id)
        there = place.alive and place.link.up and self.worker.link.up
        return place if there and place.life == self.addresses[worker_id] else None

    def end(self, batch: list[DecodeSequence]) -> Lost | None:
        """The step: at one place after the other, so that some may have its tokens when another is lost."""
        assert self._known is not None
        texts: dict[str, list[Text]] = {}
        for sequence in batch:
            for part in sequence.parts:
                texts.setdefault(part.worker_id, []).append(self.world.text(sequence.order.request_id))
        known, self._known = self._known, None
        for worker_id, rows in known.items():
            place = self._reached(worker_id)
            problem = AWAY if place is None else place.attend(self._name, rows, texts[worker_id])
            if problem:
                self.world.net.counts["rows refused" if problem.hold else "places lost"] += 1
                return Lost(worker_id, *problem)
        self._known = {
            worker_id: [row._replace(tokens=row.tokens + row.grows) for row in rows]
            for worker_id, rows in known.items()
        }
        self.world.net.counts["steps elsewhere"] += 1
        return None

    def push(self, tail: PushTail, text: Text) -> str:
        """Sends the end of a prompt to all places. Returns why not, or nothing."""
        marks = self.worker.cache[tail.block]
        prompt_tokens = text.arrived.prompt_tokens
        wanted = [text.kv(place) for place in range(prompt_tokens - tail.tokens, prompt_tokens)]
        assert marks == [wanted[0]] * LAYERS, ("I96 sends KV of somebody else", tail.order_id, marks)
        for worker_id, hold in ((part.worker_id, part.hold) for part in tail.parts):
            place = self._reached(worker_id)
            problem = "it is away" if place is None else place.append(hold, tail.first_token, wanted)
            if problem:
                return f"{worker_id}: {problem}"
        return ""
