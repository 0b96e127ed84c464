"""The thread of a worker that attends for others, over channels, to the KV that it holds of theirs."""

from __future__ import annotations

import threading
from typing import Any

from halfmoon.schemas.policy import Layout
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.server import SegmentServer


class Lender:
    """Serves from its start until `close`. `offer` and `drop` are called from any one thread."""

    def __init__(self, engine: Any, layout: Layout, hello: ChannelHello, options: ChannelOptions) -> None:
        """Raises ChannelError: it cannot listen there."""
        self._server = SegmentServer(
            engine.attention, engine.cache, segment_tokens=layout.segment_tokens, heads=engine.config.heads
        )
        self._listener = ChannelListener(hello, options)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attend-for-others", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        return list(self._listener.addresses)

    def offer(self, hold: int, blocks: list[int], tokens: int, expected: int = 0) -> None:
        """`tokens` tokens of the hold are here; no question is answered before `expected` are."""
        self._server.holds[hold] = HeldSegments(blocks, tokens, expected)

    def drop(self, hold: int) -> None:
        """From its return on, nothing is written to its blocks, and no answer goes out that was computed with them."""
        self._server.drop(hold)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        self._server.run(self._listener, self._over.is_set)
