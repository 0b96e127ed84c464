"""A whole cluster of make-believe, drawn from one seed: any number of conductors over one log, a network that
delays, loses and repeats, processes that die, pause and come back, and real books of block slots.

Time is the world's own. What is real: the core (each conductor has one), the pools of block slots, the
messages and their identities. What is played: nats-server (one log, one stream of decisions with a window for
duplicates, links that are cut and read again what they missed), conductors' shells, workers, store agents,
frontends and clients.

`run` plays a phase with faults and one without. Safety is checked all along: every conductor decides the same on the
same event and has the same state; invariants of core and pools hold; a full queue takes nothing new; a client
is told one end. Liveness at the end: every request that a living frontend accepted has ended, and nothing is
held any more.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
from conductor_scripts import LAYOUT, MS, PROFILE, S, keys

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live.shell import target
from halfmoon.schemas.codec import digest as digest_of
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    Decision,
    FailRequest,
    RejectRequest,
    ReleaseOrder,
    SetTimer,
    StartDecode,
    StartPrefill,
)
from halfmoon.schemas.events import (
    BlocksEvicted,
    BlocksStored,
    ClusterConfigured,
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    Event,
    FrontendHeartbeat,
    FrontendJoined,
    FrontendLeft,
    PolicyChanged,
    PrefillFailed,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Stamped,
    StateDigested,
    StoreHeartbeat,
    StoreInventory,
    StoreJoined,
    StoreLeft,
    StoreSuspected,
    TimerFired,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.policy import AdmissionName, Policy, PolicyName
from halfmoon.store.errors import StoreError, StoreFull
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.slots import Owner, SlotState

DIGEST_EVENTS = 100
LEASE_TTL_NS = 10 * S
CALM_S_MAX = 180
Identity = tuple[int, int]


@dataclass
class Link:
    """A process's connection to the server: in order, with a delay; what is sent while it is down is lost."""

    up: bool = True
    #: Nothing overtakes what is on its way.
    busy_until_ns: int = 0
    #: All of the decisions stream before this place has come.
    mark: int = 0


@dataclass
class Process:
    """A worker, a store agent or a frontend, through all its lives."""

    role: str
    process_id: str
    alive: bool = False
    life: int = 0
    link: Link = field(default_factory=Link)
    said_until_ns: int = 0
    done: Identity = (0, -1)
    #: Workers: open orders; a decode worker's answers, finished orders and batch.
    orders: dict[str, Any] = field(default_factory=dict)
    results: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    finished: dict[str, str] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    busy_until_ns: int = 0
    #: Store agents.
    pool: Pool = field(default_factory=lambda: Pool(1))
    gone: set[str] = field(default_factory=set)
    #: Frontends: open requests; of each the newest order (rank, id) and its decode worker.
    open: dict[str, RequestArrived] = field(default_factory=dict)
    newest: dict[str, tuple[tuple[int, int], str, str]] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return f"i{self.life}"


class Conductor:
    """A core and what a live shell does around it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.life, self.paused_until_ns = False, 0, 0
        self.core = Core()
        self.position = self.goal = 0
        self.floor: Identity = (0, -1)
        self.out_until_ns = 0
        self.link = Link()

    def start(self) -> None:
        """From a snapshot or from the start of the log; silent up to the newest decision that is stored."""
        world = self.world
        self.alive, self.life = True, self.life + 1
        checked = world.draw.random() < 0.1
        if world.snapshots and world.draw.random() < 0.7:
            self.core = Core.restore(world.draw.choice(world.snapshots[-3:]), checked=checked)
        else:
            self.core = Core(checked=checked)
        self.position = next((i for i, s in enumerate(world.log) if s.seq > self.core.seq), len(world.log))
        self.floor = world.stream[-1][0] if world.stream else (0, -1)
        self.goal = len(world.log)
        for key, at_ns in self.core.timers.items():
            self.arm(key, at_ns)
        self.soon()

    def soon(self) -> None:
        life = self.life
        self.world.later(self.world.lag_ns(), lambda: self.read() if self.life == life else None)

    def read(self) -> None:
        world = self.world
        if not self.alive or not world.server_up:
            return
        if world.now_ns < self.paused_until_ns:
            world.later(self.paused_until_ns - world.now_ns, self.read)
            return
        while self.position < len(world.log):
            stamped = world.log[self.position]
            self.position += 1
            before = self.core.seq
            decisions = self.core.step(stamped)
            world.decided(self, stamped, decisions)
            for position, decision in enumerate(decisions):
                if isinstance(decision, SetTimer):
                    self.arm(decision.key, decision.at_ns)
                elif (stamped.seq, position) > self.floor:
                    self.publish((stamped.seq, position), decision)
            if stamped.seq // DIGEST_EVENTS > before // DIGEST_EVENTS:
                world.digested(self)

    def publish(self, identity: Identity, decision: Decision) -> None:
        self.out_until_ns = max(self.out_until_ns, self.world.now_ns + self.world.lag_ns())
        self.world.at(self.out_until_ns, lambda life=self.life: self.leave(life, identity, decision))

    def leave(self, life: int, identity: Identity, decision: Decision) -> None:
        """Reaches the server: stored unless it is a repeat, and heard by its receiver in any case."""
        world = self.world
        if self.life != life or not self.alive:
            return
        if not world.server_up:
            world.at(world.server_back_ns + 1, lambda: self.leave(life, identity, decision))
            return
        stored_ns = world.stored_ns.get(identity)
        if stored_ns is None or world.now_ns - stored_ns > world.window_ns:
            world.stored_ns[identity] = world.now_ns
            world.stream.append((identity, decision))
            world.counts["second copies stored"] += stored_ns is not None
        world.deliver(world.processes[target(decision)], identity, decision)

    def arm(self, key: str, at_ns: int) -> None:
        wait_ns = max(0, at_ns - self.world.now_ns) + self.world.lag_ns()
        self.world.later(wait_ns, lambda life=self.life: self.fire(life, key, at_ns))

    def fire(self, life: int, key: str, at_ns: int) -> None:
        world = self.world
        if self.life != life or not self.alive or self.core.timers.get(key) != at_ns:
            return
        if self.position < self.goal or not world.server_up or world.now_ns < self.paused_until_ns:
            world.later(500 * MS, lambda: self.fire(life, key, at_ns))
            return
        world.append(TimerFired(key=key, at_ns=at_ns), f"timer-{key}-{at_ns}")

    def die(self) -> None:
        self.alive = False
        self.life += 1


class World:
    """Call `run`; AssertionError says what is wrong."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.now_ns = draw.randrange(10**18)
        self.faults = True
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        #: The server: one log, decisions with their identities, both with a window for repeats.
        self.server_up, self.server_back_ns = True, 0
        self.log: list[Stamped] = []
        self.appended_ns: dict[str, int] = {}
        self.stream: list[tuple[Identity, Decision]] = []
        self.stored_ns: dict[Identity, int] = {}
        # The configuration, drawn too.
        self.window_ns = draw.choice([1 * S, 120 * S])
        self.in_order = draw.random() < 0.6
        self.lag_ns_max = draw.choice([1 * MS, 20 * MS, 300 * MS])
        self.loss = draw.choice([0.0, 0.01, 0.1])
        self.fault_s = draw.choice([0.3, 1.0, 3.0])
        self.arrival_ns = draw.choice([50 * MS, 200 * MS, 600 * MS])
        self.kv_blocks = draw.choice([60, 400])
        self.batch_max = draw.choice([2, 16])
        self.profile = CostProfile() if draw.random() < 0.2 else PROFILE
        self.policy = self.any_policy()
        slots = draw.choice([45, 200])
        self.slots = slots
        self.conductors = [Conductor(self, f"c{number}") for number in range(draw.randrange(1, 5))]
        self.processes: dict[str, Process] = {}
        for role, count in (("prefill", draw.randrange(1, 4)), ("decode", draw.randrange(1, 4))):
            for number in range(count):
                worker_id = f"{role[0]}{number}"
                self.processes[worker_id] = Process(role, worker_id)
                self.processes[f"n-{worker_id}"] = Process("store", f"n-{worker_id}")
        for number in range(draw.randrange(1, 3)):
            self.processes[f"f{number}"] = Process("frontend", f"f{number}")
        # What must agree, and what happened.
        self.decisions: dict[int, list[Decision]] = {}
        self.digests: dict[int, str] = {}
        self.snapshots: list[bytes] = []
        self.ends: dict[str, str] = {}
        self.accepted = 0
        self.counts: Counter[str] = Counter()

    def any_policy(self) -> Policy:
        draw = self.draw
        return Policy(
            name=draw.choice(get_args(PolicyName)),
            admission=draw.choice(get_args(AdmissionName)),
            seed=draw.randrange(100),
            ttft_slo_ns=draw.choice([1 * S, 30 * S]),
            tbt_slo_ns=draw.choice([20 * MS, 1 * S]),
            queued_max_per_worker=draw.choice([2, 512]),
            placements_max=draw.choice([1, 3, 5]),
            link_bytes_s=draw.choice([1_000_000, 2_000_000_000]),
            lost_after_ns=draw.choice([2 * S, 4 * S]),
        )

    # --- time and the network -------------------------------------------------------------------------------

    def at(self, at_ns: int, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (max(at_ns, self.now_ns), self._count, what))

    def later(self, delay_ns: int, what: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, what)

    def lag_ns(self) -> int:
        return self.draw.randrange(self.lag_ns_max if self.faults else 2 * MS)

    def chance(self, probability: float) -> bool:
        """Of a fault."""
        return self.faults and self.draw.random() < probability

    def advance(self, until_ns: int) -> None:
        while self._waiting and self._waiting[0][0] <= until_ns:
            self.now_ns, _, what = heapq.heappop(self._waiting)
            what()
        self.now_ns = max(self.now_ns, until_ns)

    def append(self, event: Event, message_id: str) -> None:
        """Into the log, unless it was there within the window."""
        if not self.server_up:
            self.at(self.server_back_ns + 1, lambda: self.append(event, message_id))
            return
        before_ns = self.appended_ns.get(message_id)
        if before_ns is not None and self.now_ns - before_ns <= self.window_ns:
            return
        self.appended_ns[message_id] = self.now_ns
        last = self.log[-1].seq if self.log else 0
        # Some messages are no event.
        self.log.append(Stamped(seq=last + (2 if self.chance(0.01) else 1), at_ns=self.now_ns, event=event))
        self.counts[type(event).__name__] += 1
        for conductor in self.conductors:
            conductor.soon()

    def say(self, process: Process, event: Event, delay_ns: int = 0) -> None:
        """A process's fact on its way to the log; lost with the process, repeated, delayed, overtaken by
        others.

        Only its joining is overtaken by nothing of its own, and comes while it lives: that much order is
        promised.
        """
        self._count += 1
        life, message_id = process.life, f"{process.process_id}-{self._count}"
        leaves_ns = self.now_ns + delay_ns + self.lag_ns()
        leaves_ns = max(leaves_ns, process.said_until_ns + 1)
        joins = isinstance(event, WorkerJoined | StoreJoined | FrontendJoined)
        if self.in_order or joins:
            process.said_until_ns = leaves_ns
        lost_with_it = joins or self.draw.random() < 0.5

        def leave() -> None:
            if process.life == life or not lost_with_it:
                self.append(event, message_id)

        self.at(leaves_ns, leave)
        if self.chance(0.05):
            self.at(leaves_ns + self.draw.randrange(3 * S), leave)

    def deliver(self, process: Process, identity: Identity, decision: Decision) -> None:
        link, life = process.link, process.life
        if not link.up:
            self.counts["decisions missed"] += 1
            return
        link.busy_until_ns = max(link.busy_until_ns + 1, self.now_ns + self.lag_ns())
        self.at(link.busy_until_ns, lambda: self.hear(process, life, identity, decision))

    def hear(self, process: Process, life: int, identity: Identity, decision: Decision) -> None:
        if process.alive and process.life == life and process.link.up and identity > process.done:
            process.done = identity
            self.obey(process, decision)

    def cut(self, process: Process, for_ns: int) -> None:
        """Its link is down for a while; then it reads what the stream has for it since its last mark."""
        link, life = process.link, process.life
        if not link.up:
            return
        link.up = False

        def back() -> None:
            link.up = True
            if process.life == life and process.alive:
                for identity, decision in self.stream[link.mark :]:
                    if target(decision) == process.process_id:
                        self.hear(process, life, identity, decision)

        self.later(for_ns, back)

    def remember_mark(self, process: Process) -> None:
        """What is stored now has come once everything on its way has."""
        link, life, place = process.link, process.life, len(self.stream)

        def set_mark() -> None:
            if link.up and process.life == life:
                link.mark = max(link.mark, place)

        if link.up:
            self.at(max(link.busy_until_ns, self.now_ns + self.lag_ns_max) + 1, set_mark)

    def reachable(self, process: Process) -> bool:
        return process.alive and process.link.up and self.server_up and not self.chance(self.loss)

    # --- what must agree ------------------------------------------------------------------------------------

    def decided(self, conductor: Conductor, stamped: Stamped, decisions: list[Decision]) -> None:
        known = self.decisions.setdefault(stamped.seq, decisions)
        assert known == decisions, ("decided differently", conductor.name, stamped, known, decisions)
        if known is not decisions:
            return
        self.counts["decisions"] += len(decisions)
        for decision in decisions:
            new = isinstance(stamped.event, RequestArrived) and not stamped.event.answer_lost
            if new and isinstance(decision, StartPrefill):
                orders = conductor.core.state.workers[decision.worker_id].orders
                limit = conductor.core.state.policy.queued_max_per_worker
                assert len(orders) <= limit, ("more than the queue takes", decision, len(orders))

    def digested(self, conductor: Conductor) -> None:
        seq, snapshot = conductor.core.seq, conductor.core.snapshot()
        digest = digest_of(snapshot)
        assert self.digests.setdefault(seq, digest) == digest, ("another state", conductor.name, seq)
        event = StateDigested(
            conductor_id=conductor.name, incarnation="i", code_version="c", at_seq=seq, digest=digest
        )
        if conductor.position >= conductor.goal:
            self.append(event, f"digest-{conductor.name}-{seq}")
        # As the shell does: only when all decisions up to there are stored.
        if all((s, p) in self.stored_ns for s, p in self._published(seq)):
            self.snapshots.append(snapshot)

    def _published(self, up_to: int) -> list[Identity]:
        """Identities of the decisions up to there that are published at all, of the last few events."""
        return [
            (seq, position)
            for seq in range(max(1, up_to - 4 * DIGEST_EVENTS), up_to + 1)
            for position, decision in enumerate(self.decisions.get(seq, []))
            if not isinstance(decision, SetTimer)
        ]

    def end(self, frontend: Process, request_id: str, how: str) -> None:
        if frontend.open.pop(request_id, None) is None:
            return
        frontend.newest.pop(request_id, None)
        assert request_id not in self.ends, ("a second end", request_id, self.ends[request_id], how)
        self.ends[request_id] = how
        self.counts[f"end: {how}"] += 1

    # --- processes ------------------------------------------------------------------------------------------

    def start(self, process: Process) -> None:
        process.alive, process.life = True, process.life + 1
        process.link = Link(mark=len(self.stream))
        process.done = (0, -1)
        process.orders, process.finished, process.batch = {}, {}, {}
        process.results, process.taken = set(), set()
        process.open, process.newest, process.busy_until_ns = {}, {}, 0
        process.pool, process.gone = Pool(self.slots), set()
        self.announce(process)
        self.beat(process, process.life)

    def announce(self, process: Process) -> None:
        process_id, incarnation = process.process_id, process.incarnation
        match process.role:
            case "store":
                self.say(
                    process,
                    StoreJoined(
                        node_id=process_id,
                        incarnation=incarnation,
                        host="h",
                        layout=LAYOUT,
                        slots=self.slots,
                        endpoints=[],
                    ),
                )
                held = b"".join(process.pool.keys())
                self.say(
                    process,
                    StoreInventory(
                        node_id=process_id, incarnation=incarnation, part=0, parts=1, block_keys=held
                    ),
                )
            case "frontend":
                self.say(process, FrontendJoined(frontend_id=process_id, incarnation=incarnation))
                for request in process.open.values():
                    self.say(process, request)
            case role:
                self.say(
                    process,
                    WorkerJoined(
                        worker_id=process_id,
                        role=role,  # type: ignore[arg-type]
                        node_id=f"n-{process_id}",
                        incarnation=incarnation,
                        layout=LAYOUT,
                        kv_blocks=self.kv_blocks,
                        context_tokens_max=20_000,
                        batch_max=self.batch_max,
                        profile=self.profile,
                    ),
                )

    def beat(self, process: Process, life: int) -> None:
        if not process.alive or process.life != life:
            return
        process_id, incarnation = process.process_id, process.incarnation
        match process.role:
            case "store":
                process.pool.sweep(self.now_ns)
                self.changes(process)
                process.pool.check()
                self.say(process, StoreHeartbeat(node_id=process_id, incarnation=incarnation))
            case "frontend":
                self.say(process, FrontendHeartbeat(frontend_id=process_id, incarnation=incarnation))
                for request_id in list(process.open):
                    self.poll(process, request_id)
            case _:
                steps = self.draw.randrange(3)
                self.say(
                    process,
                    WorkerHeartbeat(
                        worker_id=process_id,
                        incarnation=incarnation,
                        steps=steps,
                        step_ns=steps * self.draw.randrange(50 * MS),
                        step_sequences=len(process.batch),
                        step_context_tokens=1_000 * len(process.batch),
                        orders=list(process.orders),
                        lacking=[
                            o for o in process.orders if process.role == "decode" and o not in process.results
                        ],
                        obeyed_seq=process.done[0],
                    ),
                )
        self.remember_mark(process)
        self.later(1 * S, lambda: self.beat(process, life))

    def die(self, process: Process, noticed: bool) -> None:
        process.alive, process.life = False, process.life + 1
        self.counts[f"killed: {process.role}"] += 1
        process_id, incarnation = process.process_id, self.draw.choice([f"i{process.life - 1}", ""])
        if noticed:
            left: Event
            match process.role:
                case "store":
                    left = StoreLeft(node_id=process_id, incarnation=incarnation)
                case "frontend":
                    left = FrontendLeft(frontend_id=process_id, incarnation=incarnation)
                case _:
                    left = WorkerLeft(worker_id=process_id, incarnation=incarnation)
            self._count += 1
            self.append(left, f"up-{self._count}")
        for request_id in list(process.open):
            self.end(process, request_id, "frontend lost")
        self.later(self.draw.randrange(8 * S), lambda: None if process.alive else self.start(process))

    # --- store agents ---------------------------------------------------------------------------------------

    def changes(self, store: Process) -> None:
        """Tells the log what became readable and what was evicted."""
        for change in store.pool.take_changes():
            kind: Any = BlocksStored if change.kind == "stored" else BlocksEvicted
            self.say(
                store, kind(node_id=store.process_id, incarnation=store.incarnation, block_keys=change.key)
            )

    def put(self, node_id: str, owner: Owner, request: RequestArrived) -> str:
        """Reserves slots for a prompt: "" when done, else what is in the way."""
        store = self.processes[node_id]
        if not self.reachable(store):
            return "away"
        if owner.order_id in store.gone:
            return "gone"
        blocks = LAYOUT.blocks(request.prompt_tokens)
        try:
            hold = store.pool.open_put(
                owner, split_keys(request.block_keys), blocks, expires_ns=self.now_ns + LEASE_TTL_NS
            )
        except StoreFull:
            self.counts["store full"] += 1
            return "full"
        except StoreError:
            return "gone"
        finally:
            self.changes(store)
        for number in hold.slots:
            slot = store.pool.slots[number]
            assert slot.state is not SlotState.RESERVED or slot.holders == 1, (
                "a block leased twice",
                node_id,
                number,
            )
        return ""

    def commit(self, node_id: str, life: int, owner: Owner) -> bool:
        store = self.processes[node_id]
        if not store.alive or store.life != life or owner not in store.pool.holds:
            return False
        hold = store.pool.hold(owner)
        store.pool.commit(owner, {i: 1 for i, key in enumerate(hold.keys) if key})
        self.changes(store)
        return True

    def release(self, node_id: str, owner: Owner) -> None:
        store = self.processes[node_id]
        if self.reachable(store):
            store.pool.release(owner)

    # --- decisions ------------------------------------------------------------------------------------------

    def obey(self, process: Process, decision: Decision) -> None:
        match decision:
            case StartPrefill() | StartDecode():
                if decision.order_id not in process.orders and decision.order_id not in process.finished:
                    process.orders[decision.order_id] = decision
                    self.take(process, process.life, decision, 4)
            case CancelOrder():
                self.drop(process, decision.order_id)
            case ReleaseOrder():
                process.gone.add(decision.order_id)
                for owner in process.pool.owners(decision.order_id):
                    process.pool.release(owner)
            case AnnounceYourself():
                if process.role in ("prefill", "decode"):
                    for order_id in list(process.orders):
                        self.drop(process, order_id)
                self.announce(process)
            case RejectRequest() | FailRequest():
                self.end(process, decision.request_id, type(decision).__name__)
            case _:
                raise AssertionError(decision)

    def drop(self, process: Process, order_id: str) -> None:
        if process.orders.pop(order_id, None) is not None:
            process.batch.pop(order_id, None)
            self.release(f"n-{process.process_id}", Owner(order_id, process.process_id))
            self.load_waiting(process)

    def has(self, process: Process, life: int, order: Any) -> bool:
        return process.alive and process.life == life and process.orders.get(order.order_id) is order

    def take(self, worker: Process, life: int, order: StartPrefill | StartDecode, tries: int) -> None:
        """The tokens, from the frontend."""
        if not self.has(worker, life, order):
            return
        frontend = self.processes[order.frontend_id]
        if not self.reachable(frontend) and tries:
            self.later(self.draw.randrange(2 * S), lambda: self.take(worker, life, order, tries - 1))
            return
        request = frontend.open.get(order.request_id) if frontend.alive else None
        rank = tuple(int(part) for part in order.order_id.split("-"))
        newest = frontend.newest.get(order.request_id, ((0, 0), "", ""))
        if request is None or rank < newest[0]:
            self.fail(worker, order, retryable=False)
            return
        decode_worker = (
            worker.process_id if worker.role == "decode" else newest[2] if rank == newest[0] else ""
        )
        frontend.newest[order.request_id] = ((rank[0], rank[1]), order.order_id, decode_worker)
        if isinstance(order, StartPrefill):
            self.prefill(worker, life, order, request, self.now_ns)
        else:
            worker.taken.add(order.order_id)
            self.load_waiting(worker)

    def answer(self, order: StartPrefill | StartDecode) -> dict[str, str]:
        return {"order_id": order.order_id, "request_id": order.request_id, "worker_id": order.worker_id}

    def fail(self, worker: Process, order: StartPrefill | StartDecode, *, retryable: bool) -> None:
        self.drop(worker, order.order_id)
        kind: Any = PrefillFailed if isinstance(order, StartPrefill) else DecodeFailed
        self.say(worker, kind(**self.answer(order), reason="x", retryable=retryable))

    # --- prefill --------------------------------------------------------------------------------------------

    def prefill(
        self, worker: Process, life: int, order: StartPrefill, request: RequestArrived, since_ns: int
    ) -> None:
        """Slots on both nodes, with patience; then compute."""
        if not self.has(worker, life, order):
            return
        own, owner = f"n-{worker.process_id}", Owner(order.order_id, worker.process_id)
        far, far_owner = order.decode_node_id, Owner(order.order_id, order.decode_worker_id)
        for node_id, who in ((own, owner), (far, far_owner)):
            if who in self.processes[node_id].pool.holds:
                continue
            problem = self.put(node_id, who, request)
            if problem == "gone" or (
                problem and self.now_ns - since_ns > (10 if problem == "full" else 3) * S
            ):
                self.fail(worker, order, retryable=True)
                return
            if problem:
                self.later(400 * MS, lambda: self.prefill(worker, life, order, request, since_ns))
                return
        lives = (self.processes[own].life, self.processes[far].life)
        took_ns = self.draw.choice([1 * MS, self.draw.randrange(300 * MS)])
        worker.busy_until_ns = max(worker.busy_until_ns, self.now_ns) + took_ns
        self.at(worker.busy_until_ns, lambda: self.computed(worker, life, order, lives, took_ns))

    def computed(
        self, worker: Process, life: int, order: StartPrefill, lives: tuple[int, int], took_ns: int
    ) -> None:
        if not self.has(worker, life, order):
            return
        owner, far_owner = (
            Owner(order.order_id, worker.process_id),
            Owner(order.order_id, order.decode_worker_id),
        )
        if self.chance(0.03):
            self.fail(worker, order, retryable=self.draw.random() < 0.8)
            return
        here = self.commit(f"n-{worker.process_id}", lives[0], owner)
        there = self.commit(order.decode_node_id, lives[1], far_owner)
        if not (here and there):
            self.fail(worker, order, retryable=True)
            return
        fetched = sum(fetch.blocks for fetch in order.fetches)
        cached = min(order.prompt_tokens - 1, order.local_blocks * LAYOUT.block_tokens)
        self.say(
            worker,
            PrefillFinished(
                **self.answer(order),
                queue_ns=0,
                transfer_ns=0,
                compute_ns=took_ns,
                cached_local_tokens=cached,
                fetched_bytes=fetched * LAYOUT.block_bytes,
                fetch_node_id=order.fetches[0].node_id if order.fetches else "",
                fetch_ns=self.draw.randrange(10 * MS),
                pushed_bytes=self.draw.randrange(10**7),
                push_ns=self.draw.randrange(10 * MS),
            ),
        )
        del worker.orders[order.order_id]
        self.release(f"n-{worker.process_id}", owner)
        if self.chance(0.1):
            self.say(
                worker,
                StoreSuspected(node_id=order.decode_node_id, reporter_id=worker.process_id, reason="x"),
            )
        decode = self.processes[order.decode_worker_id]
        if not self.chance(self.loss):  # lost: the conductor's comparison of orders must make up for it
            decode_life = decode.life
            self.later(self.lag_ns(), lambda: self.result(decode, decode_life, order.order_id))

    def result(self, decode: Process, life: int, order_id: str) -> None:
        if decode.alive and decode.life == life:
            decode.results.add(order_id)
            self.load_waiting(decode)

    # --- decode ---------------------------------------------------------------------------------------------

    def load_waiting(self, worker: Process) -> None:
        """Those whose KV is here join the batch while there is room."""
        if worker.role != "decode" or not worker.alive:
            return
        for order in list(worker.orders.values()):
            if order.order_id in worker.batch or order.order_id not in worker.results & worker.taken:
                continue
            blocks = LAYOUT.blocks(order.prompt_tokens + order.max_tokens)
            if blocks > self.kv_blocks:
                self.fail(worker, order, retryable=True)
                continue
            if len(worker.batch) >= self.batch_max or sum(worker.batch.values()) + blocks > self.kv_blocks:
                continue
            if self.chance(0.03):
                self.drop(worker, order.order_id)
                self.say(worker, DecodeRefused(**self.answer(order), reason="x"))
                continue
            store, owner = self.processes[f"n-{worker.process_id}"], Owner(order.order_id, worker.process_id)
            if owner not in store.pool.holds:  # expired, or the agent restarted
                self.fail(worker, order, retryable=True)
                continue
            self.release(store.process_id, owner)
            worker.batch[order.order_id] = blocks
            self.say(worker, DecodeStarted(**self.answer(order)))
            life = worker.life
            self.later(
                self.draw.randrange(2 * S), lambda order=order, life=life: self.decoded(worker, life, order)
            )

    def decoded(self, worker: Process, life: int, order: StartDecode) -> None:
        if not self.has(worker, life, order):
            return
        del worker.orders[order.order_id], worker.batch[order.order_id]
        worker.finished[order.order_id] = order.request_id
        self.say(
            worker,
            RequestFinished(
                **self.answer(order),
                finish_reason=self.draw.choice(["stop", "length"]),
                completion_tokens=self.draw.randrange(1, 200),
                decode_ns=self.draw.randrange(3 * S),
            ),
        )
        frontend, frontend_life = self.processes[order.frontend_id], self.processes[order.frontend_id].life
        if not self.chance(self.loss):
            self.later(self.lag_ns(), lambda: self.tokens(frontend, frontend_life, order))
        self.load_waiting(worker)

    def tokens(self, frontend: Process, life: int, order: StartDecode) -> None:
        newest = frontend.newest.get(order.request_id)
        if frontend.life == life and frontend.link.up and newest is not None and newest[1] == order.order_id:
            self.end(frontend, order.request_id, "finished")

    def poll(self, frontend: Process, request_id: str) -> None:
        """Asks the decode worker for what was lost; one that knows nothing is told to the conductors anew."""
        newest = frontend.newest.get(request_id)
        if newest is None or not newest[2]:
            return
        worker = self.processes[newest[2]]
        if self.reachable(frontend):
            if self.reachable(worker) and worker.finished.get(newest[1]) == request_id:
                self.end(frontend, request_id, "finished")
            elif not worker.alive or newest[1] not in worker.orders:
                self.counts["answers lost"] += 1
                self.say(frontend, msgspec.structs.replace(frontend.open[request_id], answer_lost=True))

    # --- clients and faults ---------------------------------------------------------------------------------

    def arrive(self) -> None:
        draw = self.draw
        frontends = [p for p in self.processes.values() if p.role == "frontend" and p.alive]
        if self.faults and frontends:
            frontend = draw.choice(frontends)
            self.accepted += 1
            tokens = draw.choice([draw.randrange(1, 3_000), 1_000, 25_000 if draw.random() < 0.05 else 10])
            request = RequestArrived(
                request_id=f"r{self.accepted}",
                frontend_id=frontend.process_id,
                prompt_tokens=tokens,
                max_tokens=draw.choice([1, 100, 1_000]),
                block_keys=keys(tokens // LAYOUT.block_tokens, draw.randrange(1, 9)),
                ttft_slo_ns=draw.choice([0, 0, 500 * MS]),
                priority=draw.choice([0, 0, -1_000, 1_000]),
            )
            frontend.open[request.request_id] = request
            self.say(frontend, request)
            if draw.random() < 0.1:
                self.later(draw.randrange(3 * S), lambda: self.cancel(frontend, request.request_id))
        if self.faults:
            self.later(draw.randrange(self.arrival_ns), self.arrive)

    def cancel(self, frontend: Process, request_id: str) -> None:
        if request_id in frontend.open:
            self.end(frontend, request_id, "cancelled")
            self.say(frontend, RequestCancelled(request_id=request_id))

    def fault(self) -> None:
        if not self.faults:
            return
        draw = self.draw
        process = draw.choice(list(self.processes.values()))
        conductor = draw.choice(self.conductors)
        match draw.randrange(10):
            case 0 | 1 if process.alive:
                self.die(process, noticed=draw.random() < 0.5)
            case 2 | 3 if conductor.alive:
                conductor.die()
                self.counts["killed: conductor"] += 1
                self.later(draw.randrange(6 * S), lambda: None if conductor.alive else conductor.start())
            case 4:
                conductor.paused_until_ns = self.now_ns + draw.randrange(10 * S)
                self.counts["paused: conductor"] += 1
            case 5 | 6:
                self.cut(process, draw.randrange(6 * S))
                self.counts["link cut"] += 1
            case 7 if self.server_up:
                self.server_away(draw.randrange(5 * S))
            case 8 if process.role in ("prefill", "decode"):
                draining = draw.random() < 0.5
                self.say(
                    process,
                    WorkerDraining(
                        worker_id=process.process_id, incarnation=process.incarnation, draining=draining
                    ),
                )
                self.later(5 * S, lambda life=process.life: self.undrain(process, life))
            case 9 if draw.random() < 0.3:
                self._count += 1
                self.append(PolicyChanged(policy=self.any_policy()), f"operator-{self._count}")
        self.later(int(draw.random() * self.fault_s * S), self.fault)

    def undrain(self, process: Process, life: int) -> None:
        if process.alive and process.life == life:
            self.say(
                process,
                WorkerDraining(worker_id=process.process_id, incarnation=process.incarnation, draining=False),
            )

    def server_away(self, for_ns: int) -> None:
        """Everybody is cut off; what is said meanwhile comes later."""
        self.server_up, self.server_back_ns = False, self.now_ns + for_ns
        self.counts["server away"] += 1
        for process in self.processes.values():
            self.cut(process, for_ns)

        def back() -> None:
            self.server_up = True
            for conductor in self.conductors:
                conductor.soon()

        self.later(for_ns, back)

    # --- a run ----------------------------------------------------------------------------------------------

    def run(self, chaos_s: int = 12) -> None:
        self.append(ClusterConfigured(code_version="c", log_version=2, policy=self.policy), "begin")
        for conductor in self.conductors:
            conductor.start()
        for process in self.processes.values():
            self.later(
                self.draw.randrange(S), lambda process=process: None if process.alive else self.start(process)
            )
        self.later(0, self.arrive)
        self.later(self.draw.randrange(2 * S), self.fault)
        self.advance(self.now_ns + chaos_s * S)
        self.faults = False
        for process in self.processes.values():
            if not process.alive:
                self.start(process)
        for conductor in self.conductors:
            if not conductor.alive:
                conductor.start()
        for _ in range(CALM_S_MAX):
            self.advance(self.now_ns + S)
            if self.at_rest() == "":
                break
        assert self.at_rest() == "", self.at_rest()
        self.alike()

    def at_rest(self) -> str:
        """What is still under way; "" when every request has ended and nothing is held."""
        if not self.server_up:
            return "the server is away"
        behind = [conductor.name for conductor in self.conductors if conductor.position < len(self.log)]
        if behind:
            return f"behind: {behind}"
        for process in self.processes.values():
            if process.open:
                return f"open at {process.process_id}: {sorted(process.open)}"
            if process.orders:
                return f"orders at {process.process_id}: {sorted(process.orders)}"
            if process.role == "store" and process.pool.holds:
                return f"held at {process.process_id}: {list(process.pool.holds)}"
        state = self.conductors[0].core.state
        if state.requests or state.orders or state.parked or state.leaving:
            return f"known to {self.conductors[0].name}: {sorted(state.requests)} {sorted(state.orders)}"
        return ""

    def alike(self) -> None:
        """All conductors have read the same, and hold the same."""
        while any(conductor.position < len(self.log) for conductor in self.conductors):
            for conductor in self.conductors:
                conductor.paused_until_ns = 0
                conductor.read()
        digests = {conductor.core.digest() for conductor in self.conductors}
        assert len(digests) == 1, ("another state at the end", digests)
        assert len(self.ends) == self.accepted, (len(self.ends), self.accepted)
        for worker in self.conductors[0].core.state.workers.values():
            assert (worker.orders, worker.reserved_ns, worker.reserved_blocks) == ({}, 0, 0), worker
        for process in self.processes.values():
            if process.role == "store":
                process.pool.check()
