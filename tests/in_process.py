"""An event loop whose connections stay within the process: for what a frontend answers, not how sockets carry it.

Both ends are the real ones: aiohttp's server and whichever client asks it, a bus and `nats_in_process`. Between them
bytes are handed on as they are written, in order, at the loop's next turns. There is no socket, no name of a host and
no TLS; a writer is never held back. Tests whose subject are those take a real loop.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp

HOST = "127.0.0.1"


class InProcessLoop(asyncio.SelectorEventLoop):
    """`create_server` and `create_connection` meet here, by port."""

    def __init__(self) -> None:
        super().__init__()
        self._listening: dict[int, Callable[[], Any]] = {}
        self._ports = itertools.count(20_000)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Raises OSError where somebody listens at that port."""
        port = port or next(self._ports)
        if port in self._listening:
            raise OSError(errno.EADDRINUSE, f"{HOST}:{port} is taken")
        self._listening[port] = protocol_factory
        return _Listener(self._listening, port)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Raises ConnectionRefusedError where nobody listens."""
        if port not in self._listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {host}:{port}")
        client, server = protocol_factory(), self._listening[port]()
        near, far = End(self, client), End(self, server)
        near.other, far.other = far, near
        here, there = (HOST, next(self._ports)), (HOST, port)
        near.names = {"peername": there, "sockname": here, "socket": _NoSocket(here, there)}
        far.names = {"peername": here, "sockname": there}
        server.connection_made(far)
        client.connection_made(near)
        return near, client

    def connector(self) -> aiohttp.BaseConnector:
        """For aiohttp's client, whose own asks the system for names and sockets."""
        return _Connector()


class _Listener:
    """What a loop gives for a server."""

    def __init__(self, listening: dict[int, Callable[[], Any]], port: int) -> None:
        self._listening = listening
        self._port = port
        self.sockets = [SimpleNamespace(getsockname=lambda: (HOST, port))]

    def close(self) -> None:
        self._listening.pop(self._port, None)

    async def wait_closed(self) -> None:
        pass


class _NoSocket:
    """What clients ask a socket for."""

    family = socket.AF_INET

    def __init__(self, here: tuple[str, int], there: tuple[str, int]) -> None:
        self.getsockname = lambda: here
        self.getpeername = lambda: there

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1


class End(asyncio.Transport):
    """One end of a connection. What is written to it is received by `other`."""

    other: End

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Any) -> None:
        super().__init__()
        self.names: dict[str, Any] = {}
        self._loop = loop
        self._protocol = protocol
        self._received: deque[bytes | None] = deque()
        self._paused = self._closing = self._lost = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.names.get(name, default)

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def write(self, data: Any) -> None:
        if data and not self._closing:
            self.other._receive(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.other._receive(None)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self._hand_over)

    def is_reading(self) -> bool:
        return not self._paused

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """The other end hears all that was written, then the end."""
        if not self._closing:
            self._closing = True
            self.other._receive(None)
            self._loop.call_soon(self._end)

    def abort(self) -> None:
        self.close()

    def _receive(self, data: bytes | None) -> None:
        self._received.append(data)
        self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        while self._received and not self._paused and not self._closing:
            if (data := self._received.popleft()) is not None:
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()

    def _end(self) -> None:
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(None)


class _Connector(aiohttp.BaseConnector):
    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        _, protocol = await self._loop.create_connection(self._factory, req.url.raw_host, req.url.port)
        return protocol
