"""The SSD tier's file: `[head | table | records]`, preallocated, one record a block, read and written past
the page cache where the file system can.

::

    head      4 KiB   magic, version, shape, a digest of the layout, checksum
    table     64 B a record: key, checksum of the block, generation, hits, tenant's digest, checksum of the entry
    records   block bytes, rounded up to 4 KiB

Rules, by which a crash at any point loses blocks and never gives a wrong byte:

- An entry never crosses a 512-byte sector, so that a torn write of the table leaves every other entry as it
  was.
- A record is overwritten only after its entry was cleared on the disk, and its new entry is written only after the
  record. A power cut may reorder that (nothing waits for the disk's own cache): the block's checksum, which is compared
  at every read, detects it.
- A file of another layout, or one whose head is damaged, is made empty.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from halfmoon.schemas.codec import encode
from halfmoon.schemas.policy import Layout
from halfmoon.store.tiers.base import Entry, Move

PAGE_BYTES = 4096
ENTRY_BYTES = 64
#: One system call moves about this much.
RUN_BYTES = 4 * 1024 * 1024
#: No file of ours counts so far; from here on there is room to count in 64 bits.
COUNT_MAX = 2**62
_MAGIC = b"halfmoon-ssd-1\0\0"
_HEAD = struct.Struct("<16sQQ16s")
_ENTRY = struct.Struct("<16sQQQ16s")
Array = npt.NDArray[np.uint8]


class TierError(Exception):
    """The tier's file cannot be used; one line for people."""


class NoRoomForTier(TierError):
    """Its disk is too full for the file, which costs nothing to ask again."""


class SsdFile:
    """See the module. `read` and `write` from any thread; the table from one at a time."""

    def __init__(self, path: Path, fd: int, layout: Layout, records: int, direct: bool) -> None:
        self.path = path
        #: Whether reads and writes go past the page cache.
        self.direct = direct
        self.records = records
        self.layer_bytes = layout.layer_block_bytes
        self.block_bytes = layout.block_bytes
        self._fd = fd
        self._record_bytes = _pages(layout.block_bytes)
        self._table_bytes = _pages(records * ENTRY_BYTES)
        self._table = mmap.mmap(-1, self._table_bytes)
        self._dirty: set[int] = set()
        self._generation = 0
        self._bounce = threading.local()

    # --- open and close -------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path, layout: Layout, file_bytes: int) -> tuple[SsdFile, dict[int, Entry]]:
        """The file, made or taken up, and the entries of its records. Raises TierError (no room, in use, no such
        directory)."""
        records = records_in(layout, file_bytes)
        if records < 1:
            raise TierError(f"{path}: {file_bytes} bytes hold no block of {layout.block_bytes}")
        try:
            fd, direct = _open(path)
        except OSError as problem:
            raise TierError(f"{path}: {problem.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file = cls(path, fd, layout, records, direct)
            return file, file._take_up(_head(layout, records))
        except BlockingIOError:
            os.close(fd)
            raise TierError(f"{path} belongs to an agent that is alive") from None
        except OSError as problem:
            os.close(fd)
            if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
                raise NoRoomForTier(
                    f"{path}: no room for {file_bytes >> 20} MiB ({problem.strerror})"
                ) from None
            raise TierError(f"{path}: {problem.strerror}") from None

    def _take_up(self, head: bytes) -> dict[int, Entry]:
        size = self._data_at + self.records * self._record_bytes
        page = mmap.mmap(-1, PAGE_BYTES)
        known = os.fstat(self._fd).st_size == size and os.preadv(self._fd, [page], 0) == PAGE_BYTES
        if known and page[: len(head)] == head:
            self._exactly(os.preadv, [memoryview(self._table)], PAGE_BYTES)
            return self._entries()
        os.ftruncate(self._fd, 0)
        os.posix_fallocate(self._fd, 0, size)
        self._dirty.update(range(self._table_bytes // PAGE_BYTES))
        self.write_table()
        page[: len(head)] = head
        self._exactly(os.pwritev, [memoryview(page)], 0)
        os.fsync(self._fd)
        return {}

    def _entries(self) -> dict[int, Entry]:
        """The valid ones; of two with one key the younger."""
        found: dict[bytes, tuple[int, int, Entry]] = {}
        zero = bytes(ENTRY_BYTES)
        for record in range(self.records):
            raw = self._table[record * ENTRY_BYTES : (record + 1) * ENTRY_BYTES]
            if raw == zero:
                continue
            key, checksum, generation, hits, tenant = _ENTRY.unpack(raw[: _ENTRY.size])
            if raw[_ENTRY.size :] != xxhash.xxh3_64_digest(raw[: _ENTRY.size]):
                continue
            if max(generation, hits) > COUNT_MAX:
                continue
            self._generation = max(self._generation, generation)
            if key not in found or found[key][0] < generation:
                found[key] = (generation, record, Entry(key, checksum, hits, tenant))
        # Oldest first, as they were written.
        return {record: entry for _, record, entry in sorted(found.values(), key=lambda at: at[0])}

    def gone(self) -> str:
        """ "" while the file is where it was; otherwise the reason why not."""
        try:
            there, own = os.stat(self.path), os.fstat(self._fd)
        except OSError as problem:
            return str(problem.strerror)
        if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            return "another file took its place"
        if own.st_size < self._data_at + self.records * self._record_bytes:
            return f"it was cut to {own.st_size} bytes"
        return ""

    def close(self) -> None:
        """No read or write may be under way."""
        os.close(self._fd)

    # --- table ----------------------------------------------------------------------------------------------

    def set_entry(self, record: int, entry: Entry | None) -> None:
        """Reaches the disk with the next `write_table`."""
        self._generation += 1
        raw = _packed(entry, self._generation) if entry is not None else bytes(ENTRY_BYTES)
        at = record * ENTRY_BYTES
        self._table[at : at + ENTRY_BYTES] = raw
        self._dirty.add(at // PAGE_BYTES)

    def write_table(self) -> None:
        """Writes the pages that changed. Raises OSError; then they are written the next time."""
        for page in sorted(self._dirty):
            at = page * PAGE_BYTES
            self._dirty.discard(page)  # before: an entry that changes meanwhile needs another write
            try:
                self._exactly(os.pwritev, [memoryview(self._table)[at : at + PAGE_BYTES]], PAGE_BYTES + at)
            except OSError:
                self._dirty.add(page)
                raise

    # --- records --------------------------------------------------------------------------------------------

    def read(self, record: int, first_layer: int, into: Sequence[Array]) -> None:
        """Reads a run of bytes that begins at a layer of a record into buffers, one after another: layers of
        one record, or whole records that follow each other. Raises OSError."""
        self._move(os.preadv, record, first_layer, into)

    def write(self, record: int, source: Sequence[Array]) -> None:
        """Writes whole records that follow each other. Raises OSError."""
        self._move(os.pwritev, record, 0, source)

    def _move(self, call: object, record: int, first_layer: int, buffers: Sequence[Array]) -> None:
        at = self._data_at + record * self._record_bytes + first_layer * self.layer_bytes
        whole = self._record_bytes == self.block_bytes or len(buffers) == 1
        aligned = all(
            buffer.ctypes.data % PAGE_BYTES == buffer.nbytes % PAGE_BYTES == 0 for buffer in buffers
        )
        if whole and (not self.direct or (at % PAGE_BYTES == 0 and aligned)):
            self._exactly(call, [buffer.reshape(-1).data for buffer in buffers], at)
            return
        for number, buffer in enumerate(buffers):
            self._bounced(call, at + number * self._record_bytes, buffer.reshape(-1))

    def _bounced(self, call: object, at: int, buffer: Array) -> None:
        """Through aligned memory of the thread's own. A write begins at a record, so the rest is padding."""
        start = at // PAGE_BYTES * PAGE_BYTES
        size = _pages(at + buffer.nbytes - start)
        memory = getattr(self._bounce, "memory", None)
        if memory is None or len(memory) < size:
            self._bounce.memory = memory = mmap.mmap(-1, size)
        inner = np.frombuffer(memory, np.uint8, buffer.nbytes, at - start)
        if call is os.pwritev:
            np.copyto(inner, buffer)
        self._exactly(call, [memoryview(memory)[:size]], start)
        if call is os.preadv:
            np.copyto(buffer, inner)

    def _exactly(self, call: object, buffers: Sequence[memoryview], at: int) -> None:
        assert call in (os.preadv, os.pwritev), call
        wanted = sum(buffer.nbytes for buffer in buffers)
        done = os.preadv(self._fd, buffers, at) if call is os.preadv else os.pwritev(self._fd, buffers, at)
        if done != wanted:
            raise OSError(errno.EIO, f"{done} of {wanted} bytes")

    @property
    def _data_at(self) -> int:
        return PAGE_BYTES + self._table_bytes


def runs_of(moves: Sequence[Move], layout: Layout, threads: int) -> list[list[Move]]:
    """By record; whole records that follow each other in one run of up to RUN_BYTES, but a run for each
    thread.
    """
    longest = max(1, min(RUN_BYTES // layout.block_bytes, len(moves) // threads))
    runs: list[list[Move]] = []
    for at in sorted(moves):
        last = runs[-1] if runs else []
        follows = last and last[-1].record + 1 == at.record and len(last) < longest
        if follows and last[-1].layers == at.layers == layout.layers:
            last.append(at)
        else:
            runs.append([at])
    return runs


def records_in(layout: Layout, file_bytes: int) -> int:
    """Blocks that a file of this size holds."""
    each = _pages(layout.block_bytes) + ENTRY_BYTES
    return max(0, (file_bytes - 2 * PAGE_BYTES) // each)


def _packed(entry: Entry, generation: int) -> bytes:
    raw = _ENTRY.pack(entry.key, entry.checksum, generation, entry.hits, entry.tenant)
    return raw + xxhash.xxh3_64_digest(raw)


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _head(layout: Layout, records: int) -> bytes:
    raw = _HEAD.pack(_MAGIC, layout.block_bytes, records, xxhash.xxh3_128_digest(encode(layout)))
    return raw + xxhash.xxh3_64_digest(raw)


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
