"""Workers of a make-believe cluster: the real machines, and shells that make up what surrounds them.

Whatever a shell does for a machine takes time and can fail in every way that the machine has an event for. After
each event the machine's invariants are checked. Engines compute marks and tokens that the world knows beforehand
(`texts`), so a wrong slot, a block given twice or a token of another place is found where it happens.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import (
    DecodeStarted,
    Event,
    KvMoved,
    KvMoveRefused,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.roles import ELASTIC_ROLES, WorkerRole
from halfmoon.schemas.tokens import TakeReply, TakeRequest
from halfmoon.store.errors import OrderUnknown, StoreError
from halfmoon.store.pool.slots import Owner
from halfmoon.workers import machines
from tests.chaos.network import Process
from tests.chaos.stores import Memory, StoreAgent
from tests.conductor.conductor_scripts import MS, S

if TYPE_CHECKING:
    from tests.chaos.world import World

#: As workers and their door to the store have it.
TAKE_TRIES = 4
ASK_NS = 5 * S
ASK_AGAIN_NS = 300 * MS
WATCH_NS = 250 * MS
#: How often a worker that changes its role looks whether it has finished what it has.
FINISHED_NS = 20 * MS
CONTEXT_TOKENS = 2_000


class Worker(Process):
    """What all roles share: joining, heartbeats, tokens from frontends, the door to the node's store agent."""

    #: Of an attention worker's cache.
    first_kv_head = kv_heads = 0

    def __init__(self, world: World, process_id: str, store: StoreAgent) -> None:
        super().__init__(world.net, process_id)
        self.world, self.store = world, store
        #: The memory of the store agent that is mapped; an agent that restarts has another.
        self.view: Memory | None = None
        store.worker = self
        #: The same process in the other role that it may have, and the role that it was started for; one of both lives.
        self.other: Worker | None = None
        self.home: Worker = self

    # --- roles ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Whatever role it died in, it is started for its own."""
        if not self.net.processes[self.process_id].alive:
            self.home.take_over()

    def take_over(self) -> None:
        """A life in this role begins."""
        if self.other is not None:
            self.life = max(self.life, self.other.life)
        self.net.processes[self.process_id] = self.store.worker = self
        super().start()

    def change_role(self, role: WorkerRole) -> None:
        """As `Worker.stop` does: finish what is open, but not for ever, give back what is held, leave."""
        if self.other is None or role != self.other.role or self.changing:
            return
        self.changing = True
        self.net.counts["roles changed"] += 1
        self.say(WorkerDraining(worker_id=self.process_id, incarnation=self.incarnation))
        self._finish(self.net.now_ns + self.world.role_draw.choice([1 * S, 20 * S]))

    def _finish(self, until_ns: int) -> None:
        if self.orders_held() and self.net.now_ns < until_ns:
            self.later(FINISHED_NS, lambda: self._finish(until_ns))
            return
        self.drop_all()
        self.hear(machines.WorkerStopped)
        self.later(self.net.lag_ns(), self._become_other)

    def _become_other(self) -> None:
        assert self.other is not None
        self.say(self.left(self.incarnation))
        self.die()
        self.other.take_over()

    def obey_none(self, decision: Decision) -> None:
        """A decision that is not for this role: only a process that had another may hear it."""
        assert self.other is not None, decision

    @abstractmethod
    def hear(self, kind: type[Any], **fields: Any) -> None:
        """The machine hears, the shell obeys."""

    # --- a life ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.view = None
        self.changing = False
        #: Orders that hold something in the store and are kept alive there.
        self.kept: dict[str, bool] = {}
        self.joined = False
        #: Answers and cancellations of this life: an order is answered once, a cancelled one not at all.
        self.answered: dict[str, bool] = {}
        self.cancelled: dict[str, bool] = {}
        self.make_machine()
        self.watch()

    @abstractmethod
    def make_machine(self) -> None: ...

    @abstractmethod
    def machine_heartbeat(self) -> WorkerHeartbeat: ...

    def kept_too(self) -> list[str]:
        """Orders that were opened by somebody else, and hold something that is read here."""
        return []

    def memory_lost(self) -> None:
        """The store agent restarted; its new memory is going to be mapped."""

    @abstractmethod
    def open_orders(self) -> list[str]: ...

    def orders_held(self) -> list[str]:
        """Open ones, and those of others for which it has something."""
        return self.open_orders()

    # --- the log --------------------------------------------------------------------------------------------

    def announce(self) -> None:
        world = self.world
        self.say(
            WorkerJoined(
                worker_id=self.process_id,
                role=self.role,  # type: ignore[arg-type]
                node_id=self.store.process_id,
                incarnation=self.incarnation,
                layout=world.layout,
                kv_blocks=self.kv_blocks(),
                context_tokens_max=CONTEXT_TOKENS,
                batch_max=world.batch_max,
                profile=world.profile,
                prompt_tokens_max=self.prompt_tokens_max(),
                lends=self.lends(),
                cache_elsewhere=self.world.attention > 0 and self.role == "decode",
                first_kv_head=self.first_kv_head,
                kv_heads=self.kv_heads,
                may_become=list(ELASTIC_ROLES) if self.other is not None else [],
                token_budget=self.token_budget(),
                iteration_ns=self.iteration_ns(),
                stage_addresses=self.stage_addresses(),
                activation_bytes=2 * len(self.stage_addresses()),
                answers=self.role == "prefill",
            )
        )

    def lends(self) -> bool:
        return False

    def kv_blocks(self) -> int:
        return self.world.kv_blocks

    def prompt_tokens_max(self) -> int:
        return 0

    def token_budget(self) -> int:
        return 0

    def iteration_ns(self) -> int:
        return 0

    def stage_addresses(self) -> list[str]:
        return []

    def beat(self) -> None:
        self.say(self.machine_heartbeat())
        if self.net.reachable(self.store) and self.view is self.store.memory:
            for order_id in [*self.kept, *self.kept_too()]:
                self.keep(order_id)
        self.net.remember_mark(self)
        self.later(1 * S, self.beat)

    def keep(self, order_id: str) -> None:
        with contextlib.suppress(OrderUnknown):  # ended meanwhile, or not yet opened
            self.store.guard.hold(Owner(order_id, self.process_id))

    def left(self, incarnation: str) -> Event:
        return WorkerLeft(worker_id=self.process_id, incarnation=incarnation)

    def under_way(self) -> str:
        orders = self.open_orders()
        if self.changing:
            return f"{self.process_id} changes its role"
        return f"orders at {self.process_id}: {orders}" if orders else ""

    def report(self, event: Any) -> None:
        """To the log; an answer at most once in a life, and none of what was cancelled."""
        if isinstance(event, KvMoved | KvMoveRefused):
            assert event.plan_id not in self.answered, ("I89 a move answered twice", self.process_id, event)
            self.answered[event.plan_id] = True
        elif not isinstance(event, DecodeStarted):
            order_id = event.order_id
            assert order_id not in self.answered, ("I89 answered twice", self.process_id, event)
            assert order_id not in self.cancelled, ("I89 cancelled and answered", self.process_id, event)
            self.answered[order_id] = True
        self.say(event)

    def drop_all(self) -> None:
        self.cancelled.update(dict.fromkeys(self.open_orders(), True))

    # --- the frontend ---------------------------------------------------------------------------------------

    def role_in(self, order_id: str) -> str:
        """Its part in an order: its own, or a mixed worker's."""
        return self.role

    def take(self, action: Any, taken: Callable[[TakeReply | None], None], tries: int = TAKE_TRIES) -> None:
        """The tokens of an order; None when the frontend does not answer."""
        frontend = self.world.frontend(action.frontend_id)
        if self.net.reachable(frontend):
            ask = TakeRequest(
                request_id=action.request_id,
                order_id=action.order_id,
                worker_id=self.process_id,
                role=self.role_in(action.order_id),  # type: ignore[arg-type]
            )
            reply = frontend.take(ask)
            self.later(self.net.lag_ns(), lambda: taken(reply))
        elif tries:
            self.later(self.net.draw.randrange(2 * S), lambda: self.take(action, taken, tries - 1))
        else:
            taken(None)

    # --- the store ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Maps the memory of a store agent that is new, once no order of the old one is open."""
        store = self.store
        if store.alive and self.view is not store.memory and not self.kept and self.net.reachable(store):
            if self.view is not None:
                self.memory_lost()
            self.view = store.memory
        if self.view is not None and not self.joined:
            self.joined = True
            self.announce()
            self.beat()
        self.later(WATCH_NS, self.watch)

    def ask(self, work: Callable[[], None], failed: Callable[[StoreError], None], since_ns: int = 0) -> None:
        """`work` at the store agent, after a while; it answers itself. Raised errors and silence go to `failed`."""
        net, store, life = self.net, self.store, self.store.life
        since_ns = since_ns or net.now_ns

        def arrive() -> None:
            if not store.alive or store.life != life:
                self.later(WATCH_NS, lambda: failed(StoreError("the store agent died")))
            elif net.reachable(store) and self.link.up:
                try:
                    work()
                except StoreError as problem:
                    refused = problem
                    self.later(net.lag_ns(), lambda: failed(refused))
            elif net.now_ns - since_ns > ASK_NS:
                failed(StoreError("the store agent does not answer"))
            else:
                self.later(ASK_AGAIN_NS, lambda: self.ask(work, failed, since_ns))

        self.later(net.lag_ns(), arrive)

    def watched(self, answered: Callable[..., None], died: Callable[[str], None]) -> Callable[..., None]:
        """For a call that takes long: `answered`, after a while, unless the store agent dies before."""
        store, life, mine, over = self.store, self.store.life, self.life, [False]

        def end(call: Callable[[], None]) -> None:
            # The store agent may answer who asked in an earlier life.
            if not over[0] and self.life == mine:
                over[0] = True
                call()

        def look() -> None:
            if store.life != life:
                end(lambda: died("the store agent died"))
            elif not over[0]:
                self.later(WATCH_NS, look)

        self.later(WATCH_NS, look)
        return lambda *values: self.later(self.net.lag_ns(), lambda: end(lambda: answered(*values)))

    def release(self, order_id: str) -> None:
        """Nothing of the order is touched here any more."""
        self.kept.pop(order_id, None)
        self.ask(lambda: self.store.release(Owner(order_id, self.process_id)), lambda _: None)

    def hear_kv(self, author_id: str, message: KvMessage) -> None:
        """KV progress; for decode workers alone."""
        assert self.other is not None, f"{self.process_id} is told of KV: {message}"

    def hear_loaded(self, order_id: str, layer: int) -> None:
        """A layer of a fetch; for prefill workers alone."""
        assert self.other is not None, (
            f"{self.process_id} is told of layer {layer} of {order_id}, which it did not fetch"
        )
