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

#: The longest record of TLS. A message's begin is put together for one; what is longer is encrypted where it lies.
RECORD_BYTES = 16 * 1024
#: What the kernel keeps for the other end, where its limits allow it.
SOCKET_BYTES = 4 * 1024 * 1024
_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_CLOSED = "it closed the connection"


class Seal:
    """Keyed sums of headers, of both directions: who does not know the session's key makes none."""

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
        """Bytes are here that `fileno` does not tell of."""

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
        # Not the method of an SSLSocket, which would go on in the clear.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


def _poll(connection: socket.socket, readable: bool, writable: bool) -> bool:
    poller = select.poll()
    poller.register(connection, readable * select.POLLIN | writable * select.POLLOUT)
    ready = poller.poll(POLL_MS)
    return bool(ready) and bool(ready[0][1] & ~select.POLLOUT)


def _tls_broken(problem: OSError) -> ConnectionBroken:
    if isinstance(problem, ssl.SSLEOFError):
        return ConnectionBroken(_CLOSED)
    if isinstance(problem, ssl.SSLError):
        return ConnectionBroken(f"TLS: {problem.reason or problem}", "malformed")
    return ConnectionBroken(problem.strerror or str(problem))


class PlainStream:
    """A connected socket, which it owns: of this host, or between hosts with sealed headers."""

    def __init__(self, connection: socket.socket, kind: str, seal: Seal | None = None) -> None:
        self.kind = kind
        self.seal = seal
        self._socket = connection
        _prepared(connection)
        connection.setblocking(True)
        # The kernel's own timeout: one system call waits, and still returns to look at the deadline.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, POLL_MS * 1000))

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
    """A socket under TLS, after its handshake."""

    kind = "tls"
    seal: Seal | None = None

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection
        _prepared(connection)
        connection.setblocking(False)
        # OpenSSL does not bear two threads in one connection; neither waits for the network in here.
        self._using = threading.Lock()
        self._joined = memoryview(bytearray(RECORD_BYTES))
        self._more = True
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def send(self, pieces: Sequence[memoryview]) -> int:
        total = 0
        for piece in self._records(pieces):
            rest = piece
            while rest:
                # OpenSSL goes on with a record for which there was no room: it wants the same again, no shorter.
                sent = self._send_some(rest[:RECORD_BYTES])
                if not sent:
                    return total
                total += sent
                rest = rest[sent:]
        return total

    def _records(self, pieces: Sequence[memoryview]) -> Sequence[memoryview]:
        """The beginning together as one record, and the rest as it lies."""
        end = 0
        for number, piece in enumerate(pieces):
            flat = piece.cast("B")
            part = min(len(flat), RECORD_BYTES - end)
            self._joined[end : end + part] = flat[:part]
            end += part
            if part < len(flat):
                later = [each.cast("B") for each in pieces[number + 1 :]]
                return [self._joined[:end], flat[part:], *later]
        return [self._joined[:end]]

    def receive(self, into: memoryview, *, wait: bool) -> int:
        if wait and not (self._more and self.buffered()):
            self._readable.poll(POLL_MS)
        with self._using:
            try:
                got = self._socket.recv_into(into)
            except _NOT_NOW:
                return 0
            except OSError as problem:
                raise _tls_broken(problem) from None
        if not got:
            raise ConnectionBroken(_CLOSED)
        # Less than was asked for is the end of what OpenSSL has.
        self._more = got == into.nbytes
        return got

    def _send_some(self, piece: memoryview) -> int:
        with self._using:
            try:
                return self._socket.write(piece)
            except _NOT_NOW:
                return 0
            except OSError as problem:
                raise _tls_broken(problem) from None

    def wait(self, *, readable: bool, writable: bool) -> bool:
        return (readable and self.buffered()) or _poll(self._socket, readable, writable)

    def buffered(self) -> bool:
        with self._using:
            return self._socket.pending() > 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        with self._using:
            self._socket.close()
