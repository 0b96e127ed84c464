"""Bytes to and from the other end of a channel, in order: a plain socket, or one under TLS.

A stream waits in the kernel, never for longer than POLL_MS at a time, so that its user can look at its deadline; the
interpreter lock is let go of meanwhile. One thread may send while another receives.
"""

from __future__ import annotations

import hmac
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from typing import Protocol

from halfmoon.store.channels.header import SEAL_BYTES
from halfmoon.store.transports.tcp.channel import POLL_MS, ConnectionBroken

#: Encrypted, or decrypted, at a time: a few records.
CIPHERTEXT_BYTES = 128 * 1024
#: Bytes that the kernel keeps for the other end, where its limits allow it.
SOCKET_BYTES = 4 * 1024 * 1024
_CLOSED = "it closed the connection"


class Seal:
    """Keyed sums of headers, of both directions: without the session's key none can be made."""

    def __init__(self, mine: bytes, theirs: bytes) -> None:
        self._mine, self._theirs = mine, theirs

    def make(self, sealed: memoryview) -> bytes:
        return hmac.digest(self._mine, sealed, "sha256")[:SEAL_BYTES]

    def genuine(self, sealed: memoryview, seal: memoryview) -> bool:
        return hmac.compare_digest(hmac.digest(self._theirs, sealed, "sha256")[:SEAL_BYTES], seal)


class Stream(Protocol):
    """One end of a connection. `send` and `receive` raise ConnectionBroken."""

    #: The kind of channel, as counters and errors call it.
    kind: str
    #: None: headers need no seal here.
    seal: Seal | None

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Bytes that were taken, without waiting; 0: there is no room now."""

    def receive(self, into: memoryview, *, wait: bool) -> int:
        """Bytes that came, POLL_MS later at most where `wait`; 0: none."""

    def wait(self, *, readable: bool, writable: bool) -> bool:
        """Waits for either, POLL_MS at most; whether there is something to read."""

    def buffered(self) -> bool:
        """Bytes are here though `fileno` is not readable."""

    def fileno(self) -> int: ...

    def shut(self) -> None:
        """Ends the connection, and every wait for it, of any thread. The descriptor stays until `close`."""

    def close(self) -> None: ...


def _prepared(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    else:
        # TCP's buffers grow by themselves.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


def _poll(connection: socket.socket, readable: bool, writable: bool) -> bool:
    poller = select.poll()
    poller.register(connection, readable * select.POLLIN | writable * select.POLLOUT)
    ready = poller.poll(POLL_MS)
    return bool(ready) and bool(ready[0][1] & ~select.POLLOUT)


def _wait_in_kernel(connection: socket.socket) -> None:
    """Its own timeout: one system call waits, and still returns to look at the deadline."""
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, POLL_MS * 1000))


class PlainStream:
    """A connected socket, which it owns: of this host, or between hosts with sealed headers."""

    def __init__(self, connection: socket.socket, kind: str, seal: Seal | None = None) -> None:
        self.kind = kind
        self.seal = seal
        self._socket = connection
        _prepared(connection)
        _wait_in_kernel(connection)

    def send(self, pieces: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(pieces, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise ConnectionBroken(problem.strerror or str(problem)) from None

    def receive(self, into: memoryview, *, wait: bool) -> int:
        try:
            got = self._socket.recv_into(into, 0, socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise ConnectionBroken(problem.strerror or str(problem)) from None
        if not got:
            raise ConnectionBroken(_CLOSED)
        return got

    def wait(self, *, readable: bool, writable: bool) -> bool:
        return _poll(self._socket, readable, writable)

    def buffered(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        self._socket.close()


class TlsStream:
    """A socket under TLS, after its handshake. OpenSSL works in memory alone, and its records go out together: the
    other end would wake for each one by itself.
    """

    kind = "tls"
    seal: Seal | None = None

    def __init__(
        self, connection: socket.socket, tls: ssl.SSLObject, came: ssl.MemoryBIO, made: ssl.MemoryBIO
    ) -> None:
        """`came`: ciphertext for `tls`; `made`: ciphertext for the other end."""
        self._socket, self._tls, self._came, self._made = connection, tls, came, made
        _prepared(connection)
        _wait_in_kernel(connection)
        # OpenSSL does not bear two threads in one connection; neither waits for the network with it.
        self._using = threading.Lock()
        self._scratch = memoryview(bytearray(CIPHERTEXT_BYTES))
        #: It may have more than was asked for.
        self._more = True
        #: Ciphertext that the kernel had no room for, and of how many bytes it was made.
        self._pending, self._pending_plain = memoryview(b""), 0

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Where it returns less than all, the next call must begin with the bytes that are left."""
        total = 0
        flat = [piece.cast("B") for piece in pieces]
        while True:
            if not self._flushed():
                return total
            done, self._pending_plain = self._pending_plain, 0
            total += done
            flat = _without(flat, done)
            if not flat:
                return total
            self._pending_plain = self._encrypt(flat)

    def _encrypt(self, flat: Sequence[memoryview]) -> int:
        """Some of the bytes; how many."""
        size = 0
        with self._using:
            try:
                for piece in flat:
                    part = piece[: CIPHERTEXT_BYTES - size]
                    if part:
                        size += self._tls.write(part)
            except ssl.SSLError as problem:
                raise ConnectionBroken(f"TLS: {problem.reason or problem}") from None
            self._pending = memoryview(self._made.read())
        return size

    def _flushed(self) -> bool:
        while self._pending:
            try:
                self._pending = self._pending[self._socket.send(self._pending, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                return False
            except OSError as problem:
                raise ConnectionBroken(problem.strerror or str(problem)) from None
        return True

    def receive(self, into: memoryview, *, wait: bool) -> int:
        got = self._decrypted(into) if self._more else 0
        if got:
            return got
        try:
            size = self._socket.recv_into(self._scratch, 0, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise ConnectionBroken(problem.strerror or str(problem)) from None
        if not size:
            raise ConnectionBroken(_CLOSED)
        with self._using:
            self._came.write(self._scratch[:size])
        return self._decrypted(into)

    def _decrypted(self, into: memoryview) -> int:
        """Decrypt into `into` the bytes that are here; `_more` is whether that ended for want of ciphertext."""
        got, size = 0, into.nbytes
        self._more = True
        with self._using:
            try:
                while got < size:
                    some = self._tls.read(size - got, into[got:])
                    if not some:
                        raise ConnectionBroken(_CLOSED)
                    got += int(some)
            except ssl.SSLWantReadError:
                self._more = False
            except ssl.SSLError as problem:
                raise ConnectionBroken(f"TLS: {problem.reason or problem}", "malformed") from None
        return got

    def wait(self, *, readable: bool, writable: bool) -> bool:
        return (readable and self.buffered()) or _poll(self._socket, readable, writable)

    def buffered(self) -> bool:
        if not self._more:
            return False
        with self._using:
            return self._tls.pending() > 0 or self._came.pending > 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        self._socket.close()


def _without(flat: Sequence[memoryview], size: int) -> list[memoryview]:
    """The buffers without their first `size` bytes, and none that is empty."""
    left = []
    for piece in flat:
        if size < len(piece):
            left.append(piece[size:])
        size = max(0, size - len(piece))
    return left
