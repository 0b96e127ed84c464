"""The node's shared memory segment: `[slots, layers, layer_block_bytes]` bytes, behind them a table of checksums
`[slots, layers]` (u64), one of marks and one of epochs `[slots]` (u64), all mapped by the agent, by the node's workers,
and by peers on the same host. A mark names the order that may write into the slot, an epoch counts the orders that had
it (`halfmoon.store.pool.fence`).

It is a file in /dev/shm, `halfmoon-<cluster>-<node_id>`, mode 0600. Its creator holds a flock on it while it lives, so
that anybody recognizes a stale one: the kernel drops the lock of a process that dies, however it dies. Its pages are
reserved when it is made, so that a full /dev/shm is an error at the start and not a bus error in the middle of a copy.

(`multiprocessing.shared_memory` is not used: its resource tracker unlinks segments that other processes still
need.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from halfmoon.schemas.policy import Layout
from halfmoon.store.errors import LeaseLost, OrderUnknown

SHM = Path("/dev/shm")  # noqa: S108 (made nameless and for its owner only, opened without following links)
PAGE_BYTES = 4096
#: Locks of an opening of a file, not of a process: fcntl(2). `struct flock`: type, whence, start, length, pid.
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK = "hhqqi4x"


class SegmentError(Exception):
    """The segment cannot be made or mapped; one line for people."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a segment. Two agents can exchange blocks when all but `slots` are equal."""

    slots: int
    layers: int
    layer_block_bytes: int

    @classmethod
    def of(cls, layout: Layout, slots: int) -> Geometry:
        return cls(slots=slots, layers=layout.layers, layer_block_bytes=layout.layer_block_bytes)

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes

    @property
    def table_offset(self) -> int:
        return -(-self.slots * self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def marks_offset(self) -> int:
        return self.table_offset + self.slots * self.layers * 8

    @property
    def epochs_offset(self) -> int:
        return self.marks_offset + self.slots * 8

    @property
    def file_bytes(self) -> int:
        return self.epochs_offset + self.slots * 8


class PoolView:
    """A mapping of a node's pool.

    `blocks`: u8 `[slots, layers, layer_block_bytes]`; `sums`: u64 `[slots, layers]`, the xxh3_64 of every layer of
    every committed block; `marks` and `epochs`: u64 `[slots]`. All three are written by the agent.
    Valid until `close`, or until the agent restarts (see `alive`); a view that was handed out keeps its memory alive,
    so that a late reader sees old bytes and never a fault.
    """

    def __init__(self, name: str, geometry: Geometry, fd: int, memory: mmap.mmap) -> None:
        self.name = name
        self.geometry = geometry
        self._fd = fd
        self._memory = memory
        #: Copies under way by slot: all of a process's share one lock.
        self._writing: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._map()

    def _map(self) -> None:
        at = self.geometry
        shape = (at.slots, at.layers, at.layer_block_bytes)
        size = at.slots * at.block_bytes
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, size).reshape(shape)
        self._bytes = memoryview(self._memory)[:size]
        table = np.frombuffer(self._memory, np.uint64, at.slots * at.layers, at.table_offset)
        self.sums: npt.NDArray[np.uint64] = table.reshape(at.slots, at.layers)
        self.marks: npt.NDArray[np.uint64] = np.frombuffer(self._memory, np.uint64, at.slots, at.marks_offset)
        self.epochs: npt.NDArray[np.uint64] = np.frombuffer(
            self._memory, np.uint64, at.slots, at.epochs_offset
        )

    @classmethod
    def attach(cls, name: str, geometry: Geometry) -> PoolView:
        """Maps an agent's segment, read and write. Raises SegmentError."""
        if Path(name).name != name:
            raise SegmentError(f"{name} is no name of a segment")
        try:
            fd = _open_own(SHM / name)
        except OSError as problem:
            raise SegmentError(f"cannot open segment {name}: {problem.strerror}") from None
        try:
            size = os.fstat(fd).st_size
            if size != geometry.file_bytes:
                raise SegmentError(f"segment {name} has {size} bytes, {geometry.file_bytes} expected")
            return cls(name, geometry, fd, mmap.mmap(fd, size))
        except (OSError, ValueError) as problem:  # the second one: it is empty
            os.close(fd)
            raise SegmentError(f"cannot map segment {name}: {problem}") from None
        except BaseException:
            os.close(fd)
            raise

    def touch(self) -> None:
        """Takes the page faults now, and not in the first copies: half a second a GiB in the first process, in which
        the kernel clears the pages, and 80 ms in others (AMD EPYC, pages of 4 KiB). In a thread: numpy lets go of the
        interpreter lock, which MAP_POPULATE does not.
        """
        pages = self.blocks.reshape(-1)[::PAGE_BYTES]
        for first in range(0, len(pages), 16384):
            if self._fd < 0:
                return
            np.max(pages[first : first + 16384])

    def remap(self, other: PoolView) -> None:
        """Makes this view show the mapping of `other`, which is used up."""
        self._drop()
        self.name, self.geometry, self._fd, self._memory = (
            other.name,
            other.geometry,
            other._fd,
            other._memory,
        )
        self._map()

    def layer_block(self, slot: int, layer: int) -> npt.NDArray[np.uint8]:
        """u8 `[layer_block_bytes]`, contiguous, no copy."""
        block: npt.NDArray[np.uint8] = self.blocks[slot, layer]
        return block

    def run(self, slot: int, first_layer: int, layers: int) -> memoryview:
        """The bytes of some layers of a slot, no copy. It costs a part of what an array does, and is not checked."""
        at = self.geometry
        first = slot * at.block_bytes + first_layer * at.layer_block_bytes
        return self._bytes[first : first + layers * at.layer_block_bytes]

    @contextlib.contextmanager
    def writing(self, slot: int, order_id: str) -> Iterator[None]:
        """Within, bytes of the order may be copied into the slot. Keep it short: until then nobody else gets the slot.

        Raises OrderUnknown: the slot is not the order's any more.
        """
        with self._lock:
            self._writing[slot] += 1
            if self._writing[slot] == 1:
                _lock_byte(self._fd, slot, fcntl.F_RDLCK)
        try:
            if int(self.marks[slot]) != order_mark(order_id):
                raise OrderUnknown(f"slot {slot} is not order {order_id}'s any more")
            yield
        finally:
            with self._lock:
                self._writing[slot] -= 1
                if not self._writing[slot]:
                    del self._writing[slot]
                    _lock_byte(self._fd, slot, fcntl.F_UNLCK)

    def require_unchanged(self, slots: Sequence[int], epochs: Sequence[int]) -> None:
        """Call it after reading: raises LeaseLost when one of the slots was given to another order since its epoch was
        read, so that the bytes may be another block's. However long the reader stood still, this is exact.
        """
        require_unchanged(self.epochs, slots, epochs)

    def written_by_others(self, slot: int) -> bool:
        """True: through another mapping a copy into the slot is under way (`writing`)."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        answer = fcntl.fcntl(self._fd, _F_OFD_GETLK, asked)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    def alive(self) -> bool:
        """True: the agent that made the segment still lives."""
        return self._fd >= 0 and _locked(self._fd)

    def close(self) -> None:
        """Lets go of the mapping (the memory goes when the last array that shows it does). Idempotent."""
        self._drop()
        empty = Geometry(
            slots=0, layers=self.geometry.layers, layer_block_bytes=self.geometry.layer_block_bytes
        )
        self.blocks = np.empty((0, empty.layers, empty.layer_block_bytes), np.uint8)
        self._bytes = memoryview(b"")
        self.sums = np.empty((0, empty.layers), np.uint64)
        self.marks = np.empty(0, np.uint64)
        self.epochs = np.empty(0, np.uint64)

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Segment:
    """The agent's own: made, locked and unlinked by it."""

    def __init__(self, view: PoolView, fd: int) -> None:
        self.view = view
        self._fd = fd

    @classmethod
    def create(cls, name: str, geometry: Geometry) -> Segment:
        """Makes, reserves, maps and locks; takes the place of a stale segment of that name.

        Raises SegmentError: the name is in use by a live agent, /dev/shm is too small.
        """
        path = SHM / name
        try:
            stale = _unlink_stale(path)
        except FileNotFoundError:
            stale = True
        except OSError as problem:
            raise SegmentError(f"{path} is in the way of segment {name}: {problem.strerror}") from None
        if not stale:
            raise SegmentError(
                f"segment {name} belongs to an agent that is alive: is the node id used twice?"
            )
        need = geometry.file_bytes
        room = os.statvfs(SHM)
        free = room.f_bavail * room.f_frsize
        if need > free:
            raise SegmentError(
                f"{SHM} has {free >> 20} MiB free, the pool needs {need >> 20} MiB: use fewer slots or enlarge it"
            )
        fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, need)
            # An opening of its own: locks belong to openings, and `alive` must not undo ours.
            view_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            view = PoolView(name, geometry, view_fd, mmap.mmap(view_fd, need))
            # It gets its name last, locked and whole. (`src_dir_fd` makes Python follow the link in /proc.)
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
            return cls(view, fd)
        except OSError as problem:
            os.close(fd)
            why = "too small" if problem.errno in (errno.ENOSPC, errno.ENOMEM) else str(problem.strerror)
            raise SegmentError(f"{SHM} cannot hold the pool of {need >> 20} MiB: {why}") from None

    def close(self) -> None:
        """Unlinks and unlocks. Idempotent."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SHM / self.view.name)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.view.close()
        os.close(self._fd)
        self._fd = -1


def segment_name(cluster: str, node_id: str) -> str:
    return f"halfmoon-{cluster}-{node_id}"


def remove_stale(cluster: str) -> list[str]:
    """Unlinks the cluster's segments that no living agent holds; their names."""
    removed = []
    for path in sorted(SHM.glob(segment_name(cluster, "*"))):
        # A file of another user stays.
        with contextlib.suppress(OSError):
            if _unlink_stale(path):
                removed.append(path.name)
    return removed


def host_id() -> str:
    """Equal for two processes that can map each other's segments: same kernel, same /dev/shm, same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.blake2b(f"{boot}/{os.stat(SHM).st_dev}/{os.geteuid()}".encode(), digest_size=8).hexdigest()


def _unlink_stale(path: Path) -> bool:
    """False when its owner lives. Raises OSError: there is none, or something that is not ours."""
    fd = _open_own(path)
    try:
        if _locked(fd):
            return False
        os.unlink(path)
        return True
    finally:
        os.close(fd)


def _open_own(path: Path) -> int:
    """Opens a plain file of this user. Raises OSError for anything else.

    /dev/shm is everybody's: another user may have put a link, a pipe or a file of its own where a segment should be, to
    be written to, or to be believed.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "it is no plain file of this user")
    return fd


def require_unchanged(now: npt.NDArray[np.uint64], slots: Sequence[int], epochs: Sequence[int]) -> None:
    """As `PoolView.require_unchanged`, with the table of a view that may be closed meanwhile."""
    for slot, epoch in zip(slots, epochs, strict=True):
        if int(now[slot]) != epoch:
            raise LeaseLost(f"slot {slot} was given to another order while it was read")


def order_mark(order_id: str) -> int:
    """The mark of a slot that the order may write into; never 0."""
    return xxhash.xxh3_64_intdigest(order_id.encode()) or 1


def _lock_byte(fd: int, at: int, kind: int) -> None:
    if fd >= 0:  # closed: the kernel has dropped the lock
        fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, at, 1, 0))


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
