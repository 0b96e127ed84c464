"""An engine's cache as it is known here: its KV events, read, applied, and turned into our blocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from halfmoon.bus.tasks import end_tasks
from halfmoon.store.pool.slots import Change, Counts
from halfmoon.workers.adapters.engine_blocks import BlockSizeInvalid, CacheChange, EngineBlocks
from halfmoon.workers.adapters.kv_event_reader import KvEventReader
from halfmoon.workers.adapters.kv_events import EngineCleared, EventBatch

#: An engine may announce the end of a block after the block that takes its place.
_MARGIN = 2


class EngineMirror:
    """`start`, then `stop`. `events` "": the engine keeps no prompts. Implements `KvEventListener`, and the announcer's
    `Inventory`.
    """

    def __init__(
        self, *, block_tokens: int, cache_tokens: int, cache_blocks: int, events: str, replay: str, topic: str
    ) -> None:
        self.blocks = EngineBlocks(block_tokens=block_tokens, blocks_max=_MARGIN * cache_blocks)
        self.reader = KvEventReader(self, events=events, replay=replay, topic=topic)
        #: Called with each change, in order.
        self.changed: Callable[[list[Change]], None] | None = None
        #: Gets why the engine cannot be mirrored at all.
        self.unfit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._slots = cache_tokens // block_tokens
        self._reading: list[asyncio.Task[None]] = []
        self._caches = bool(events)

    def start(self) -> None:
        """Raises ValueError: an address makes no sense."""
        if not self._caches:
            return
        self.reader.open()
        self._reading = [asyncio.create_task(self._read())]

    async def stop(self) -> None:
        await end_tasks(self._reading)
        self.reader.close()
        self.unfit.cancel()

    async def _read(self) -> None:
        try:
            await self.reader.run()
        except Exception as problem:
            # No message of the engine may end the adapter in silence.
            self._fail(f"reading KV events failed: {type(problem).__name__}: {problem}")

    # --- Inventory ------------------------------------------------------------------------------------------

    def keys(self) -> list[bytes]:
        return self.blocks.keys()

    def counts(self) -> Counts:
        whole = min(len(self.blocks.keys()), self._slots)
        return Counts(
            slots=self._slots,
            free=self._slots - whole,
            reserved=0,
            committed=whole,
            condemned=0,
            leased=0,
            leases=0,
            holds=0,
        )

    # --- KvEventListener ------------------------------------------------------------------------------------

    def batch_told(self, batch: EventBatch) -> None:
        try:
            self._tell(self.blocks.apply(batch.events))
        except BlockSizeInvalid as problem:
            self._fail(f"--block-tokens: {problem}")

    def batches_lost(self) -> None:
        self._tell(self.blocks.doubt())

    def engine_restarted(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is in the engine's cache any more."""
        self._tell(self.blocks.apply([EngineCleared()]))

    def _tell(self, changes: list[CacheChange]) -> None:
        if changes and self.changed is not None:
            self.changed([Change("stored" if each.stored else "evicted", each.key) for each in changes])

    def _fail(self, reason: str) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            self.unfit.set_result(reason)
