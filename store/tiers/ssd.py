"""The SSD tier: blocks that DRAM cannot keep go to one file (`ssd_file`). They come back when the conductor found
loading cheaper than computing.

Rules.

- Nothing of the hot path waits for the disk. Blocks that will be evicted next are copied ahead of time, without being
  held: should one be evicted in the middle of its copy, the copy is thrown away. A block that the disk was too slow for
  is lost with its eviction, and counted (`ssd_unsaved`).
- A read compares the block's checksum. A block that differs from the one put is forgotten and announced as evicted: a
  miss.
- A disk that fails becomes an event (`TierLost`): no block is there any more, and the file is opened again after a
  pause that grows. The node goes on without it.

Used from the event loop; its own threads read and write.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from halfmoon.schemas.events import Tier as TierName
from halfmoon.store.errors import BlockMissing, StoreError, TransferError
from halfmoon.store.pool.eviction import Eviction, make_eviction
from halfmoon.store.pool.guard import PoolGuard
from halfmoon.store.pool.segment import PoolView
from halfmoon.store.pool.slots import Change, Idle
from halfmoon.store.tiers.base import Entry, Lent, Move
from halfmoon.store.tiers.options import SsdOptions
from halfmoon.store.tiers.ssd_file import NoRoomForTier, SsdFile, TierError, runs_of
from halfmoon.store.transports.base import Call, Cancellation, in_thread

#: One batch of the write-back; a read waits behind no more than this.
BATCH_BYTES = 32 * 1024 * 1024
IDLE_S = 0.05
#: How often it is looked whether the file is still there.
LOOK_S = 1.0
#: Write-back gives way to reads, but not for ever.
GIVE_WAY_S = 1.0
FAILURES_MAX = 3
REOPEN_S, REOPEN_S_MAX = 3.0, 300.0
T = TypeVar("T")


class SsdTier:
    """Implements Tier; see the module. `start`, then `stop`."""

    name: TierName = "ssd"

    def __init__(
        self,
        options: SsdOptions,
        guard: PoolGuard,
        *,
        view: Callable[[], PoolView],
        announce: Callable[[list[Change]], None],
        counters: Counter[str],
        lost: Callable[[str], None],
    ) -> None:
        self._options = options
        self._guard = guard
        self._view = view
        self._announce = announce
        self._counters = counters
        self._lost = lost
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix=f"ssd-{options.node_id}")
        self._file: SsdFile | None = None
        self._entries: dict[int, Entry] = {}
        self._records: dict[bytes, int] = {}
        self._free: list[int] = []
        self._order: Eviction = make_eviction(options.eviction)
        self._readers: Counter[int] = Counter()
        #: Files that were given up, until no thread reads or writes them any more.
        self._retired: list[SsdFile] = []
        self._reading = self._writing = 0
        #: Records that a batch is being written to.
        self._taken = 0
        #: Keys that were removed while a batch was under way.
        self._unwanted: set[bytes] = set()
        self._failures = 0
        self._saving: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._reopen_s = REOPEN_S
        #: Why it could not be opened when it was last tried, and whether for want of room alone.
        self._why, self._no_room = "", False
        self._ahead = math.ceil(options.slots * options.ahead_percent / 100)
        self._batch = max(1, BATCH_BYTES // options.layout.block_bytes)

    # --- life -----------------------------------------------------------------------------------------------

    async def start(self) -> list[Change]:
        """Opens the file, or reports the reason (`TierLost`) and tries again later. Returns the blocks in it, which are
        not announced: the inventory has them."""
        await self._open()
        self._saving = asyncio.create_task(self._save())
        return self._all("stored")

    async def stop(self) -> None:
        """Saves idle blocks for up to `stop_s`, so that a restart finds them, and lets go of the file."""
        if self._saving is None:
            return
        self._stopping.set()  # not cancelled: a write that is under way is waited for
        await self._saving
        self._saving = None
        until = time.monotonic() + self._options.stop_s
        while time.monotonic() < until and await self._save_some(self._options.slots):
            pass
        await asyncio.to_thread(self._threads.shutdown)
        self._retire()

    @property
    def open(self) -> bool:
        return self._file is not None

    @property
    def records(self) -> int:
        """Blocks that the file holds."""
        return self._file.records if self._file is not None else 0

    @property
    def mode(self) -> str:
        """Direct I/O or the page cache, in words for people."""
        direct = self._file is not None and self._file.direct
        return "direct I/O" if direct else "through the page cache: no direct I/O on this file system"

    async def _open(self) -> None:
        path, size = Path(self._options.path), self._options.file_bytes
        try:
            opened = await self._in_thread(functools.partial(SsdFile.open, path, self._options.layout, size))
        except TierError as problem:
            self._no_room = isinstance(problem, NoRoomForTier)
            # Reported once, however often the file is tried.
            if str(problem) != self._why:
                self._why = str(problem)
                self._lost(self._why)
            return
        self._why, self._no_room = "", False
        self._file, entries = opened
        self._free = [record for record in range(self._file.records - 1, -1, -1) if record not in entries]
        for record, entry in entries.items():
            self._keep(record, entry)
        self._failures = 0

    def _keep(self, record: int, entry: Entry) -> None:
        self._entries[record] = entry
        self._records[entry.key] = record
        self._order.add(record, entry.key)

    def _retire(self) -> None:
        """Takes the file out of use."""
        if self._file is not None:
            self._retired.append(self._file)
            self._file = None
        self._close_retired()

    def _close_retired(self) -> None:
        """Once no thread is in them: their numbers may be other files' at once."""
        if not self._reading and not self._writing:
            for file in self._retired:
                file.close()
            self._retired.clear()

    def _give_up(self, why: str) -> None:
        """Forget every block; a read that is under way gets an error, or the bytes."""
        self._counters["ssd_lost"] += 1
        self._announce(self._all("evicted"))  # replaced in the log by one event
        self._entries.clear()
        self._records.clear()
        self._free.clear()
        self._readers.clear()
        self._order = make_eviction(self._options.eviction)
        self._retire()
        self._lost(why)

    # --- blocks -----------------------------------------------------------------------------------------------

    def keys(self) -> list[bytes]:
        return list(self._records)

    def _all(self, kind: Literal["stored", "evicted"]) -> list[Change]:
        return [Change(kind, key, "ssd") for key in self._records]

    def __len__(self) -> int:
        return len(self._records)

    def find(self, key: bytes) -> Entry | None:
        """Keeps nothing."""
        record = self._records.get(key)
        return None if record is None else self._entries[record]

    def lend(self, keys: Sequence[bytes]) -> list[Lent]:
        """All of them, until `give_back`. Raises BlockMissing (with how many, from the first, are here)."""
        for held, key in enumerate(keys):
            if key not in self._records:
                raise BlockMissing(f"{held} of {len(keys)} blocks are on the SSD", held=held)
        if not keys:
            return []
        file = self._file
        assert file is not None, "a file that is gone holds nothing"
        lent = [Lent(self._records[key], self._entries[self._records[key]], file) for key in keys]
        for at in lent:
            self._readers[at.record] += 1
            self._order.remove(at.record)
        return lent

    def give_back(self, lent: Sequence[Lent]) -> None:
        for record, entry, file in reversed(lent):
            if file is not self._file:
                continue
            self._readers[record] -= 1
            if self._readers[record]:
                continue
            del self._readers[record]
            if self._entries.get(record) is entry:
                self._order.add(record, entry.key)
            else:
                self._free.append(record)

    def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that were here are no more. A record that is read just now is used again when that is done."""
        gone = [key for key in keys if key in self._records]
        for key in gone:
            record = self._records.pop(key)
            del self._entries[record]
            self._order.discard(record)
            if not self._readers[record]:
                self._free.append(record)
            if self._file is not None:
                self._file.set_entry(record, None)
        self._announce([Change("evicted", key, "ssd") for key in gone])
        return gone

    def remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """As `forget`, and also those that are being written just now."""
        if self._taken:
            self._unwanted.update(keys)
        return self.forget(keys)

    def check(self) -> None:
        """The invariant: every record is accounted for. Raises AssertionError with the values in it."""
        free = set(self._free)
        assert len(free) == len(self._free), "I111 a record is free twice"
        assert not free & self._entries.keys(), ("I111 free and in use", free & self._entries.keys())
        for record, entry in self._entries.items():
            assert self._records[entry.key] == record, ("I112 found by its key", record, entry)
            assert (record in self._order) == (not self._readers[record]), (
                "I113 evicted while it is read",
                record,
                entry,
            )
        assert len(self._records) == len(self._entries), (
            "I112 keys of no record",
            self._records,
            self._entries,
        )
        if self._file is not None:
            forgotten = [record for record in +self._readers if record not in self._entries]
            used = len(free) + len(self._entries) + len(forgotten) + self._taken
            assert used == self._file.records, ("I114 records of nobody", used, self._file.records)

    # --- read -----------------------------------------------------------------------------------------------

    async def read(self, moves: Sequence[Move], call: Call) -> None:
        """Fills slots; a block that cannot be read is forgotten. Nothing is touched any more when this ends, cancelled
        or not.

        Raises TransferError (the disk fails), TransferTimeout.
        """
        file = self._file
        if file is None:
            raise TransferError("the SSD is gone")
        blocks = self._view().blocks
        cancellation = Cancellation(call)

        def read(run: Sequence[Move]) -> None:
            cancellation.check()
            some = [blocks[at.slot, at.first_layer : at.first_layer + at.layers] for at in run]
            file.read(run[0].record, run[0].first_layer, some)

        runs = runs_of(moves, self._options.layout, self._options.threads)
        self._reading += 1
        works = [
            asyncio.ensure_future(in_thread(self._threads, functools.partial(read, run), cancellation))
            for run in runs
        ]
        try:
            await asyncio.wait(works)
        finally:
            cancellation.cancel()
            for work in works:
                work.cancel()
            results = await asyncio.gather(*works, return_exceptions=True)
            self._reading -= 1
            self._close_retired()
        failed = [(run, result) for run, result in zip(runs, results, strict=True) if result is not None]
        for run, result in failed:
            if isinstance(result, OSError) and file is self._file:
                self._counters["ssd_read_errors"] += 1
                self.forget([self._entries[at.record].key for at in run if at.record in self._entries])
        if failed:
            problem = failed[0][1]
            raise problem if isinstance(problem, StoreError) else TransferError(f"SSD: {problem}")
        self._counters["ssd_read_bytes"] += sum(at.layers for at in moves) * file.layer_bytes

    # --- write-back -----------------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Keeps the blocks that will be evicted next on the disk, until `stop`."""
        looked_s = time.monotonic()
        while not self._stopping.is_set():
            if self._file is None:
                await self._pause(self._reopen_s)
                self._reopen_s = REOPEN_S if self._no_room else min(REOPEN_S_MAX, 2 * self._reopen_s)
                await self._open()
                self._announce(self._all("stored"))
            elif time.monotonic() - looked_s > LOOK_S:
                looked_s = time.monotonic()
                if why := await self._in_thread(self._file.gone):
                    self._give_up(f"{self._options.path}: {why}")
            elif await self._save_some(self._ahead):
                self._reopen_s = REOPEN_S
            else:
                await self._pause(IDLE_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _save_some(self, ahead: int) -> int:
        """Writes one batch of the blocks that go next and are not here yet; how many are here now."""
        file = self._file
        if file is None:
            return 0
        # More than the file holds would be written round and round.
        window = self._guard.next_victims(min(ahead, file.records // 2))
        hits_min = self._options.hits_min
        wanted = [
            idle for idle in window if idle.slot.hits >= hits_min and idle.slot.key not in self._records
        ]
        if not wanted:
            return 0
        until = time.monotonic() + GIVE_WAY_S
        while self._reading and time.monotonic() < until:
            await asyncio.sleep(0.002)
        if file is not self._file:
            return 0
        records = self._make_room(min(len(wanted), self._batch))
        self._writing, self._taken = 1, len(records)
        kept: dict[int, Entry] = {}
        try:
            kept = await self._in_thread(functools.partial(self._write, file, records, wanted))
            self._failures = 0
        except OSError as problem:
            self._counters["ssd_write_errors"] += 1
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                self._give_up(f"{self._options.path}: {problem.strerror}")
        finally:
            self._writing = self._taken = 0
            unwanted, self._unwanted = self._unwanted, set()
            if file is self._file:
                self._free += [record for record in records if record not in kept]
                for record, entry in kept.items():
                    self._keep(record, entry)
                self.forget(sorted(unwanted))
            self._close_retired()
        self._counters["ssd_written_bytes"] += len(kept) * file.block_bytes
        self._counters["ssd_write_outrun"] += len(records) - len(kept)
        self._announce(
            [Change("stored", key, "ssd") for key in (at.key for at in kept.values()) if key in self._records]
        )
        return len(kept)

    def _write(self, file: SsdFile, records: Sequence[int], wanted: Sequence[Idle]) -> dict[int, Entry]:
        """In a thread. Entries cleared, records, entries, in this order. Raises OSError, with the entries
        cleared.
        """
        file.write_table()
        pairs = dict(zip(sorted(records), wanted, strict=False))
        blocks = self._view().blocks
        layers = self._options.layout.layers
        moves = [Move(record, idle.number, 0, layers) for record, idle in pairs.items()]
        for run in runs_of(moves, self._options.layout, 1):
            file.write(run[0].record, [blocks[at.slot] for at in run])
        kept = {}
        for record, idle in pairs.items():
            if self._guard.still(idle):
                # Else it was evicted meanwhile: the copy may have another block's bytes.
                slot = idle.slot
                kept[record] = Entry(
                    slot.key, slot.checksum, slot.hits, bytes.fromhex(slot.tenant or "00" * 16)
                )
                file.set_entry(record, kept[record])
        try:
            file.write_table()
        except OSError:
            for record in kept:
                file.set_entry(record, None)
            raise
        return kept

    def _make_room(self, count: int) -> list[int]:
        """Up to `count` records without a reader; their blocks are forgotten."""
        with contextlib.suppress(LookupError):
            for _ in range(count - len(self._free)):
                self.forget([self._entries[self._order.victim()].key])
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
