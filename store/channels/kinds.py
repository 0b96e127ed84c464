"""The kinds of channel, in one list: each knows its addresses, how to listen and how to let the other end in.

=====  ======================  ==================================================================
unix   `unix:HOST/NAME`        one host: an abstract socket, which leaves no file; the kernel
                               vouches for the other end's user, which must be ours
tls    `tls://HOST:PORT`       between hosts: both prove the secret, and all is encrypted
tcp    `tcp://HOST:PORT`       between hosts with encryption "never": both prove the secret, and
                               headers are sealed
=====  ======================  ==================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from halfmoon.store.channels.certificate import tls_context
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.channels.streams import PlainStream, Seal, Stream, TlsStream
from halfmoon.store.errors import ChannelRefused
from halfmoon.store.transports.tcp import wire
from halfmoon.store.transports.tcp.channel import (
    POLL_MS,
    STRANGER_MESSAGE_BYTES_MAX,
    ConnectionBroken,
    FrameMissing,
    PlainChannel,
)

BACKLOG = 128
HANDSHAKE_BYTES = 16 * 1024
PORT_MAX = 65535
F = TypeVar("F", bound=wire.FrameHeader)
Listening = tuple[socket.socket, str]
_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid


class ChannelKind(Protocol):
    """One way to connect. `take` and `connect` return a stream whose other end belongs to the cluster; they raise
    ChannelRefused, ConnectionBroken and OSError.
    """

    name: str

    def listen(self, options: ChannelOptions, worker_id: str) -> Sequence[Listening]:
        """Sockets and their addresses; none where the options want none. Raises OSError."""

    def take(self, connection: socket.socket, options: ChannelOptions, deadline_s: float) -> Stream:
        """The server's end of a connection that was accepted."""

    def reaches(self, address: str, options: ChannelOptions) -> bool:
        """The address is of this kind, and leads somewhere from here, as the options allow."""

    def connect(self, address: str, options: ChannelOptions, deadline_s: float) -> Stream: ...


class UnixKind:
    """Between processes of one user on one host."""

    name = "unix"

    def listen(self, options: ChannelOptions, worker_id: str) -> Sequence[Listening]:
        name = f"halfmoon-{worker_id[:40]}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(f"\0{name}")
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return [(listener, f"unix:{_network_id()}/{name}")]

    def take(self, connection: socket.socket, options: ChannelOptions, deadline_s: float) -> Stream:
        _own_user(connection)
        return PlainStream(connection, self.name)

    def reaches(self, address: str, options: ChannelOptions) -> bool:
        return address.startswith(f"unix:{_network_id()}/")

    def connect(self, address: str, options: ChannelOptions, deadline_s: float) -> Stream:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # The kernel's own timeout: with Python's, a port that is busy is no port at once.
            left_us = int(max(0.001, deadline_s - time.monotonic()) * 1e6)
            timeout = struct.pack("@ll", *divmod(left_us, 1_000_000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            connection.connect("\0" + address.partition("/")[2])
            # A name is nobody's own: another user may have taken it.
            _own_user(connection)
            return PlainStream(connection, self.name)
        except BaseException:
            connection.close()
            raise


class TlsKind:
    """Between hosts, by TLS under the secret (`certificate`)."""

    name = "tls"

    def listen(self, options: ChannelOptions, worker_id: str) -> Sequence[Listening]:
        return [] if options.encryption == "never" else _listen_tcp(self.name, options)

    def take(self, connection: socket.socket, options: ChannelOptions, deadline_s: float) -> Stream:
        return _shaken_hands(connection, options, deadline_s, server=True)

    def reaches(self, address: str, options: ChannelOptions) -> bool:
        return address.startswith("tls://") and options.encryption != "never"

    def connect(self, address: str, options: ChannelOptions, deadline_s: float) -> Stream:
        connection = _connected(address, deadline_s)
        try:
            return _shaken_hands(connection, options, deadline_s, server=False)
        except BaseException:
            connection.close()
            raise


class TcpKind:
    """Between hosts with encryption "never": the block links' proofs, then sealed headers."""

    name = "tcp"

    def listen(self, options: ChannelOptions, worker_id: str) -> Sequence[Listening]:
        return _listen_tcp(self.name, options) if options.encryption == "never" else []

    def take(self, connection: socket.socket, options: ChannelOptions, deadline_s: float) -> Stream:
        channel = PlainChannel(connection, frame_bytes_max=STRANGER_MESSAGE_BYTES_MAX, stranger=True)
        wait = _Deadline(deadline_s)
        greeting = _heard(channel, wire.Greeting, wait)
        try:
            nonces, challenge = wire.challenge(options.secret, greeting)
        except wire.FrameInvalid as problem:
            raise ConnectionBroken(str(problem), "malformed") from None
        channel.send([b"", wire.encode(challenge)], wait)
        key = wire.admitted(options.secret, nonces, _heard(channel, wire.Answer, wait))
        if key is None:
            channel.send([b"", wire.encode(wire.RefusalFrame(reason="the secret is another"))], wait)
            raise ChannelRefused("secret: another one at the caller")
        # The caller speaks next, and in the other protocol.
        socket_alone = channel.detach()
        channel.send([b"", wire.encode(wire.Welcome(incarnation=""))], wait)
        return PlainStream(socket_alone, self.name, _seal(key, server=True))

    def reaches(self, address: str, options: ChannelOptions) -> bool:
        return address.startswith("tcp://") and options.encryption == "never"

    def connect(self, address: str, options: ChannelOptions, deadline_s: float) -> Stream:
        connection = _connected(address, deadline_s)
        try:
            channel = PlainChannel(connection, frame_bytes_max=STRANGER_MESSAGE_BYTES_MAX, stranger=True)
            wait = _Deadline(deadline_s)
            greeting = wire.Greeting(nonce=secrets.token_bytes(wire.NONCE_BYTES))
            channel.send([b"", wire.encode(greeting)], wait)
            challenge = _heard(channel, wire.Challenge, wait)
            proved = wire.answer(options.secret, greeting, challenge, "")
            if proved is None:
                raise ChannelRefused(f"secret: another one at {address}")
            channel.send([b"", wire.encode(proved[1])], wait)
            _heard(channel, wire.Welcome, wait)
            return PlainStream(channel.detach(), self.name, _seal(proved[0], server=False))
        except BaseException:
            connection.close()
            raise


#: Best first.
KINDS: Sequence[ChannelKind] = (UnixKind(), TlsKind(), TcpKind())


class _Deadline:
    """Ends the waits of a handshake."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def moved(self) -> None:
        """Every byte counts against the one deadline."""

    def check(self) -> None:
        if time.monotonic() >= self._deadline_s:
            raise ConnectionBroken("it did not prove itself in time", "stranger")


def _heard(channel: PlainChannel, kind: type[F], wait: _Deadline) -> F:
    """The next frame, which must be of this kind. Raises ConnectionBroken, ChannelRefused."""
    channel.receive(wait)
    try:
        channel.small()
        frame = wire.decode(channel.small())
    except (FrameMissing, wire.FrameInvalid) as problem:
        raise ConnectionBroken(str(problem), "malformed") from None
    channel.drain()
    if isinstance(frame, wire.RefusalFrame):
        raise ChannelRefused(frame.reason)
    if not isinstance(frame, kind):
        raise ConnectionBroken(f"{type(frame).__name__} where {kind.__name__} was due", "malformed")
    return frame


def _seal(key: bytes, *, server: bool) -> Seal:
    """Keys for each direction, which no link of blocks uses."""
    ends = [hmac.digest(key, b"channel " + end, "sha256") for end in (b"server", b"client")]
    return Seal(*ends) if server else Seal(*reversed(ends))


def _shaken_hands(
    connection: socket.socket, options: ChannelOptions, deadline_s: float, *, server: bool
) -> TlsStream:
    """Raises ChannelRefused: the other end does not know the secret, or does not speak TLS."""
    connection.settimeout(POLL_MS / 1e3)
    came, made = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = tls_context(options.secret, server).wrap_bio(came, made, server_side=server)
    try:
        while True:
            try:
                tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            connection.sendall(made.read())
            if done:
                return TlsStream(connection, tls, came, made)
            came.write(_some(connection, deadline_s))
    except ssl.SSLError as problem:
        with contextlib.suppress(OSError):
            connection.sendall(made.read())  # the alert
        raise ChannelRefused(f"secret: another one, or no TLS ({problem.reason or problem})") from None


def _some(connection: socket.socket, deadline_s: float) -> bytes:
    """Raises ConnectionBroken."""
    while True:
        if time.monotonic() >= deadline_s:
            raise ConnectionBroken("it did not prove itself in time", "stranger")
        with contextlib.suppress(TimeoutError):
            content = connection.recv(HANDSHAKE_BYTES)
            if not content:
                raise ConnectionBroken("it closed the connection")
            return content


def _own_user(connection: socket.socket) -> None:
    """Raises ChannelRefused: the other end is another user's process."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(raw)[1]
    if user != os.geteuid():
        raise ChannelRefused(f"user: {user} at the other end, {os.geteuid()} here")


def _network_id() -> str:
    """Equal for two processes of one user that see each other's abstract sockets: same kernel, same network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return hashlib.blake2b(f"{boot}/{network}/{os.geteuid()}".encode(), digest_size=8).hexdigest()


def _listen_tcp(scheme: str, options: ChannelOptions) -> Sequence[Listening]:
    listening: list[Listening] = []
    try:
        for host in filter(None, (each.strip() for each in options.bind.split(","))):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host.strip("[]"), options.port), family=family, backlog=BACKLOG)
            at = options.advertise or host.strip("[]")
            at = f"[{at}]" if ":" in at else at
            listening.append((listener, f"{scheme}://{at}:{listener.getsockname()[1]}"))
    except OSError:
        for listener, _ in listening:
            listener.close()
        raise
    return listening


def _connected(address: str, deadline_s: float) -> socket.socket:
    """Raises ConnectionBroken."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        timeout_s = max(0.001, deadline_s - time.monotonic())
        # The resolver takes a number that is too large for another one, which may be somebody's port.
        if not 0 < int(port) <= PORT_MAX:
            raise ValueError(f"port {port}: 1 to {PORT_MAX}")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    # A peer chooses its address: it may have no port, a port of six digits, a host that is no name.
    except (OSError, ValueError, OverflowError) as problem:
        raise ConnectionBroken(str(problem)) from None
