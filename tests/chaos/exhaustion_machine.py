"""The resources of a cluster that can run dry: each is away inside a `with` block, and says at any time whether it is.

A limit that was set once is met by whoever frees something first. So each is set again and again: to the first free
descriptor, to the address space in use, to the tasks that there are, and a disk's free bytes are written.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.cluster.harness import Cluster, children
from tests.eventually import eventually_here

TIGHTEN_S = 0.02
#: The kernel counts pages before they are used, some for each core.
CHARGED_AHEAD = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


class Shortage(NamedTuple):
    """`left`: "" while nothing is left of the resource; else what is. `met`: somebody has asked for some."""

    left: Callable[[], str]
    met: Callable[[], bool] = lambda: True


class Machine:
    """The cluster's resources. Each method is a `with` block that gives a `Shortage`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def pid(self, name: str) -> int:
        if name == "halfmoon up":
            return self.cluster.process.pid
        if name == "nats-server":
            return self.cluster.server_pid()
        return self.cluster.pid(name)

    @contextlib.contextmanager
    def descriptors(self, name: str, *, kill: str = "") -> Iterator[Shortage]:
        """No file descriptor is left to the process. `kill`: another one dies meanwhile."""
        pid = self.pid(name)

        def left() -> str:
            limit, first = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0], _first_free(pid)
            return "" if first >= limit else f"descriptor {first} of {limit}"

        with self._limited(pid, resource.RLIMIT_NOFILE, lambda: _first_free(pid)):
            if kill:
                self.cluster.kill(kill)
            yield Shortage(lambda: _of_living(pid, left))

    @contextlib.contextmanager
    def memory(self, name: str) -> Iterator[Shortage]:
        """No page of memory is left to the process but those that it has; the kernel kills it when it must have one."""
        group = _new_group("memory", "memory.limit_in_bytes") or _new_group("memory", "memory.max")
        assert group is not None, "no control group of memory can be made here"
        old = (group / "memory.limit_in_bytes").exists()
        used = group / ("memory.usage_in_bytes" if old else "memory.current")
        most = group / ("memory.limit_in_bytes" if old else "memory.max")
        try:
            (group / "cgroup.procs").write_text(str(self.pid(name)))

            def tighten() -> None:
                now = _read(used)
                if now < _read(most):
                    with contextlib.suppress(OSError):  # it has grown meanwhile
                        most.write_text(str(now))

            def left() -> str:
                free = _read(most) - _read(used)
                return "" if free < CHARGED_AHEAD else f"{free} bytes"

            with _again_and_again(tighten):
                yield Shortage(left, met=lambda: _refusals(group) > 0)
            most.write_text("-1" if old else "max")
        finally:
            _end_group(group)

    @contextlib.contextmanager
    def address_space(self, name: str) -> Iterator[Shortage]:
        """No address space is left to the process: it is told so where it asks for some."""
        pid = self.pid(name)

        def left() -> str:
            limit = resource.prlimit(pid, resource.RLIMIT_AS)[0]
            used = _address_space(pid)
            return "" if used >= limit else f"{limit - used} bytes of {limit}"

        with self._limited(pid, resource.RLIMIT_AS, lambda: _address_space(pid)):
            yield Shortage(lambda: _of_living(pid, left))

    @contextlib.contextmanager
    def _limited(self, pid: int, kind: int, in_use: Callable[[], int]) -> Iterator[None]:
        before = resource.prlimit(pid, kind)

        def tighten() -> None:
            used = in_use()
            if used != resource.prlimit(pid, kind)[0]:
                resource.prlimit(pid, kind, (used, before[1]))

        with _again_and_again(tighten):
            yield
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)

    @contextlib.contextmanager
    def disk(self, directory: Path, *, kill: str = "") -> Iterator[Shortage]:
        """The file system is full to the last byte. `kill`: a process that has to do with it dies meanwhile."""
        with filled(directory):
            if kill:
                self.cluster.kill(kill)
            yield Shortage(lambda: _free(directory))

    @contextlib.contextmanager
    def tier_disk(self, directory: Path) -> Iterator[Shortage]:
        """The files of the SSD tier are gone, and their disk is full before there are new ones."""
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert files, "there is no tier"
        for path in files:
            path.unlink()
        with filled(directory):
            yield Shortage(lambda: _free(directory))

    @contextlib.contextmanager
    def tasks(self, kill: str) -> Iterator[Shortage]:
        """No thread and no process can be begun in the whole cluster, and one that is wanted dies."""
        group = _new_group("pids", "pids.max")
        assert group is not None, "no control group of tasks can be made here"
        try:
            for pid in (self.cluster.process.pid, *children(self.cluster.process.pid)):
                (group / "cgroup.procs").write_text(str(pid))

            def tighten() -> None:
                now = _read(group / "pids.current")
                if now != _read(group / "pids.max"):
                    (group / "pids.max").write_text(str(now))

            def left() -> str:
                now, most = _read(group / "pids.current"), _read(group / "pids.max")
                return "" if now >= most else f"{most - now} tasks of {most}"

            with _again_and_again(tighten):
                self.cluster.kill(kill)
                yield Shortage(left, met=lambda: _refusals(group) > 0)
            (group / "pids.max").write_text("max")
        finally:
            _end_group(group)


def _of_living(pid: int, left: Callable[[], str]) -> str:
    """A process that died of it has nothing left."""
    try:
        return left()
    except (ProcessLookupError, FileNotFoundError):
        return ""


def _first_free(pid: int) -> int:
    """The number that the process would give to a file that it opens now."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * PAGE


def _free(directory: Path) -> str:
    free = os.statvfs(directory)
    return f"{free.f_bavail * free.f_frsize} bytes" if free.f_bavail else ""


@contextlib.contextmanager
def _again_and_again(tighten: Callable[[], None]) -> Iterator[None]:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            # The process may have died of it: then there is nothing to tighten.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                tighten()
            time.sleep(TIGHTEN_S)

    tighten()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Full to the last byte, whatever is let go of meanwhile."""
    ballast = directory / f"ballast-{os.getpid()}"
    with ballast.open("wb", buffering=0) as file:

        def tighten() -> None:
            with contextlib.suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass

        try:
            with _again_and_again(tighten):
                yield
        finally:
            ballast.unlink()


def _new_group(controller: str, limit: str) -> Path | None:
    """A control group, of either version, that has the file `limit`; None where none can be made."""
    for root in (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup")):
        group = root / f"halfmoon-exhaustion-{os.getpid()}"
        with contextlib.suppress(OSError):
            if (root / "cgroup.subtree_control").exists():
                (root / "cgroup.subtree_control").write_text(f"+{controller}")
            group.mkdir()
            if (group / limit).exists():
                return group
            group.rmdir()
    return None


def _end_group(group: Path) -> None:
    """Its processes go back to where they were."""

    def removed() -> bool:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # a process that has just begun, or ends
            group.rmdir()
        return not group.exists()

    eventually_here(removed, f"{group} is removed")


def _refusals(group: Path) -> int:
    """How often the limit of a group was met."""
    for name in ("memory.failcnt", "pids.events"):
        if (group / name).exists():
            return _read(group / name)
    events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    return int(events["max"])


def _read(file: Path) -> int:
    """The last number in it; a limit that is none is larger than any."""
    word = file.read_text().split()[-1]
    return 2**62 if word == "max" else int(word)
