"""StoreTier: an engine's rows of host memory, kept in the store and brought back; for any engine's adapter.

Rules:

- The engine's scheduler calls from one thread; only `start`, `drain` and `close` wait: a `StoreLink` asks the store.
- A job is a copy between rows of the engine's memory and blocks of the store. It ends in `finished` exactly once,
  within about `transfer_s`. After that nothing touches its rows: a copy that is under way is waited for.
- A store that is away, slow or full costs hits and nothing else: lookups say that keys are missing, jobs fail.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from halfmoon.store.adapters.link import BATCH_BYTES, FAILURES, BlockKeys, LinkOptions, StoreLink
from halfmoon.store.adapters.pace import Pace
from halfmoon.store.adapters.verdicts import Verdicts
from halfmoon.store.errors import AgentUnreachable, BlockMissing

Rows = npt.NDArray[np.uint8]
#: Most keys of one lookup.
LOOKUP_KEYS_MAX = 4096
#: Jobs of one direction that are copied at a time.
JOBS_AT_ONCE = 2


class TierOptions(LinkOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier's options. See docs/vllm.md."""

    title: ClassVar[str] = "tier"

    #: The engine computes a block's tokens in this time: a store that takes longer is not asked. 0: it is always asked.
    block_compute_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.block_compute_s <= 600:
            raise ValueError(f"block_compute_s: {self.block_compute_s} is not in 0..600")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a job: `moved` of its keys are where they should be."""

    job_id: int
    load: bool
    keys: tuple[bytes, ...]
    moved: tuple[bytes, ...]
    seconds: float
    #: Of the monotonic clock.
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    job_id: int
    load: bool
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    began_s: float


class StoreTier:
    """See the module."""

    def __init__(self, rows: Rows, options: TierOptions, *, namespace: bytes) -> None:
        """`rows`: u8 `[rows, block_bytes]`, the engine's memory. `namespace`: see `BlockKeys`."""
        self._rows: Rows | None = rows
        self._row_bytes = rows.shape[1]
        self._options = options
        self._keys = BlockKeys(namespace, options.tenant)
        self._verdicts = Verdicts(patience_ns=int(options.lookup_s * 1e9))
        self._pace = Pace(block_compute_s=options.block_compute_s)
        self._answers: deque[tuple[list[bytes], list[bool]]] = deque()
        self._ended: deque[Finished] = deque()
        self._open: dict[int, _Job] = {}
        self._idle = threading.Condition()
        self._room = {True: asyncio.Semaphore(JOBS_AT_ONCE), False: asyncio.Semaphore(JOBS_AT_ONCE)}
        self._link = StoreLink(options, block_bytes=self._row_bytes)

    # --- the engine's thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Waits for the store, `connect_s` at most. Raises ValueError when its blocks do not suit."""
        self._link.start()

    def lookup(self, key: bytes, request_id: str) -> bool | None:
        """Whether the store has the key; None: ask again, after the next `flush`."""
        self._learn()
        now_ns = time.monotonic_ns()
        if not self._pace.may_ask(request_id, now_ns / 1e9):
            return False
        return self._verdicts.ask(key, request_id, now_ns)

    def flush(self) -> None:
        """Asks the store for all keys that were looked up since the last time."""
        self._learn()
        unsent = self._verdicts.take_unsent()
        for first in range(0, len(unsent), LOOKUP_KEYS_MAX):
            keys = unsent[first : first + LOOKUP_KEYS_MAX]
            if not self._link.spawn(self._probe, keys):
                self._answers.append((keys, [False] * len(keys)))

    def forget(self, request_id: str) -> None:
        """The request has ended: nobody asks for its keys any more."""
        self._verdicts.forget(request_id)
        self._pace.forget(request_id)

    def submit(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int], *, load: bool) -> None:
        """A copy of block `keys[i]` into row `rows[i]`, or of the row into the store."""
        assert len(keys) == len(rows), (len(keys), len(rows))
        job = _Job(job_id=job_id, load=load, keys=tuple(keys), rows=tuple(rows), began_s=time.monotonic())
        if load:
            self._pace.began(job_id, len(keys), job.began_s)
        with self._idle:
            self._open[job_id] = job
        if not self._link.spawn(self._move, job):
            self._end(job, [])

    def finished(self) -> list[Finished]:
        """Jobs that have ended since the last call."""
        found = []
        while self._ended:
            job = self._ended.popleft()
            if job.load:
                self._pace.ended(job.job_id, len(job.moved), job.ended_s)
                self._verdicts.not_loaded(set(job.keys).difference(job.moved))
            else:
                self._verdicts.stored(job.moved)
            found.append(job)
        return found

    def drain(self) -> None:
        """Waits until no job is under way."""
        with self._idle:
            while self._open and self._link.alive:
                self._idle.wait(0.1)

    def counts(self) -> Counter[str]:
        """Events since the last call, by name."""
        late, self._verdicts.late = self._verdicts.late, 0
        slow, self._pace.sent_away = self._pace.sent_away, 0
        return self._link.counts() + Counter(lookups_late=late, requests_slow=slow)

    def close(self) -> None:
        """Ends calls that are under way and lets go of the engine's memory. Idempotent."""
        self._link.close()
        self._rows = None

    def _learn(self) -> None:
        while self._answers:
            self._verdicts.answered(*self._answers.popleft())

    # --- the loop's thread ----------------------------------------------------------------------------------

    async def _probe(self, keys: list[bytes]) -> None:
        found = [False] * len(keys)
        try:
            if (client := self._link.usable()) is not None:
                async with asyncio.timeout(self._options.lookup_s):
                    answers = await client.batch_exists([self._keys.of(key) for key in keys])
                found = [answer is True for answer in answers]
        except FAILURES:
            self._link.rest()
        finally:
            self._answers.append((keys, found))

    async def _move(self, job: _Job) -> None:
        moved: list[bytes] = []
        each = max(1, BATCH_BYTES // self._row_bytes)
        try:
            async with asyncio.timeout(self._options.transfer_s - (time.monotonic() - job.began_s)):
                async with self._room[job.load]:
                    for first in range(0, len(job.keys), each):
                        await self._move_some(job, slice(first, first + each), moved)
        except FAILURES:
            self._link.rest()
        finally:
            # Whatever happened: the engine waits for this job's end.
            self._end(job, moved)

    async def _move_some(self, job: _Job, part: slice, moved: list[bytes]) -> None:
        client = self._link.usable()
        if client is None or self._rows is None:
            return
        keys = job.keys[part]
        rows = [self._rows[row] for row in job.rows[part]]
        block_keys = [self._keys.of(key) for key in keys]
        if job.load:
            answers = await client.batch_get_into(block_keys, rows, verify=True)
        else:
            answers = await client.batch_put(dict(zip(block_keys, rows, strict=True)))
        moved += [key for key, problem in zip(keys, answers, strict=True) if problem is None]
        problems = [problem for problem in answers if problem is not None]
        for problem in problems:
            self._link.count(
                "blocks_missing" if isinstance(problem, BlockMissing) else f"blocks_{problem.code}"
            )
        if any(isinstance(problem, AgentUnreachable) for problem in problems):
            self._link.rest()

    def _end(self, job: _Job, moved: list[bytes]) -> None:
        now_s = time.monotonic()
        ended = Finished(
            job_id=job.job_id,
            load=job.load,
            keys=job.keys,
            moved=tuple(moved),
            seconds=now_s - job.began_s,
            ended_s=now_s,
        )
        self._link.count("blocks_loaded" if job.load else "blocks_stored", len(moved))
        with self._idle:
            self._ended.append(ended)
            del self._open[job.job_id]
            self._idle.notify_all()
