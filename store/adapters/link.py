"""ClientLink: an engine's way to the store: a daemon thread with an event loop, on which a client finds and keeps it.
`StoreLink` has a `RowClient` there.

Rules:

- The engine's threads never wait for the loop but in `start`, `close` and `ask`.
- A store that is away is found again by itself. After a failure it is left alone for `REST_S`.
- When `close` returns, nothing that was begun here touches the engine's memory any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec
import xxhash
from nats.errors import Error as NatsError

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError
from halfmoon.bus.streams import StreamLimits
from halfmoon.schemas.types import ID_PATTERN, Id
from halfmoon.store.adapters.row_client import RowClient
from halfmoon.store.client import ANY_NODE, StoreClient
from halfmoon.store.errors import StoreError, WrongSize

REST_S = 1.0
#: A server is waited for so long, before it is tried again.
FOUND_S = 2.0
#: Most bytes of one exchange with the store.
BATCH_BYTES = 64 << 20
#: Errors that an exchange with the store may raise.
FAILURES = (StoreError, BusError, NatsError, TimeoutError)
log = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C")


Peer = Annotated[str, msgspec.Meta(pattern=rf"{ID_PATTERN}|^\{ANY_NODE}$")]


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine reaches the store, by the names that its configuration gives them."""

    #: Whose options these are, for errors.
    title: ClassVar[str] = "link"

    #: Node of the store agent on this host.
    node: Id
    nats: str = "nats://127.0.0.1:4222"
    nats_nkey_file: str = ""
    nats_credentials: str = ""
    nats_ca: str = ""
    tenant: str = ""
    #: Other nodes that are asked for blocks that this one lacks; `ANY_NODE`: those that have them.
    peers: tuple[Peer, ...] = ()
    #: Blocks of other weights are never read: change it whenever the weights change.
    weight_version: str = ""
    #: A lookup that is not answered within this time is a miss.
    lookup_s: float = 0.5
    #: A copy fails when it takes longer, its wait for others counted in.
    transfer_s: float = 10.0
    #: Time that the engine's start waits for the store; without it the engine starts all the same.
    connect_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("lookup_s", "transfer_s", "connect_s"):
            if not 0 < getattr(self, name) <= 600:
                raise ValueError(f"{name}: {getattr(self, name)} is not in 0..600")

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Raises ValueError, naming the field."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as problem:
            raise ValueError(f"configuration of the halfmoon {cls.title}: {problem}") from None


class BlockKeys:
    """The store's keys of an engine's keys: equal where these, the tenant and the namespace are."""

    def __init__(self, namespace: bytes, tenant: str) -> None:
        """`namespace`: equal where equal keys mean equal bytes."""
        self._prefix = b"".join(
            len(part).to_bytes(4, "little") + part for part in (namespace, tenant.encode())
        )

    def of(self, key: bytes) -> bytes:
        """16 bytes."""
        return xxhash.xxh3_128_digest(self._prefix + key)


class WrongBlocks(StoreError):
    """The node's agent holds blocks that do not suit the engine's: the engine's start ends with this."""


class ClientLink(ABC, Generic[C]):
    """See the module. `C`: what is opened on the loop, once the store is there."""

    def __init__(self, options: LinkOptions, *, block_bytes: int, me: str = "") -> None:
        """`block_bytes`: of the engine's blocks. `me`: the engine's name in the cluster, else its node's."""
        self._options = options
        self.me = me or options.node
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._tried = threading.Event()
        self._unusable = ""
        self._client: C | None = None
        self._resting_until_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"halfmoon-link-{options.node}", daemon=True)

    # --- the engine's threads -------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Waits for the store, `connect_s` at most. Raises ValueError when its blocks do not suit."""
        self.loop = asyncio.new_event_loop()
        self._thread.start()
        if not self._tried.wait(self._options.connect_s):
            told = "store agent %s does not answer: the engine starts without it (its blocks have %d bytes)"
            log.warning(told, self._options.node, self._block_bytes)
        if self._unusable:
            self.close()
            raise ValueError(self._unusable)

    def call(self, work: Callable[[], object]) -> bool:
        """Has it called on the loop, soon, after all that was given before. False: the loop has ended."""
        if self.loop is None or not self.alive:
            return False
        try:
            self.loop.call_soon_threadsafe(work)
        except RuntimeError:  # it was closed just now
            return False
        return True

    def spawn(self, work: Callable[[Any], Coroutine[Any, Any, None]], given: Any) -> bool:
        """Begins it on the loop. False: the loop has ended."""

        def begin() -> None:
            task = asyncio.ensure_future(work(given))
            self._tasks.add(task)
            task.add_done_callback(self._done)

        return self.call(begin)

    def ask(self, work: Callable[[C], Coroutine[Any, Any, T]], *, within_s: float) -> T | None:
        """The result of `work`, from any thread; None where the store is away, fails, or takes longer."""
        ended = threading.Event()
        found: list[T] = []

        async def answered(_: None) -> None:
            try:
                if (client := self.usable()) is not None:
                    async with asyncio.timeout(within_s):
                        found.append(await work(client))
            except FAILURES:
                self.rest()
            finally:
                ended.set()

        if self.spawn(answered, None):
            while not ended.wait(1.0) and self.alive:
                pass
        return found[0] if found else None

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    @staticmethod
    def say(told: str) -> None:
        """To the engine's log."""
        log.warning("%s", told)

    def counts(self) -> Counter[str]:
        """Events since the last call, by name."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Ends calls that are under way. Idempotent."""
        if self.loop is not None and self.alive:
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    # --- the loop's thread ----------------------------------------------------------------------------------

    @abstractmethod
    async def open(self, bus: Bus, stack: contextlib.AsyncExitStack) -> C:
        """Opens what is used on the loop; the stack closes it. Raises WrongBlocks, StoreError, BusError."""

    def usable(self) -> C | None:
        """None: it is away, or rests."""
        return self._client if time.monotonic() >= self._resting_until_s else None

    def rest(self) -> None:
        self.count("store_away")
        self._resting_until_s = time.monotonic() + REST_S

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("a task of the halfmoon store's link failed", exc_info=problem)

    def _run(self) -> None:
        loop = self.loop
        assert loop is not None
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            connecting = asyncio.create_task(self._connect(stack))
            await self._stop.wait()
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, stack: contextlib.AsyncExitStack) -> None:
        """Tries until there is a store agent with blocks that suit; it is closed with the stack."""
        options, said = self._options, ""
        config = BusConfig(
            url=options.nats,
            nkey_seed_file=options.nats_nkey_file,
            credentials_file=options.nats_credentials,
            tls_ca_file=options.nats_ca,
            connect_timeout_s=FOUND_S,
        )
        while self._client is None:
            try:
                await self._connect_once(config, stack)
                said = ""
            except (BusError, StoreError, NatsError) as problem:
                if str(problem) != said:
                    said = str(problem)
                    log.warning("the engine has no store: %s", said)
            self._tried.set()
            if self._client is None:
                await asyncio.sleep(REST_S)

    async def _connect_once(self, config: BusConfig, stack: contextlib.AsyncExitStack) -> None:
        async with contextlib.AsyncExitStack() as opened:
            # Streams are an agent's or a conductor's to make: an engine may not, and need not.
            bus = await Bus.connect(config, name=self.me, limits=StreamLimits(replicas=0, wait_s=FOUND_S))
            opened.push_async_callback(bus.close)
            try:
                client = await self.open(bus, opened)
            except WrongBlocks as problem:
                self._unusable = str(problem)
                raise
            stack.push_async_exit(opened.pop_all())
            self._client, self._unusable = client, ""


class StoreLink(ClientLink[RowClient]):
    """See the module. The engine's blocks are rows, which may take several of the store's."""

    async def open(self, bus: Bus, stack: contextlib.AsyncExitStack) -> RowClient:
        options, size = self._options, self._block_bytes
        client = StoreClient(bus, node_id=options.node, tenant=options.tenant, peers=options.peers)
        stack.push_async_callback(client.close)
        await client.attach()
        try:
            return RowClient(client, size)
        except WrongSize as problem:
            raise WrongBlocks(
                f"node: the store agent of {options.node} holds {problem}: "
                f"halfmoon store --node NAME --block-bytes {size}, or a whole part of it"
            ) from None
