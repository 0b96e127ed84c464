"""A connection to a nats-server that a test can cut."""

from __future__ import annotations

import asyncio


class Proxy:
    """A TCP hop to the nats-server that can be cut."""

    def __init__(self, url: str) -> None:
        self.host, _, port = url.rpartition("//")[2].partition(":")
        self.target = int(port)
        self.writers: list[asyncio.StreamWriter] = []
        self.cut = False
        #: Connections that were tried while it was cut.
        self.refused = 0
        #: Nothing goes through, and nobody is told: as when a cable is pulled.
        self.silent = False

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut:
            self.refused += 1
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection(self.host, self.target)
        self.writers += [writer, there_writer]
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while some := await source.read(65536):
                if not self.silent:
                    sink.write(some)
        except OSError:
            return
        finally:
            if not self.silent:
                sink.close()

    def drop(self) -> None:
        self.cut = True
        for writer in self.writers:
            writer.close()
        self.writers.clear()
