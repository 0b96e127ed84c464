"""Cuts a running process off in silence: its sockets, and their other ends, receive nothing for a while.

A socket of another process is borrowed (pidfd_getfd), and a filter that drops every packet is attached to it. Nobody is
told, as when a cable is pulled; TCP sends again what was dropped when the filter is taken off. It needs the right to
trace the process: root, or its ancestor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
_PIDFD_GETFD = 438
#: One instruction of a classic filter, `return 0`: no byte of the packet is kept.
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_PROGRAM = struct.pack("HxxxxxxQ", 1, ctypes.addressof(_DROP))
_libc = ctypes.CDLL(None, use_errno=True)
Address = tuple[str, int]


def connections(pid: int) -> Iterator[socket.socket]:
    """Duplicates of the TCP connections of a process; to be closed. Raises PermissionError."""
    with contextlib.closing(_PidFd(pid)) as process:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                found = socket.socket(fileno=process.borrow(int(name)))
                if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM and _peer(found):
                    yield found
                else:
                    found.close()


class Cut:
    """The connections of `pid` to the processes `others`, silent until `mend`. New ones are not affected."""

    def __init__(self, pid: int, others: Iterable[int]) -> None:
        own = list(connections(pid))
        pairs = {(_peer(one), one.getsockname()) for one in own}
        self._sockets = own
        for other in others:
            with contextlib.suppress(OSError):  # it died meanwhile
                for found in connections(other):
                    if (found.getsockname(), _peer(found)) in pairs:
                        self._sockets.append(found)
                    else:
                        found.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, _PROGRAM)

    def __len__(self) -> int:
        return len(self._sockets)

    def mend(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            one.close()
        self._sockets = []


class _PidFd:
    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def borrow(self, fd: int) -> int:
        found: int = _libc.syscall(_PIDFD_GETFD, self._fd, fd, 0)
        if found < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return found

    def close(self) -> None:
        os.close(self._fd)


def _peer(one: socket.socket) -> Address | None:
    try:
        address: Address = one.getpeername()
    except OSError:
        return None
    return address
