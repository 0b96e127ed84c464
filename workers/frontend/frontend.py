"""The frontend process: the registry of open requests behind its edges: NATS, HTTP, and gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfmoon.bus.connection import Bus
from halfmoon.schemas.policy import Layout
from halfmoon.workers.frontend.cluster_status import ClusterStatus
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.edges.http_edge import HttpEdge
from halfmoon.workers.frontend.edges.nats_edge import NatsEdge
from halfmoon.workers.frontend.registry import RequestRegistry
from halfmoon.workers.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from halfmoon.workers.frontend.edges.ext_proc_edge import ExtProcEdge


class Frontend:
    """`start` takes part in the cluster and opens the edges; `stop` drains."""

    def __init__(self, bus: Bus, config: FrontendConfig, tokenizer: Tokenizer, layout: Layout) -> None:
        self.bus = bus
        self.config = config
        self.registry = RequestRegistry(bus, config, tokenizer, layout)
        registry = self.registry
        self._status = ClusterStatus(bus, config, registry.log_health, registry.prompts.learn)
        self._nats = NatsEdge(self.registry, self._status) if config.nats_api else None
        self._http = HttpEdge(self.registry, self._status) if config.http_port >= 0 else None
        self._gateways: ExtProcEdge | None = None
        if config.ext_proc_port >= 0:
            # Of the extra `gateway`, which others do without.
            from halfmoon.workers.frontend.edges.ext_proc_edge import ExtProcEdge

            self._gateways = ExtProcEdge(self.registry)

    @property
    def http_url(self) -> str:
        """Where HTTP is served, once started; "" when it is not."""
        return self._http.url if self._http else ""

    @property
    def http_port(self) -> int:
        return int(self.http_url.rpartition(":")[2]) if self.http_url else -1

    @property
    def ext_proc_port(self) -> int:
        """Where gateways ask, once started; -1: nowhere."""
        return self._gateways.port if self._gateways else -1

    async def start(self) -> None:
        """Raises BusError, and OSError when a port is taken: then nobody has heard of this frontend."""
        if self._http is not None:
            await self._http.start()
            self._status.http_url = self._http.url
        if self._gateways is not None:
            await self._gateways.start()
        await self.registry.listen()
        # Once it has joined, all say that it is ready: a request over NATS must find it then.
        if self._nats is not None:
            await self._nats.start()
        await self.registry.join()

    async def stop(self) -> None:
        """Refuse new requests, finish open ones within `drain_ns_max`, tell the rest why, leave. Once is
        enough.
        """
        if self.registry.draining:
            return
        self.registry.draining = True
        if self._nats is not None:
            await self._nats.stop_taking()
        await self.registry.stop()
        if self._nats is not None:
            await self._nats.stop()
        for edge in (self._gateways, self._http):
            if edge is not None:
                await edge.stop()
