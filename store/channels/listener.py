"""The port at which other workers open channels to this one: threads of its own let them in, so that the thread that
serves channels never waits for a stranger.

A stranger is one of a few at a time (`admission`), has the time of a channel's timeout for its proof and hello, and
holds a header and a hello's memory until then. A refused stranger is counted (`refused_...`), and gets the reason where
it speaks the protocol.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.kinds import KINDS, ChannelKind
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelError, ChannelLost, ChannelRefused
from halfmoon.store.transports.tcp.admission import ADMISSION_S, Admission
from halfmoon.store.transports.tcp.streams import ConnectionBroken

#: Channels that are open and that nobody has accepted yet.
WAITING_MAX = 64
#: Fields of a refusal that are counted by name; the other end may name any.
REASONS = {"secret", "user", "hello", *ChannelHello.__struct_fields__}


class ChannelListener:
    """Open channels, one after the other: `accept`, when `fileno` is readable."""

    def __init__(
        self, hello: ChannelHello, options: ChannelOptions, kinds: Sequence[ChannelKind] = KINDS
    ) -> None:
        """Listens in every way that the options allow. Raises ChannelRefused: heads that cannot be split so; and
        ChannelError: a port is taken.
        """
        hello.check()
        self._hello, self._options = hello, options
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: deque[WorkerChannel] = deque()
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self._admission: Admission[socket.socket] = Admission()
        self._came = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        #: Callers that were not let in, by reason.
        self.counters: Counter[str] = Counter()
        self.addresses: list[str] = []
        self._accepting: dict[socket.socket, threading.Thread] = {}
        try:
            for kind in kinds:
                for listener, address in kind.listen(options, hello.worker_id):
                    self.addresses.append(address)
                    self._accepting[listener] = threading.Thread(
                        target=self._accept, args=(listener, kind), name="channel-accept", daemon=True
                    )
        except OSError as problem:
            for listener in self._accepting:
                listener.close()
            os.close(self._came)
            raise ChannelError(f"cannot listen on {options.bind}:{options.port}: {problem}") from None
        for thread in self._accepting.values():
            thread.start()

    def __enter__(self) -> ChannelListener:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._came

    def ready(self) -> bool:
        return bool(self._waiting)

    def restless(self) -> bool:
        return False

    def accept(self) -> WorkerChannel | None:
        """The next channel, open and with its `peer`; None: there is none now."""
        with self._lock:
            if not self._waiting:
                return None
            os.eventfd_read(self._came)
            return self._waiting.popleft()

    def close(self) -> None:
        """Ends channels that nobody has accepted. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for listener, accepting in self._accepting.items():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; closing does not
            accepting.join()
            listener.close()
        with self._lock:
            threads = list(self._strangers.values())
            for connection in self._strangers:
                _end(connection)
        for thread in threads:
            thread.join()
        while self._waiting:
            self._waiting.popleft().close()
        os.close(self._came)

    # --- letting in -----------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, kind: ChannelKind) -> None:
        while not self._closed:
            try:
                connection, address = listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.05)  # out of file descriptors
                continue
            host = address[0] if listener.family != socket.AF_UNIX else "this host"
            try:
                self._take(connection, host, kind)
            # The second one: there is no memory, or no right, for one more thread.
            except (OSError, RuntimeError):
                self._count("connection")
                connection.close()

    def _take(self, connection: socket.socket, host: str, kind: ChannelKind) -> None:
        """Begins to hear a stranger. Raises OSError, RuntimeError."""
        thread = threading.Thread(
            target=self._let_in, args=(connection, kind), name="channel-stranger", daemon=True
        )
        with self._lock:
            if self._closed:
                raise ConnectionRefusedError("closed")
            self._strangers[connection] = thread
            gone = self._admission.enter(connection, host)
            try:
                thread.start()
            except RuntimeError:
                self._forget(connection)
                raise
            if gone is not None:
                self.counters["refused_stranger"] += 1
                _end(gone)

    def _let_in(self, connection: socket.socket, kind: ChannelKind) -> None:
        deadline_s = time.monotonic() + min(ADMISSION_S, self._options.timeout_s)
        channel: WorkerChannel | None = None
        greeted = False
        # A descriptor of its own: the stranger's may be shut by another thread for as long as it is one.
        mine = connection.dup()
        try:
            stream = kind.take(mine, self._options, deadline_s)
            channel = WorkerChannel(stream, self._hello, self._options.timeout_s)
            channel.greet(first=False, deadline_s=deadline_s)
            greeted = True
        except (ChannelLost, ChannelRefused, ConnectionBroken, OSError) as problem:
            self._count_refused(problem)
        finally:
            if channel is None:
                mine.close()
            with self._lock:
                self._forget(connection)
                connection.close()
                let_in = greeted and channel is not None and self._put(channel)
            if channel is not None and not let_in:
                channel.close()

    def _put(self, channel: WorkerChannel) -> bool:
        """Within the lock: the channel waits to be accepted; False: it was not let in, or there are too many."""
        if self._closed or channel.lost is not None or len(self._waiting) >= WAITING_MAX:
            return False
        self._waiting.append(channel)
        os.eventfd_write(self._came, 1)
        return True

    def _forget(self, connection: socket.socket) -> None:
        self._admission.leave(connection)
        del self._strangers[connection]

    def _count_refused(self, problem: Exception) -> None:
        field = str(problem).partition(":")[0] if isinstance(problem, ChannelRefused) else ""
        self._count(field if field in REASONS else "stranger")

    def _count(self, reason: str) -> None:
        with self._lock:
            self.counters[f"refused_{reason}"] += 1


def _end(connection: socket.socket) -> None:
    """Its thread wakes, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
