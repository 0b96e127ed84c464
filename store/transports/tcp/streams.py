"""Bytes to and from another process, in order: a plain socket, or one under TLS; of block links and of channels.

Between hosts both ends prove by TLS that they know one secret, always (`shaken_hands`). Then they go on under it or,
where neither wants encryption, in the clear: the server draws a key for what is proved there, and sends it under TLS.

A stream waits in the kernel, never for longer than POLL_MS at a time, so that its user can look at its deadline; the
interpreter lock is let go of meanwhile. One thread may send while another receives.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from typing import Literal, Protocol

from halfmoon.store.transports.tcp.certificate import tls_context

POLL_MS = 50
PORT_MAX = 65535
#: Of the keyed sum of a header.
SEAL_BYTES = 16
#: Of a session in the clear.
KEY_BYTES = 32
HANDSHAKE_BYTES = 16 * 1024
#: Of TLS 1.3 (RFC 8446, 5.2): the header ends in the record's length.
RECORD_HEADER_BYTES = 5
RECORD_BYTES_MAX = RECORD_HEADER_BYTES + 2**14 + 256
#: Encrypted, or decrypted, at a time: a few records.
CIPHERTEXT_BYTES = 128 * 1024
#: Bytes that the kernel keeps for the other end, where its limits allow it.
SOCKET_BYTES = 4 * 1024 * 1024
#: What becomes of a connection once both ends have proved themselves; these are the names of ALPN.
Protection = Literal["encrypted", "clear"]
ENCRYPTED: Sequence[Protection] = ("encrypted",)
CLEAR: Sequence[Protection] = ("clear",)


class ConnectionBroken(Exception):
    """The connection ended. `kind`: "malformed" or "truncated" when its bytes are no message."""

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind


class ConnectionClosed(ConnectionBroken):
    """The other end closed it."""

    def __init__(self) -> None:
        super().__init__("it closed the connection")


class HandshakeRefused(ConnectionBroken):
    """The other end does not know the secret, does not speak TLS, or does not agree on encryption: `kind`."""


class Waiter(Protocol):
    """Asked while a connection waits."""

    def moved(self) -> None:
        """Some bytes went or came."""

    def check(self) -> None:
        """Raises when the wait is over."""


class Seal:
    """Keyed sums of headers, of both directions: without the session's key none can be made.

    They are BLAKE2b's (RFC 7693, 2.9). An HMAC of OpenSSL takes 2.7 times as long in a loop, and more in an exchange
    of a few KiB: four of them were a seventh of its time.
    """

    def __init__(self, key: bytes, use: bytes, *, server: bool) -> None:
        """`use`: other sums are made of the same key for another one."""
        mine, theirs = (b" server", b" client") if server else (b" client", b" server")
        self._mine, self._theirs = _keyed_sum(key, use + mine), _keyed_sum(key, use + theirs)

    def make(self, sealed: bytes | memoryview) -> bytes:
        return _keyed_sum(self._mine, sealed)

    def genuine(self, sealed: bytes | memoryview, seal: bytes | memoryview) -> bool:
        return hmac.compare_digest(_keyed_sum(self._theirs, sealed), seal)


def _keyed_sum(key: bytes, content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, key=key, digest_size=SEAL_BYTES).digest()


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


def _poll(connection: socket.socket, readable: bool, writable: bool, wait_ms: int = POLL_MS) -> bool:
    poller = select.poll()
    poller.register(connection, readable * select.POLLIN | writable * select.POLLOUT)
    ready = poller.poll(wait_ms)
    return bool(ready) and bool(ready[0][1] & ~select.POLLOUT)


def _wait_in_kernel(connection: socket.socket) -> None:
    """Its own timeouts: one system call moves megabytes, and still returns to look at the deadline."""
    connection.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, POLL_MS * 1000))


class PlainStream:
    """A connected socket, which it owns: of this host, or between hosts with sealed headers."""

    def __init__(self, connection: socket.socket, kind: str) -> None:
        self.kind = kind
        self.seal: Seal | None = None
        #: Both ends have it, and nobody else; "": this stream needs none.
        self.key = b""
        self._socket = connection
        _prepared(connection)
        _wait_in_kernel(connection)

    def send(self, pieces: Sequence[memoryview], *, wait: bool = False) -> int:
        """`wait`: POLL_MS at most where there is no room."""
        try:
            return self._socket.sendmsg(pieces, (), 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise ConnectionBroken(problem.strerror or str(problem)) from None

    def receive(self, into: memoryview, *, wait: bool, some: bool = False) -> int:
        """`some`: the wait ends with the first bytes, not when `into` is full."""
        waiting = 0 if some else socket.MSG_WAITALL
        try:
            got = self._socket.recv_into(into, 0, waiting if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise ConnectionBroken(problem.strerror or str(problem)) from None
        if not got:
            raise ConnectionClosed
        return got

    def wait(self, *, readable: bool, writable: bool) -> bool:
        return _poll(self._socket, readable, writable)

    def buffered(self) -> bool:
        return False

    def anything(self) -> bool:
        """Bytes are here, or the connection's end."""
        return _poll(self._socket, readable=True, writable=False, wait_ms=0)

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
    key = b""

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

    def send(self, pieces: Sequence[memoryview], *, wait: bool = False) -> int:
        """Where it returns less than all, the next call must begin with the bytes that are left. `wait`: about POLL_MS
        at most, and for a few records only, so that its user can look at its deadline.
        """
        total = 0
        while self._flushed(wait):
            total += self._pending_plain
            self._pending_plain = 0
            if wait and total:
                break
            self._pending_plain = self._encrypt(pieces, total)
            if not self._pending_plain:
                break
        return total

    def _encrypt(self, pieces: Sequence[memoryview], skip: int) -> int:
        """Some of the bytes after the first `skip` ones; how many."""
        size = 0
        with self._using:
            try:
                for piece in pieces:
                    if skip >= piece.nbytes:
                        skip -= piece.nbytes
                        continue
                    part = piece.cast("B")[skip : skip + CIPHERTEXT_BYTES - size]
                    skip = 0
                    size += self._tls.write(part)
                    if size == CIPHERTEXT_BYTES:
                        break
            except ssl.SSLError as problem:
                raise ConnectionBroken(f"TLS: {problem.reason or problem}") from None
            self._pending = memoryview(self._made.read())
        return size

    def _flushed(self, wait: bool) -> bool:
        while self._pending:
            try:
                sent = self._socket.send(self._pending, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as problem:
                raise ConnectionBroken(problem.strerror or str(problem)) from None
            self._pending = self._pending[sent:]
            if wait and self._pending:
                return False
        return True

    def receive(self, into: memoryview, *, wait: bool, some: bool = False) -> int:
        got = self._decrypted(into) if self._more else 0
        if got:
            return got
        # So much is still to come, whatever of a record is here: one system call waits for it, not one a segment.
        due = 0 if some or not wait else into.nbytes - RECORD_BYTES_MAX
        try:
            if due >= RECORD_BYTES_MAX:
                size = self._socket.recv_into(self._scratch[:due], 0, socket.MSG_WAITALL)
            else:
                size = self._socket.recv_into(self._scratch, 0, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as problem:
            raise ConnectionBroken(problem.strerror or str(problem)) from None
        if not size:
            raise ConnectionClosed
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
                        raise ConnectionClosed
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

    def anything(self) -> bool:
        """Bytes are here, or the connection's end."""
        return self.buffered() or _poll(self._socket, readable=True, writable=False, wait_ms=0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        _shut(self._socket)

    def close(self) -> None:
        self._socket.close()


def connected(address: str, timeout_s: float) -> socket.socket:
    """`address`: `SCHEME://HOST:PORT`. Raises ConnectionBroken."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        # The resolver takes a number that is too large for another one, which may be somebody's port.
        if not 0 < int(port) <= PORT_MAX:
            raise ValueError(f"port {port}: 1 to {PORT_MAX}")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    # A peer chooses its address: it may have no port, a port of six digits, a host that is no name.
    except (OSError, ValueError, OverflowError) as problem:
        raise ConnectionBroken(str(problem)) from None


def shaken_hands(
    connection: socket.socket,
    secret: str,
    waiter: Waiter,
    *,
    server: bool,
    protection: Sequence[Protection] = ENCRYPTED,
) -> TlsStream | PlainStream:
    """A stream between two ends that know `secret`, in the first way of the server's `protection` that the other end
    offers. Raises HandshakeRefused, ConnectionBroken, and the errors of `waiter`.
    """
    _wait_in_kernel(connection)
    came, made = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = tls_context(secret, server, tuple(protection)).wrap_bio(came, made, server_side=server)
    try:
        while not _shaken(tls, connection, made):
            came.write(_some(connection, waiter))
        agreed = tls.selected_alpn_protocol()
        if agreed is None:
            raise HandshakeRefused(
                f"no agreement on encryption: here {' or '.join(protection)}", "encryption"
            )
        if agreed == "encrypted":
            return TlsStream(connection, tls, came, made)
        plain = PlainStream(connection, "tcp")
        if server:
            plain.key = secrets.token_bytes(KEY_BYTES)
            tls.write(plain.key)
            connection.sendall(made.read())
        else:
            came.write(_record(connection, waiter))
            plain.key = tls.read(KEY_BYTES)
        return plain
    except ssl.SSLError as problem:
        with contextlib.suppress(OSError):
            connection.sendall(made.read())  # the alert
        reason = problem.reason or str(problem)
        raise HandshakeRefused(f"another secret, or no TLS ({reason})", "wrong_secret") from None
    except OSError as problem:
        raise ConnectionBroken(problem.strerror or str(problem)) from None


def _shaken(tls: ssl.SSLObject, connection: socket.socket, made: ssl.MemoryBIO) -> bool:
    """One step of the handshake; whether it was the last."""
    try:
        tls.do_handshake()
        return True
    except ssl.SSLWantReadError:
        return False
    finally:
        connection.sendall(made.read())


def _record(connection: socket.socket, waiter: Waiter) -> bytes:
    """One record of TLS, and no byte more: what follows is in the clear."""
    record, size = b"", RECORD_HEADER_BYTES
    while len(record) < size:
        record += _some(connection, waiter, size - len(record))
        if len(record) == RECORD_HEADER_BYTES:
            size += int.from_bytes(record[3:], "big")
    return record


def _some(connection: socket.socket, waiter: Waiter, size: int = HANDSHAKE_BYTES) -> bytes:
    """The next bytes. Raises ConnectionClosed, OSError, and the errors of `waiter`."""
    while True:
        # Not only when nothing came: a byte now and then would hold this thread past every deadline.
        waiter.check()
        with contextlib.suppress(BlockingIOError):
            content = connection.recv(size)
            if not content:
                raise ConnectionClosed
            waiter.moved()
            return content
