"""The store for any program: put, get, get_into, exists, remove, pin, one block or a batch; asynchronous.

It needs a nats-server and a store agent on this host (`halfmoon store`, or `StoreAgent` in the same program),
and nothing else of halfmoon. A value is one block, exactly `block_bytes` long, in anything with a buffer:
bytes, numpy, a torch tensor on the CPU. Values never pass through NATS: they are copied once between the
caller's buffer and the node's memory, which is mapped here, or not at all (`get` shows the memory itself).

Three answers that are not a value, three errors (`halfmoon.store.errors`):

- `BlockMissing`: no node that was asked has the block.
- `TransferError` (`TransferTimeout`, `TransferRefused`, `BytesCorrupted`, `LeaseLost`): it was found, but did not
  arrive.
- `AgentUnreachable`, `HolderUnreachable`: the holder, or a node that may be one, does not answer.

A batch gives one answer a key: the error itself, not raised, where one key failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.schemas import store as messages
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.errors import (
    AgentUnreachable,
    BlockMissing,
    BytesCorrupted,
    HolderUnreachable,
    LeaseLost,
    StoreError,
    TransferError,
    WrongSize,
)
from halfmoon.store.locate import find_holders, located
from halfmoon.store.pool.checksums import block_sum, sums_of
from halfmoon.store.pool.segment import PoolView, require_unchanged

Array = npt.NDArray[np.uint8]
#: Copies up to this size are made at once; longer ones in a thread (numpy lets go of the interpreter lock).
INLINE_BYTES = 256 * 1024
#: Among a client's peers: whichever nodes have the blocks.
ANY_NODE = "*"


def key_of(name: str, *, tenant: str = "") -> bytes:
    """A block key for a name. Equal names of two tenants are two keys."""
    raw = tenant.encode()
    return xxhash.xxh3_128_digest(len(raw).to_bytes(4, "little") + raw + name.encode())


class Held:
    """A block in the node's memory, as it is, until `release`: `array` shows it without a copy. Do not write to it.

    Use it as `async with await client.get(key) as held`. The client renews the lease for as long as it is held. That
    needs a process that runs: one that stood still for longer than a lease (60 s by default) may find another block's
    bytes in the array. `check` raises then, and so does the end of the `async with`; use nothing that was read before
    one of them has passed.
    """

    def __init__(self, client: StoreClient, order_id: str, view: PoolView, slot: int, epoch: int) -> None:
        self._client = client
        self._order_id = order_id
        self._slot, self._epoch = slot, epoch
        # The view's own tables: they keep the memory, whatever the client maps or closes later.
        self._epochs = view.epochs
        self._released = False
        #: u8 `[block_bytes]`.
        self.array: Array = view.blocks[slot].reshape(-1)

    def check(self) -> None:
        """Raises LeaseLost: bytes read from the array so far may be another block's."""
        require_unchanged(self._epochs, [self._slot], [self._epoch])

    async def release(self) -> None:
        """The array is read no more. Raises as `check`, with the block given back. A second time it does nothing."""
        if self._released:
            return
        self._released = True
        try:
            self.check()
        finally:
            await self._client.let_go(self._order_id)

    async def __aenter__(self) -> Held:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.release()
        except LeaseLost:
            # The lost lease explains an error that another block's bytes caused; a cancellation stays one.
            if kind is None or issubclass(kind, Exception):
                raise


class _FoundAt(NamedTuple):
    """Where a block is: its slot here, the slot's epoch, the checksum of the put, and the order that holds it."""

    slot: int
    epoch: int
    checksum: int
    order_id: str


class _Found(NamedTuple):
    """By key index: where it is, or why it is nowhere; the orders that hold the slots."""

    places: dict[int, _FoundAt]
    problems: dict[int, StoreError]
    orders: list[str]


class StoreClient:
    """See the module. Use it from one event loop; make it with `connect`."""

    def __init__(self, bus: Bus, *, node_id: str, tenant: str = "", peers: Sequence[str] = ()) -> None:
        """`peers`: other nodes that are asked for blocks that are not here; their agents need not be up. `ANY_NODE`
        among them: those that have the blocks, which conductors know.
        """
        self._bus = bus
        self._node_id = node_id
        self._tenant = tenant
        self._peers = [peer for peer in peers if peer not in (node_id, ANY_NODE)]
        self._anywhere = ANY_NODE in peers
        self._party = f"client-{uuid.uuid4().hex[:16]}"
        self._door = AgentClient(bus, node_id=node_id, worker_id=self._party)
        self._own_bus = False
        self._held: set[str] = set()

    @classmethod
    async def connect(
        cls, url: str = "nats://127.0.0.1:4222", *, node_id: str, tenant: str = "", peers: Sequence[str] = ()
    ) -> StoreClient:
        """Connects to NATS and maps the memory of the node's agent. Raises BusError, AgentUnreachable."""
        bus = await Bus.connect(BusConfig(url=url), name=f"store-client-{node_id}")
        client = cls(bus, node_id=node_id, tenant=tenant, peers=peers)
        client._own_bus = True
        try:
            await client.attach()
        except BaseException:
            await bus.close()
            raise
        return client

    async def attach(self) -> None:
        """Maps the memory of the node's agent; for a client made with a bus of the caller's."""
        await self._door.attach()

    async def close(self) -> None:
        """Gives back all held blocks. The array of a `Held` stays readable, but another block may take its place; its
        `check` raises then.
        """
        for order_id in list(self._held):
            await self.let_go(order_id)
        await self._door.close()
        if self._own_bus:
            await self._bus.close()

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def block_bytes(self) -> int:
        """Length of every value."""
        return self._door.view.geometry.block_bytes

    @property
    def layout(self) -> Layout:
        """The layout of the node's blocks, by its agent's answer."""
        return self._door.layout

    # --- one block ------------------------------------------------------------------------------------------

    async def put(self, key: bytes, value: Any) -> None:
        """Stores a copy; a key that is there keeps its value. Raises StoreFull, QuotaExceeded, WrongSize,
        WrongTenant, AgentUnreachable."""
        _raise((await self.batch_put({key: value}))[0])

    async def get(self, key: bytes) -> Held:
        """The block in place, without a copy; give it back. Raises the errors that the module names."""
        found = await self._find([key], 0)
        if found.problems:
            await self._give_back(found)
            raise found.problems[0]
        place = found.places[0]
        self._door.keep(place.order_id)
        self._held.add(place.order_id)
        for other in set(found.orders) - {place.order_id}:
            await self.let_go(other)
        return Held(self, place.order_id, self._door.view, place.slot, place.epoch)

    async def get_into(self, key: bytes, into: Any, *, verify: bool = False) -> None:
        """Copies the block into a writable buffer of `block_bytes`. Raises WrongSize and the errors of the module."""
        _raise((await self.batch_get_into([key], [into], verify=verify))[0])

    async def exists(self, key: bytes) -> bool:
        """True: this node or a peer has it, in memory or on its SSD. Keeps nothing alive. Raises
        HolderUnreachable.
        """
        answer = (await self.batch_exists([key]))[0]
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def remove(self, key: bytes) -> bool:
        """Forgets the block on this node. False: it was not here, or is held."""
        return (await self.batch_remove([key]))[0]

    async def pin(self, keys: Sequence[bytes], *, ttl_s: float, hard: bool = False) -> None:
        """Keeps blocks of this node's memory for `ttl_s`: soft, they go last; hard, they stay. Renew it by
        pinning again; it ends by itself. Raises BlockMissing (nothing is pinned then), StoreFull: half of the
        pool is pinned.
        """
        await self._pin(keys, int(ttl_s * 1e9), hard)

    async def unpin(self, keys: Sequence[bytes], *, hard: bool = False) -> None:
        """Ends a pin of exactly these keys."""
        await self._pin(keys, 0, hard)

    async def _pin(self, keys: Sequence[bytes], ttl_ns: int, hard: bool) -> None:
        request = messages.PinBlocks(
            party=self._party, block_keys=_joined(keys), ttl_ns=ttl_ns, hard=hard, tenant=self._tenant
        )
        await self._door.ask("pin", request, messages.Done)

    # --- batches --------------------------------------------------------------------------------------------

    async def batch_put(self, values: Mapping[bytes, Any]) -> list[StoreError | None]:
        """As `put`, in one exchange, in the order of `values`. A refusal of all of it is the result of each key."""
        keys, buffers = list(values), [_bytes_of(value) for value in values.values()]
        if not keys:
            return []
        order_id = self._new_order()
        sizes = {len(buffer) for buffer in buffers}
        odd = next(iter(sizes - {self.block_bytes}), self.block_bytes)
        try:
            # A wrong size is refused by the agent, not here, so that it is counted where others are.
            opened = await self._door.open_put(
                order_id, _joined(keys), blocks=len(keys), tenant=self._tenant, block_bytes=odd
            )
            try:
                todo = [i for i in range(len(keys)) if i not in set(opened.present)]
                await self._copy(
                    [(self._slot(opened.slots[i]), buffers[i]) for i in todo],
                    into=[opened.slots[i] for i in todo],
                    order_id=order_id,
                )
                await self._door.commit(order_id, first_block=0, blocks=len(keys))
            finally:
                await self._door.release(order_id)
        except StoreError as problem:
            return [problem] * len(keys)
        return [None] * len(keys)

    async def batch_get_into(
        self, keys: Sequence[bytes], into: Sequence[Any], *, verify: bool = False
    ) -> list[StoreError | None]:
        """As `get_into`, block i into `into[i]`. With `verify` the copies are compared with the checksums of
        the put; blocks from a disk or a network always are."""
        buffers = [_bytes_of(buffer, writable=True) for buffer in into]
        if len(buffers) != len(keys):
            raise ValueError(f"into: {len(buffers)} buffers for {len(keys)} keys")
        sizes = {len(buffer) for buffer in buffers}
        try:
            found = await self._find(keys, next(iter(sizes - {self.block_bytes}), 0))
            try:
                places = found.places.items()
                await self._copy([(buffers[i], self._slot(place.slot)) for i, place in places])
                if not self._door.view.alive():
                    raise AgentUnreachable(f"the store agent of node {self._node_id} died")
                # The answer with the slots, or the copy, may have taken longer than the lease.
                for i, place in places:
                    try:
                        self._door.view.require_unchanged([place.slot], [place.epoch])
                    except LeaseLost as problem:
                        found.problems[i] = problem
            finally:
                await self._give_back(found)
        except StoreError as problem:
            return [problem] * len(keys)
        if verify:
            copied = [i for i in found.places if i not in found.problems]
            # A change of threads costs more than the sum of a small block; and a thread that sums many blocks
            # keeps the interpreter's lock from the caller's other threads for ms.
            each = max(1, INLINE_BYTES // self.block_bytes)
            for some in (copied[first : first + each] for first in range(0, len(copied), each)):
                sums = await asyncio.to_thread(self._sums, [buffers[i] for i in some])
                for i, checksum in zip(some, sums, strict=True):
                    if checksum != found.places[i].checksum:
                        found.problems[i] = BytesCorrupted(f"block {keys[i].hex()} is not what was put")
        return [found.problems.get(i) for i in range(len(keys))]

    async def batch_exists(self, keys: Sequence[bytes]) -> list[bool | StoreError]:
        """As `exists`."""
        request = messages.ProbeBlocks(block_keys=_joined(keys), tenant=self._tenant)
        probed = await self._door.ask("probe", request, messages.Probed)
        here = {*probed.dram, *probed.ssd}
        missing = [i for i in range(len(keys)) if i not in here]
        holders, silent = await self._ask_peers([keys[i] for i in missing])
        there = {missing[at] for at in holders}
        unknown = HolderUnreachable(f"{', '.join(silent)} did not answer")
        return [True if i in here or i in there else unknown if silent else False for i in range(len(keys))]

    async def batch_remove(self, keys: Sequence[bytes]) -> list[bool]:
        """As `remove`."""
        request = messages.RemoveBlocks(block_keys=_joined(keys), tenant=self._tenant)
        removed = await self._door.ask("remove", request, messages.Removed)
        return [i in removed.removed for i in range(len(keys))]

    # --- inside ---------------------------------------------------------------------------------------------

    def _new_order(self) -> str:
        return f"{self._party}-{uuid.uuid4().hex[:16]}"

    def _slot(self, slot: int) -> Array:
        array: Array = self._door.view.blocks[slot].reshape(-1)
        return array

    def _sums(self, blocks: Sequence[Array]) -> list[int]:
        layers = self._door.view.geometry.layers
        return [block_sum(np.array(sums_of(one.data, layers), np.uint64)) for one in blocks]

    async def _copy(
        self, pairs: Sequence[tuple[Array, Array]], *, into: Sequence[int] = (), order_id: str = ""
    ) -> None:
        """(to, from). `into`: the slots that are written, which are reserved for `order_id`."""

        def copy() -> None:
            for i, (to, source) in enumerate(pairs):
                with self._door.view.writing(into[i], order_id) if into else contextlib.nullcontext():
                    np.copyto(to, source)

        if sum(to.nbytes for to, _ in pairs) <= INLINE_BYTES:
            copy()
        else:
            # Not cancelled in the middle: the slots are held until it is done.
            copying = asyncio.ensure_future(asyncio.to_thread(copy))
            try:
                await asyncio.shield(copying)
            except asyncio.CancelledError:
                await asyncio.wait([copying])
                raise

    async def _find(self, keys: Sequence[bytes], block_bytes: int) -> _Found:
        """Leases the blocks here, and brings those that peers have."""
        order_id = self._new_order()
        request = messages.TakeBlocks(
            order_id=order_id,
            party=self._party,
            block_keys=_joined(keys),
            tenant=self._tenant,
            block_bytes=block_bytes,
        )
        found = _Found({}, {}, [order_id])
        self._door.keep(order_id)
        try:
            taken = await self._door.ask("take", request, messages.Taken, long=True)
            told = zip(taken.present, taken.slots, taken.epochs, taken.checksums, strict=True)
            for i, slot, epoch, checksum in told:
                found.places[i] = _FoundAt(slot, epoch, checksum, order_id)
            missing = [i for i in range(len(keys)) if i not in found.places]
            if missing:
                await self._bring(keys, missing, found)
        except BaseException:
            await self._give_back(found)
            raise
        return found

    async def _bring(self, keys: Sequence[bytes], missing: Sequence[int], found: _Found) -> None:
        failed: set[str] = set()
        while missing:
            holders, silent = await self._ask_peers([keys[i] for i in missing], without=failed)
            by_holder: dict[tuple[str, ...], list[int]] = {}
            for at, i in enumerate(missing):
                if at in holders:
                    by_holder.setdefault(tuple(holders[at]), []).append(i)
                elif i in found.problems:  # of the holder that failed
                    continue
                elif silent:
                    found.problems[i] = HolderUnreachable(
                        f"block {keys[i].hex()}: {', '.join(silent)} did not answer"
                    )
                else:
                    found.problems[i] = BlockMissing(f"block {keys[i].hex()} is on no node that was asked")
            # Peers that answered too late to be named as replicas may have what the named ones could not give.
            missing = []
            for nodes, wanted in by_holder.items():
                try:
                    await self._fetch(keys, wanted, nodes, found)
                except (TransferError, BlockMissing) as problem:
                    found.problems.update(dict.fromkeys(wanted, problem))
                    failed.update(nodes)
                    missing += wanted
                except StoreError as problem:
                    found.problems.update(dict.fromkeys(wanted, problem))

    async def _fetch(
        self, keys: Sequence[bytes], wanted: Sequence[int], nodes: Sequence[str], found: _Found
    ) -> None:
        """From the first of `nodes`; the others are its replicas."""
        order_id = self._new_order()
        found.orders.append(order_id)
        holder, *replicas = nodes
        try:
            opened = await self._door.open_put(
                order_id, _joined([keys[i] for i in wanted]), blocks=len(wanted), tenant=self._tenant
            )
            await self._door.fetch(order_id, holder, first_block=0, blocks=len(wanted), replicas=replicas)
        except StoreError:
            await self.let_go(order_id)  # another attempt may want its slots
            raise
        for i, slot, epoch in zip(wanted, opened.slots, opened.epochs, strict=True):
            found.places[i] = _FoundAt(slot, epoch, block_sum(self._door.view.sums[slot]), order_id)
            found.problems.pop(i, None)

    async def _ask_peers(
        self, keys: Sequence[bytes], *, without: Collection[str] = ()
    ) -> tuple[dict[int, list[str]], list[str]]:
        """Holders of the key of that index, and the names of those that did not answer."""
        if not keys:
            return {}, []
        peers = [node_id for node_id in self._peers if node_id not in without]
        unheard: list[str] = []
        if self._anywhere:
            nodes = await located(self._bus, _joined(keys), {self._node_id, *without})
            if nodes is None:
                unheard = ["the conductors"]
            else:
                peers = list(dict.fromkeys([*nodes, *peers]))
        if not peers:
            return {}, unheard
        # They are asked all the same: a conductor knows no tenants, and the newest block not yet.
        holders, silent = await find_holders(self._bus, peers, _joined(keys), self._tenant)
        return holders, [*unheard, *silent]

    async def _give_back(self, found: _Found) -> None:
        for order_id in found.orders:
            await self.let_go(order_id)

    async def let_go(self, order_id: str) -> None:
        """Ends the holds of an order of this client. Idempotent."""
        self._held.discard(order_id)
        await self._door.release(order_id)


def _raise(problem: StoreError | None) -> None:
    if problem is not None:
        raise problem


def _joined(keys: Sequence[bytes]) -> bytes:
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"key: {key!r} is not {KEY_BYTES} bytes long; key_of makes one of a name")
    return b"".join(keys)


def _bytes_of(buffer: Any, *, writable: bool = False) -> Array:
    """u8 `[bytes]` that shows the buffer's own memory. Raises TypeError; WrongSize for one that is not contiguous."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise TypeError(
                f"a tensor on {buffer.device} has no memory that can be mapped here: copy it to the CPU"
            )
        if not buffer.is_contiguous():
            raise WrongSize("the tensor is not contiguous")
        array: Array = buffer.detach().view(-1).view(torch.uint8).numpy()
        return array
    try:
        shown = memoryview(buffer).cast("B")
    except TypeError as problem:
        raise TypeError(f"{type(buffer).__name__} shows no contiguous memory: {problem}") from None
    if writable and shown.readonly:
        raise TypeError(f"{type(buffer).__name__} cannot be written to")
    return np.frombuffer(shown, np.uint8)
