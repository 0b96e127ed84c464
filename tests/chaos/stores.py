"""Store agents of a make-believe cluster: real pools with their guard, and memory that holds marks instead of bytes.

What is played are the verbs, pushes and fetches of `halfmoon.store.agent`, step by step, so that anything can
happen between two of them. Memory is checked where it is committed: a block that others may read holds its bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halfmoon.schemas.decisions import AnnounceYourself, Decision, ReleaseOrder, ReplicateBlocks
from halfmoon.schemas.events import (
    BlocksEvicted,
    BlocksStored,
    Event,
    StoreHeartbeat,
    StoreInventory,
    StoreJoined,
    StoreLeft,
    StoreSuspected,
)
from halfmoon.schemas.kv import KvReady, TransferFailed, TransferOpened
from halfmoon.store.errors import NotAttached, OrderUnknown, StoreError
from halfmoon.store.pool.guard import WORKER, PoolGuard, peer_writer
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.slots import Change, Hold, Owner, SlotState
from tests.chaos.network import Process
from tests.chaos.texts import LAYERS
from tests.conductor.conductor_scripts import MS, S

if TYPE_CHECKING:
    from tests.chaos.workers import Worker
    from tests.chaos.world import World

#: Longer than any link is cut, so that keeping alive what is in use is possible.
LEASE_NS = 20 * S
GRACE_NS = 10 * S
TRANSFER_NS_MAX = 3 * S
Memory = list[list[bytes]]


class TimedGuard(PoolGuard):
    """A guard whose clock is the world's."""

    def __init__(self, agent: StoreAgent, pool: Pool) -> None:
        super().__init__(pool, ttl_ns=LEASE_NS, grace_ns=GRACE_NS, announce=agent.changed)
        self._net = agent.net

    def _expiry(self) -> int:
        return self._net.now_ns + LEASE_NS

    def _writer_deadline(self) -> int:
        return self._net.now_ns + LEASE_NS + GRACE_NS

    def sweep(self) -> list[Owner]:
        now_ns = self._net.now_ns
        self._gone = {owner: until_ns for owner, until_ns in self._gone.items() if until_ns > now_ns}
        return self._pool.sweep(now_ns)


class StoreAgent(Process):
    """Beside one worker."""

    role = "store"

    def __init__(self, world: World, process_id: str) -> None:
        super().__init__(world.net, process_id)
        self.world = world
        self.worker: Worker
        self.pool = Pool(1)

    def reset(self) -> None:
        self.pool = Pool(self.world.slots)
        self.guard = TimedGuard(self, self.pool)
        #: `memory[slot][layer]`: the mark of the block whose bytes are there.
        self.memory: Memory = [[b""] * LAYERS for _ in range(self.world.slots)]
        #: What is under way for an owner; `end(reason)` stops it.
        self.pushes: dict[Owner, Push] = {}
        self.fetches: dict[Owner, Fetching] = {}
        self.announce()
        self.beat()

    # --- the log --------------------------------------------------------------------------------------------

    def announce(self) -> None:
        node_id, incarnation = self.process_id, self.incarnation
        self.say(
            StoreJoined(
                node_id=node_id,
                incarnation=incarnation,
                host="h",
                layout=self.world.layout,
                slots=self.world.slots,
                endpoints=[],
            )
        )
        held = b"".join(self.pool.keys())
        self.say(StoreInventory(node_id=node_id, incarnation=incarnation, part=0, parts=1, block_keys=held))

    def beat(self) -> None:
        for owner in self.guard.sweep():
            self.end_work(owner, "its lease expired")
        self.changed(self.pool.take_changes())
        self.pool.check()
        self.say(StoreHeartbeat(node_id=self.process_id, incarnation=self.incarnation))
        self.net.remember_mark(self)
        self.later(1 * S, self.beat)

    def changed(self, changes: list[Change]) -> None:
        """Tells the log what became readable and what was evicted."""
        for word, some in itertools.groupby(changes, lambda change: change.kind):
            kind: Any = BlocksStored if word == "stored" else BlocksEvicted
            keys = b"".join(change.key for change in some)
            self.say(kind(node_id=self.process_id, incarnation=self.incarnation, block_keys=keys))

    def obey(self, decision: Decision) -> None:
        match decision:
            case ReleaseOrder():
                owners = [*self.pushes, *self.fetches, *self.guard.owners(decision.order_id)]
                for owner in dict.fromkeys(owners):
                    if owner.order_id == decision.order_id:
                        self.end_work(owner, "released by the conductor")
                self.guard.release_order(decision.order_id)
            case AnnounceYourself():
                self.announce()
            case ReplicateBlocks():
                self.net.counts["copies not made"] += 1
            case _:
                raise AssertionError(decision)

    def left(self, incarnation: str) -> Event:
        return StoreLeft(node_id=self.process_id, incarnation=incarnation)

    def under_way(self) -> str:
        return f"held at {self.process_id}: {list(self.pool.holds)}" if self.pool.holds else ""

    # --- verbs of the own worker; each may raise StoreError -------------------------------------------------

    def open_put(self, owner: Owner, keys: list[bytes], blocks: int, heads: list[bytes]) -> Hold:
        """Leases what is here, reserves slots for the rest, which the worker may write."""
        self.require_attached(self.worker)
        hold = self.guard.open_put(owner, keys, blocks, writer=WORKER, heads=heads)
        self.check_reserved(hold)
        return hold

    def require_attached(self, worker: Worker) -> None:
        """The worker has mapped the memory of this life."""
        if worker.view is not self.memory:
            raise NotAttached(f"{worker.process_id} has not mapped the memory of {self.process_id}")

    def check_reserved(self, hold: Hold) -> None:
        for number in hold.slots:
            slot = self.pool.slots[number]
            reserved_twice = slot.state is SlotState.RESERVED and slot.holders > 1
            assert not reserved_twice, ("I98 a block leased twice", self.process_id, number)

    def commit(self, owner: Owner, first: int, blocks: int) -> None:
        """Others may read these blocks from now on."""
        slots = self.guard.to_commit(owner, first, blocks)
        hold = self.pool.hold(owner)
        for index, slot in slots.items():
            wanted = [hold.keys[index]] * LAYERS
            have = self.memory[slot]
            assert have == wanted, ("I99 committed without its bytes", owner, index, have, wanted)
        self.guard.commit(owner, dict.fromkeys(slots, 1))

    def open_push(self, owner: Owner, request_id: str, target: StoreAgent, decode: Worker) -> None:
        """Room at the decode node."""
        if owner in self.pushes:
            raise StoreError(f"order {owner.order_id} pushes already")
        hold = self.guard.hold(owner)
        if not self.net.reachable(target):
            raise StoreError(f"{target.process_id} is out of reach")
        target.require_attached(decode)
        writer = Owner(owner.order_id, peer_writer(self.process_id))
        reserved = target.guard.open_put(
            writer, [key for key in hold.keys if key], len(hold.slots), writer=writer.party
        )
        target.check_reserved(reserved)
        try:
            target.guard.share(writer, Owner(owner.order_id, decode.process_id))
        except StoreError:
            target.guard.release(writer, writers=[writer.party])
            raise
        self.pushes[owner] = Push(self, owner, request_id, hold, target, decode, reserved)

    def push(self, owner: Owner, layers: range, first: int, blocks: int) -> None:
        """A layer of these blocks is readable here: move it on."""
        running = self.pushes.get(owner)
        if running is None:
            return
        try:
            self.guard.hold(owner)
        except OrderUnknown as problem:
            running.fail(str(problem))
        else:
            running.push(layers, first, blocks)

    def release(self, owner: Owner) -> None:
        """By the worker itself: it will not touch the slots any more."""
        self.end_work(owner, "released")
        self.guard.release(owner, writers=[WORKER], remember=True)

    def end_work(self, owner: Owner, reason: str) -> None:
        if (push := self.pushes.pop(owner, None)) is not None:
            push.end(reason)
        if (fetching := self.fetches.pop(owner, None)) is not None:
            fetching.end(reason)


class Push:
    """An order's KV on its way to the decode node. `hold` is here, `reserved` there."""

    def __init__(
        self,
        agent: StoreAgent,
        owner: Owner,
        request_id: str,
        hold: Hold,
        target: StoreAgent,
        decode: Worker,
        reserved: Hold,
    ) -> None:
        self.agent, self.owner, self.hold, self.reserved = agent, owner, hold, reserved
        self.target, self.target_life, self.decode = target, target.life, decode
        self.writer = Owner(owner.order_id, peer_writer(agent.process_id))
        self.ids = {"order_id": owner.order_id, "request_id": request_id}
        self.failure = ""
        self.finished = False
        self.done = 0
        self.closing: Callable[[str], None] | None = None
        self.expected = -1
        self._queue: list[tuple[range, int, int]] = []
        self._moving = False
        self._tell(
            TransferOpened(
                **self.ids,
                slots=list(reserved.slots),
                epochs=list(reserved.epochs),
                present=list(reserved.present),
            )
        )
        agent.later(LEASE_NS // 4, self._renew)

    def _tell(self, message: TransferOpened | KvReady | TransferFailed) -> None:
        net, decode, node_id = self.agent.net, self.decode, self.agent.process_id
        net.send(decode, lambda: decode.hear_kv(node_id, message), repeats=True)

    def push(self, layers: range, first: int, blocks: int) -> None:
        if not self.failure and not self.finished:
            self._queue.append((layers, first, blocks))
            if not self._moving:
                self._moving = True
                self.agent.later(self.agent.net.draw.randrange(30 * MS), self._move)

    def _move(self) -> None:
        """Everything that has queued up meanwhile."""
        self._moving = False
        if self.failure or self.finished:
            return
        slots = self.reserved.slots
        if not self._target_is_there():
            self.fail("the decode node is out of reach", suspect=True)
            return
        written = [block for _, first, blocks in self._queue for block in range(first, first + blocks)]
        reserved = [slots[block] for block in dict.fromkeys(written) if block not in self.reserved.present]
        reason = self.target.pool.may_write(self.writer, reserved)
        if reason:
            self.fail(reason)
            return
        for layers, first, blocks in self._queue:
            for block in range(first, first + blocks):
                if block not in self.reserved.present:
                    for layer in layers:
                        mark = self.agent.memory[self.hold.slots[block]][layer]
                        self.target.memory[slots[block]][layer] = mark
            ready = KvReady(
                **self.ids, layer=layers.start, layers=len(layers), first_block=first, blocks=blocks
            )
            self._tell(ready)
            self.done += 1
        self._queue = []
        self._close_if_done()

    def _target_is_there(self) -> bool:
        return self.target.life == self.target_life and self.agent.net.reachable(self.target)

    def _renew(self) -> None:
        if self.failure or self.finished:
            return
        if self._target_is_there():
            try:
                self.target.guard.renew(self.writer, self.writer.party)
                self.target.guard.hold(Owner(self.owner.order_id, self.decode.process_id))
            except OrderUnknown as problem:
                if self.writer not in self.target.pool.holds:
                    self.fail(str(problem))
                    return
        self.agent.later(LEASE_NS // 4, self._renew)

    def close(self, pushes: int, answer: Callable[[str], None]) -> None:
        """`answer` gets "" when `pushes` of them are readable and committed there, else what went wrong."""
        self.closing, self.expected = answer, pushes
        if self.failure:
            self._answer(self.failure)
            return
        self._close_if_done()
        self.agent.later(TRANSFER_NS_MAX, lambda: self.fail(f"{self.done} of {pushes} pushes done"))

    def _close_if_done(self) -> None:
        if self.closing is None or self.done < self.expected or self.finished:
            return
        if not self._target_is_there():
            self.fail("the decode node is out of reach", suspect=True)
            return
        guard = self.target.guard
        guard.close_writer(self.writer, self.writer.party)
        try:
            hold = guard.hold(self.writer)
            self.target.commit(self.writer, 0, len(hold.slots))
        except OrderUnknown as problem:
            self.fail(str(problem))
            return
        guard.release(self.writer)
        self.finished = True
        self._answer("")

    def _answer(self, problem: str) -> None:
        if self.closing is not None:
            answer, self.closing = self.closing, None
            answer(problem)

    def fail(self, problem: str, *, suspect: bool = False) -> None:
        """No more will come."""
        if self.failure or self.finished:
            return
        self.failure = problem
        self.agent.net.counts["pushes failed"] += 1
        if suspect:
            self.agent.say(
                StoreSuspected(
                    node_id=self.target.process_id, reporter_id=self.agent.process_id, reason=problem
                )
            )
        self.agent.later(self.agent.net.lag_ns(), lambda: self.end(problem))
        self._answer(problem)

    def end(self, reason: str) -> None:
        """Stops moving and clears up at the target, unless it was closed."""
        self.failure = self.failure or reason
        self._answer(self.failure)
        if self.finished:
            return
        self.finished = True
        self._tell(TransferFailed(**self.ids, reason=self.failure))
        if self._target_is_there():
            self.target.guard.release(self.writer, writers=[self.writer.party], remember=True)


class Fetching:
    """Blocks of an order on their way from another node, layer by layer. `answer(source, problem)` ends it."""

    def __init__(
        self,
        agent: StoreAgent,
        owner: Owner,
        first: int,
        blocks: int,
        holders: list[StoreAgent],
        answer: Callable[[str, str], None],
    ) -> None:
        self.agent, self.owner, self.first, self.blocks = agent, owner, first, blocks
        self.holders, self.answer = holders, answer
        self.hold = agent.guard.hold(owner)
        self.ended = False
        self.source: StoreAgent | None = None
        self.leased: Hold | None = None
        self.source_life = 0
        agent.fetches[owner] = self
        agent.later(agent.net.lag_ns(), self._try_next)

    def _party(self) -> Owner:
        return Owner(self.owner.order_id, f"{self.agent.process_id}-reads")

    def _try_next(self) -> None:
        if self.ended:
            return
        if not self.holders:
            self.end("nobody gives the blocks")
            return
        source = self.holders.pop(0)
        keys = self.hold.keys[: self.first + self.blocks]
        try:
            if not self.agent.net.reachable(source):
                raise StoreError(f"{source.process_id} is out of reach")
            self.leased, _ = source.guard.lease(self._party(), keys, self.first)
        except StoreError:
            self.agent.later(self.agent.net.lag_ns(), self._try_next)
            return
        self.source, self.source_life = source, source.life
        self.agent.later(self.agent.net.draw.randrange(50 * MS), lambda: self._layer(0))

    def _layer(self, layer: int) -> None:
        source, leased = self.source, self.leased
        if self.ended or source is None or leased is None:
            return
        net = self.agent.net
        if source.life != self.source_life or not net.reachable(source) or net.chance(0.02):
            self._end_lease()
            self.agent.later(net.lag_ns(), self._try_next)
            return
        for place in range(self.blocks):
            block = self.first + place
            if block not in self.hold.present:
                mark = source.memory[leased.slots[place]][layer]
                assert mark == self.hold.keys[block], ("I99 fetched other bytes", self.owner, block, mark)
                self.agent.memory[self.hold.slots[block]][layer] = mark
        worker, order_id = self.agent.worker, self.owner.order_id
        net.send(worker, lambda: worker.hear_loaded(order_id, layer), repeats=True)
        if layer + 1 < LAYERS:
            self.agent.later(
                net.draw.choice([5 * MS, net.draw.randrange(1 * S)]), lambda: self._layer(layer + 1)
            )
            return
        try:
            self.agent.commit(self.owner, self.first, self.blocks)
        except OrderUnknown as problem:
            self.end(str(problem))
            return
        self.end("")

    def _end_lease(self) -> None:
        source, self.source = self.source, None
        if source is not None and source.life == self.source_life:
            source.guard.release(self._party(), remember=True)

    def end(self, problem: str) -> None:
        """No slot is written afterwards."""
        if self.ended:
            return
        self.ended = True
        self.agent.fetches.pop(self.owner, None)
        source_id = self.source.process_id if self.source is not None else ""
        self._end_lease()
        self.agent.net.counts["fetches failed" if problem else "fetches"] += 1
        self.answer(source_id, problem)
