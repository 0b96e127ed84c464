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

import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelRefused
from halfmoon.store.transports.tcp.streams import (
    CLEAR,
    ENCRYPTED,
    ConnectionBroken,
    HandshakeRefused,
    PlainStream,
    Protection,
    Seal,
    Stream,
    connected,
    shaken_hands,
)

BACKLOG = 128
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


class TcpKind:
    """Between hosts, where both prove the secret by TLS (`streams`)."""

    def __init__(self, name: str, protection: Sequence[Protection]) -> None:
        self.name = name
        self._protection = protection

    def listen(self, options: ChannelOptions, worker_id: str) -> Sequence[Listening]:
        return _listen_tcp(self.name, options) if self._wanted(options) else []

    def take(self, connection: socket.socket, options: ChannelOptions, deadline_s: float) -> Stream:
        return self._stream(connection, options, deadline_s, server=True)

    def reaches(self, address: str, options: ChannelOptions) -> bool:
        return address.startswith(f"{self.name}://") and self._wanted(options)

    def connect(self, address: str, options: ChannelOptions, deadline_s: float) -> Stream:
        connection = connected(address, max(0.001, deadline_s - time.monotonic()))
        try:
            return self._stream(connection, options, deadline_s, server=False)
        except BaseException:
            connection.close()
            raise

    def _wanted(self, options: ChannelOptions) -> bool:
        return (options.encryption == "never") == (self._protection == CLEAR)

    def _stream(
        self, connection: socket.socket, options: ChannelOptions, deadline_s: float, *, server: bool
    ) -> Stream:
        waiter = _Deadline(deadline_s)
        try:
            stream = shaken_hands(
                connection, options.secret, waiter, server=server, protection=self._protection
            )
        except HandshakeRefused as problem:
            raise ChannelRefused(f"{problem.kind.removeprefix('wrong_')}: {problem}") from None
        if stream.key:
            stream.seal = Seal(stream.key, b"channel", server=server)
        return stream


#: Best first.
KINDS: Sequence[ChannelKind] = (UnixKind(), TcpKind("tls", ENCRYPTED), TcpKind("tcp", CLEAR))


class _Deadline:
    """Ends the waits of a handshake."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def moved(self) -> None:
        """Every byte counts against the one deadline."""

    def check(self) -> None:
        if time.monotonic() >= self._deadline_s:
            raise ConnectionBroken("it did not prove itself in time", "stranger")


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
