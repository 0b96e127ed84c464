"""KvReceiver: the KV of prompts that another engine computes, layer by layer from the node's pool into this engine's.

::

    want ──asked of the other engine's connector──▶ its agent pushes ──KvReady──▶ copied ──all of it──▶ ended, loaded
                         └─ refused, failed, or silent for too long ──▶ ended, and the engine computes the prompt

A load ends in `ended` exactly once. After that nothing touches the engine's blocks any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halfmoon.bus.errors import PeerError
from halfmoon.schemas import subjects
from halfmoon.schemas.kv import KvMessage, KvReady, TransferFailed, TransferOpened, WantKv
from halfmoon.schemas.store import Done
from halfmoon.store.adapters.kv_link import KvDoor, KvLink
from halfmoon.store.adapters.link import FAILURES
from halfmoon.store.errors import StoreError, TransferTimeout, from_code
from halfmoon.store.kv_arrival import KvArrival

Bytes = npt.NDArray[np.uint8]
#: `copy(layer, block_id, layer_bytes)`: into the engine's block. Called in a thread of its own.
Copy = Callable[[int, int, Bytes], None]


class KvLoad(NamedTuple):
    """A prompt whose KV comes from the engine of `source_id`: `block_ids` are for its blocks from `first_block` on; the
    engine has those before.
    """

    request_id: str
    order_id: str
    source_id: str
    tokens: int
    first_block: int
    block_ids: Sequence[int]


class Ended(NamedTuple):
    """The end of a load."""

    request_id: str
    loaded: bool
    block_ids: Sequence[int]


@dataclass(slots=True)
class _Load:
    wanted: KvLoad
    arrival: KvArrival
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""


class KvReceiver:
    """See the module. Methods without an underscore are the engine's thread's, and raise nothing."""

    def __init__(self, link: KvLink, copy: Copy) -> None:
        self._link = link
        self._copy = copy
        #: Set when a load has ended.
        self._news = threading.Event()
        self._under_way = 0
        self._loads: dict[str, _Load] = {}
        self._ended: deque[Ended] = deque()
        link.on_kv = self._on_kv
        link.kept = lambda: list(self._loads)

    # --- the engine's thread --------------------------------------------------------------------------------

    def want(self, wanted: KvLoad) -> None:
        """Begins a load."""
        self._under_way += 1
        if not self._link.spawn(self._load, wanted):
            self._end(wanted, loaded=False)

    def drop(self, request_id: str) -> None:
        """Nobody wants it any more: it ends soon."""
        # A task, as its load is: they begin in order. A plain call would pass a load that has not begun, and miss it.
        self._link.spawn(self._drop, request_id)

    def ended(self) -> list[Ended]:
        """Loads that have ended since the last call."""
        self._news.clear()
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        self._under_way -= len(found)
        return found

    def rest(self, most_s: float) -> None:
        """Where loads are under way: waits until one has ended, so long at most."""
        if self._under_way:
            self._news.wait(most_s)

    # --- the loop's thread ----------------------------------------------------------------------------------

    def _on_kv(self, message: KvMessage) -> None:
        load = self._loads.get(message.order_id)
        if load is None:
            return
        match message:
            case TransferOpened() | KvReady():
                load.arrival.note(message)
                load.woken.set()
            case TransferFailed():
                self._fail(load, message.reason)

    async def _drop(self, request_id: str) -> None:
        for load in self._loads.values():
            if load.wanted.request_id == request_id:
                self._fail(load, "the request has ended")

    @staticmethod
    def _fail(load: _Load, reason: str) -> None:
        load.failure = load.failure or reason
        load.woken.set()

    async def _load(self, wanted: KvLoad) -> None:
        door = self._link.usable()
        if door is None or wanted.order_id in self._loads:
            self._link.say(f"order {wanted.order_id}: the store is away, or another request has its KV")
            self._end(wanted, loaded=False)
            return
        load = _Load(wanted, KvArrival(self._link.shape.layers, away=wanted.first_block))
        self._loads[wanted.order_id] = load
        loaded = False
        try:
            await self._ask(door, wanted)
            await self._bring(door, load)
            loaded = True
        except FAILURES as problem:
            self._link.say(f"order {wanted.order_id}: its KV did not come: {problem}")
        finally:
            del self._loads[wanted.order_id]
            self._end(wanted, loaded=loaded)
            await door.agent.release(wanted.order_id)

    def _end(self, wanted: KvLoad, *, loaded: bool) -> None:
        self._link.count("prompts_received" if loaded else "prompts_failed")
        self._ended.append(Ended(wanted.request_id, loaded, wanted.block_ids))
        self._news.set()

    async def _ask(self, door: KvDoor, wanted: KvLoad) -> None:
        request = WantKv(
            order_id=wanted.order_id,
            worker_id=self._link.me,
            node_id=self._link.options.node,
            tokens=wanted.tokens,
            layout=self._link.shape.name,
        )
        subject = subjects.want(wanted.source_id, self._link.me)
        try:
            await door.bus.request(subject, request, Done, timeout_s=self._link.options.lookup_s)
        except PeerError as problem:
            raise from_code(problem.code, problem.message) from None

    async def _bring(self, door: KvDoor, load: _Load) -> None:
        """Copies what is readable, until all is copied. Raises StoreError."""
        arrival, view, options = load.arrival, door.agent.view, self._link.options
        blocks = load.wanted.first_block + len(load.wanted.block_ids)
        while not arrival.complete:
            patience_s = options.transfer_s if arrival.opened else options.wait_s
            try:
                async with asyncio.timeout(patience_s):
                    await load.woken.wait()
            except TimeoutError:
                raise TransferTimeout(f"nothing came within {patience_s:g} s") from None
            load.woken.clear()
            if load.failure:
                raise StoreError(load.failure)
            if not arrival.opened:
                continue
            if len(arrival.slots) != blocks:
                raise StoreError(f"{len(arrival.slots)} blocks come, {blocks} were asked for")
            if begun := arrival.start():
                places = [
                    (layer, block, view.layer_block(arrival.slots[block], layer)) for layer, block in begun
                ]
                await asyncio.to_thread(self._copy_all, load.wanted, places)
                arrival.copied += len(begun)
        view.require_unchanged(arrival.slots, arrival.epochs)

    def _copy_all(self, wanted: KvLoad, places: list[tuple[int, int, Bytes]]) -> None:
        for layer, block, place in places:
            block_id = wanted.block_ids[block - wanted.first_block]
            self._copy(layer, block_id, place[: self._link.shape.layer_bytes])
