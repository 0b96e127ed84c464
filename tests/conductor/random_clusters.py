"""A cluster of make-believe around one core: workers that answer, fail, die and return, and forget orders;
events that come late or twice; a conductor that is away for a while.

Everything is drawn from the seed, the configuration too. Run as a program it prints a digest of every
decision and of the state, so that two interpreters can be compared.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent))

from conductor_scripts import LAYOUT, MS, NULL_LAYOUT, PROFILE, S, keys

from halfmoon.conductor.core import admission
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.codec import encode
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    Decision,
    FailRequest,
    Ordered,
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
from halfmoon.schemas.policy import AdmissionName, Policy, PolicyName


class Process:
    """A worker, a store agent or a frontend."""

    def __init__(self, role: str, process_id: str) -> None:
        self.role = role
        self.process_id = process_id
        self.alive = False
        self.incarnation = 0
        #: Workers: orders in hand. Stores: runs of blocks (chain, blocks). Frontends: open requests.
        self.orders: dict[str, Any] = {}
        self.obeyed_seq = 0
        self.chains: dict[int, int] = {}
        self.open: dict[str, RequestArrived] = {}

    @property
    def name(self) -> str:
        return f"i{self.incarnation}"


class Cluster:
    """Call `run`; then `log` and `decided` hold what happened."""

    def __init__(self, seed: int, *, checked: bool = True, forgetful: bool = True) -> None:
        self.forgetful = forgetful
        self.draw = random.Random(seed)
        draw = self.draw
        self.core = Core(checked=checked)
        self.log: list[Stamped] = []
        self.decided: list[list[Decision]] = []
        self.now_ns = draw.randrange(10**18)
        self.faults = True
        self.layout = NULL_LAYOUT if draw.random() < 0.1 else LAYOUT
        self.profile = CostProfile() if draw.random() < 0.2 else PROFILE
        self.policy = self.any_policy()
        self.processes: dict[str, Process] = {}
        for role, count in (("prefill", draw.randrange(1, 5)), ("decode", draw.randrange(1, 5))):
            for number in range(count):
                worker_id = f"{role[0]}{number}"
                self.processes[worker_id] = Process(role, worker_id)
                self.processes[f"n-{worker_id}"] = Process("store", f"n-{worker_id}")
        for number in range(draw.randrange(1, 3)):
            self.processes[f"f{number}"] = Process("frontend", f"f{number}")
        self._waiting: list[tuple[int, int, Any]] = []
        #: Until when no conductor publishes what it decides.
        self._away_until_ns = 0
        self._count = 0
        self._requests = 0
        self._prefilled: dict[str, bool] = {}
        #: What frontends were told of each request, and which orders were given.
        self.told: dict[str, list[str]] = {}
        self.order_ids: dict[str, bool] = {}

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
        )

    # --- time -----------------------------------------------------------------------------------------------

    def later(self, delay_ns: int, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (self.now_ns + delay_ns, self._count, what))

    def say(self, event: Event, delay_ns: int = 0) -> None:
        """An event on its way into the log: after a while, in any order with others, perhaps twice."""
        if self.faults and self.draw.random() < 0.3:
            delay_ns += self.draw.randrange(200 * MS)
        self.later(delay_ns, event)
        if self.faults and self.draw.random() < 0.05:
            self.later(delay_ns + self.draw.randrange(3 * S), event)

    def run(self, chaos_s: int, calm_s: int) -> None:
        """Faults for a while, then none, with all processes back."""
        self.append(ClusterConfigured(code_version="t", log_version=1, policy=self.policy))
        for process in self.processes.values():
            self.later(self.draw.randrange(S), lambda process=process: self.start(process))
        self.later(0, self.arrive)
        self.later(self.draw.randrange(3 * S), self.fault)
        self._run_until(self.now_ns + chaos_s * S)
        self.faults = False
        for process in self.processes.values():
            if not process.alive:
                self.start(process)
        self._run_until(self.now_ns + calm_s * S)

    def _run_until(self, end_ns: int) -> None:
        while self._waiting and self._waiting[0][0] <= end_ns:
            at_ns, _, what = heapq.heappop(self._waiting)
            self.now_ns = max(self.now_ns, at_ns)
            if callable(what):
                what()
            else:
                self.append(what)
        self.now_ns = max(self.now_ns, end_ns)

    def append(self, event: Event) -> None:
        stamped = Stamped(seq=self.core.seq + self.draw.choice([1, 1, 1, 2]), at_ns=self.now_ns, event=event)
        decisions = self.core.step(stamped)
        self.log.append(stamped)
        self.decided.append(decisions)
        for decision in decisions:
            if self.now_ns <= self._away_until_ns:
                delay_ns = self._away_until_ns - self.now_ns
                self.later(delay_ns, partial(self.receive, decision, stamped.seq))
            else:
                self.receive(decision, stamped.seq)

    # --- processes ------------------------------------------------------------------------------------------

    def start(self, process: Process) -> None:
        process.alive = True
        process.incarnation += 1
        process.orders, process.chains, process.obeyed_seq = {}, {}, 0
        self.announce(process)
        self.beat(process, process.incarnation)

    def announce(self, process: Process) -> None:
        match process.role:
            case "store":
                self.say(
                    StoreJoined(
                        node_id=process.process_id,
                        incarnation=process.name,
                        host="h",
                        layout=self.layout,
                        slots=100,
                        endpoints=[],
                    )
                )
                held = b"".join(keys(blocks, chain) for chain, blocks in process.chains.items())
                self.say(
                    StoreInventory(
                        node_id=process.process_id, incarnation=process.name, part=0, parts=1, block_keys=held
                    ),
                    1,
                )
            case "frontend":
                self.say(FrontendJoined(frontend_id=process.process_id, incarnation=process.name))
                for request in process.open.values():
                    self.say(request, 1)
            case role:
                process.orders = {}
                self.say(
                    WorkerJoined(
                        worker_id=process.process_id,
                        role=role,
                        node_id=f"n-{process.process_id}",
                        incarnation=process.name,
                        layout=self.layout,
                        kv_blocks=400,
                        context_tokens_max=20_000,
                        batch_max=32,
                        profile=self.profile,
                    )
                )

    def beat(self, process: Process, incarnation: int) -> None:
        if not process.alive or process.incarnation != incarnation:
            return
        process_id, name = process.process_id, process.name
        match process.role:
            case "store":
                self.say(StoreHeartbeat(node_id=process_id, incarnation=name))
            case "frontend":
                self.say(FrontendHeartbeat(frontend_id=process_id, incarnation=name))
            case _:
                steps = self.draw.randrange(3)
                self.say(
                    WorkerHeartbeat(
                        worker_id=process_id,
                        incarnation=name,
                        steps=steps,
                        step_ns=steps * self.draw.randrange(50 * MS),
                        step_sequences=len(process.orders),
                        step_context_tokens=1_000 * len(process.orders),
                        orders=list(process.orders),
                        obeyed_seq=process.obeyed_seq,
                    )
                )
        self.later(1 * S, lambda: self.beat(process, incarnation))

    def die(self, process: Process, noticed: bool) -> None:
        process.alive = False
        process_id, name = process.process_id, self.draw.choice([process.name, ""])
        if noticed:
            if process.role == "store":
                self.say(StoreLeft(node_id=process_id, incarnation=name))
            elif process.role == "frontend":
                self.say(FrontendLeft(frontend_id=process_id, incarnation=name))
            else:
                self.say(WorkerLeft(worker_id=process_id, incarnation=name))
        if process.role == "frontend":
            process.open = {}
        self.later(self.draw.randrange(10 * S), lambda: None if process.alive else self.start(process))

    def fault(self) -> None:
        if not self.faults:
            return
        draw = self.draw
        process = draw.choice(list(self.processes.values()))
        match draw.randrange(9):
            case 0 | 1 | 2 if process.alive:
                self.die(process, noticed=draw.random() < 0.5)
            case 3 if process.role == "store":
                self.say(StoreSuspected(node_id=process.process_id, reporter_id="p0", reason="x"))
            case 4 if process.role in ("prefill", "decode") and draw.random() < 0.3:
                self.say(WorkerDraining(worker_id=process.process_id, incarnation=process.name))
                self.later(5 * S, lambda: self.die(process, noticed=True) if process.alive else None)
            case 5 if draw.random() < 0.3:
                self.say(PolicyChanged(policy=self.any_policy()))
            case 6 if draw.random() < 0.2:
                self.now_ns += draw.randrange(20 * S)  # the bus was away
            case 7:
                self.nonsense()
            case 8 if draw.random() < 0.3:
                self._away_until_ns = max(self._away_until_ns, self.now_ns + draw.randrange(20 * S))
        self.later(draw.randrange(3 * S), self.fault)

    def nonsense(self) -> None:
        """Words about orders and processes that nobody knows."""
        order = self.draw.choice(["1-1", "77-1", *self.order_ids])
        for event in (
            PrefillFinished(
                order_id=order, request_id="r1", worker_id="p0", queue_ns=0, transfer_ns=0, compute_ns=1
            ),
            DecodeFailed(order_id=order, request_id="r2", worker_id="d9", reason=""),
            TimerFired(key="lost:prefill:p0:i1", at_ns=5),
            BlocksStored(node_id="n-x", incarnation="i1", block_keys=keys(3)),
        ):
            self.say(event)

    # --- requests -------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if not self.faults:
            return
        draw = self.draw
        frontends = [p for p in self.processes.values() if p.role == "frontend" and p.alive]
        if frontends:
            frontend = draw.choice(frontends)
            self._requests += 1
            tokens = draw.choice([draw.randrange(1, 8_000), 1_000, 25_000 if draw.random() < 0.1 else 10])
            chain = draw.randrange(1, 9)
            request = RequestArrived(
                request_id=f"r{self._requests}",
                frontend_id=frontend.process_id,
                prompt_tokens=tokens,
                max_tokens=draw.choice([1, 100, 1_000]),
                block_keys=keys(tokens // 100, chain),
                ttft_slo_ns=draw.choice([0, 0, 500 * MS]),
                priority=draw.choice([0, 0, -1_000, 1_000]),
            )
            frontend.open[request.request_id] = request
            self.say(request)
            if draw.random() < 0.1:
                self.later(draw.randrange(5 * S), lambda: self.cancel(frontend, request.request_id))
        self.later(draw.randrange(200 * MS), self.arrive)

    def cancel(self, frontend: Process, request_id: str) -> None:
        if frontend.open.pop(request_id, None) is not None:
            self.say(RequestCancelled(request_id=request_id))

    def receive(self, decision: Decision, seq: int) -> None:
        if isinstance(decision, StartPrefill | StartDecode | CancelOrder):
            process = self.processes[decision.worker_id]
            process.obeyed_seq = seq
        match decision:
            case SetTimer():
                self.later(
                    max(0, decision.at_ns - self.now_ns), TimerFired(key=decision.key, at_ns=decision.at_ns)
                )
            case StartPrefill():
                assert decision.order_id not in self.order_ids, ("ordered twice", decision)
                self.order_ids[decision.order_id] = True
                self.told.setdefault(decision.request_id, []).append("placed")
                if process.alive:
                    process.orders[decision.order_id] = decision
                    self.later(self.draw.randrange(300 * MS), lambda: self.end_prefill(process, decision))
            case StartDecode():
                if process.alive:
                    process.orders[decision.order_id] = decision
                    self.later(self.draw.randrange(2 * S), lambda: self.end_decode(process, decision))
            case CancelOrder():
                if not self.forgets():
                    process.orders.pop(decision.order_id, None)
            case AnnounceYourself():
                process = self.processes[decision.target_id]
                if process.alive:
                    self.announce(process)
            case RejectRequest() | FailRequest():
                self.told.setdefault(decision.request_id, []).append(type(decision).__name__)
                self.processes[decision.frontend_id].open.pop(decision.request_id, None)
            case ReleaseOrder():
                pass

    def forgets(self) -> bool:
        """Whether a worker loses this order from its memory, or this cancellation."""
        return self.faults and self.forgetful and self.draw.random() < 0.05

    def end_prefill(self, process: Process, order: StartPrefill) -> None:
        if not process.alive or process.orders.get(order.order_id) is not order:
            return
        del process.orders[order.order_id]
        if self.forgets():
            return
        answer = {"order_id": order.order_id, "request_id": order.request_id, "worker_id": order.worker_id}
        if self.faults and self.draw.random() < 0.05:
            self.say(PrefillFailed(**answer, reason="x", retryable=self.draw.random() < 0.8))
            return
        fetched = sum(fetch.blocks for fetch in order.fetches)
        self._prefilled[order.order_id] = True
        self.say(
            PrefillFinished(
                **answer,
                queue_ns=0,
                transfer_ns=0,
                compute_ns=self.draw.choice([0, self.draw.randrange(1 * S), order.predicted.prefill_ns]),
                cached_local_tokens=min(order.prompt_tokens, order.local_blocks * 100),
                cached_fetched_tokens=fetched * 100,
                fetched_bytes=fetched * 100_000,
                fetch_node_id=order.fetches[0].node_id if order.fetches else "",
                fetch_ns=self.draw.randrange(10 * MS),
                pushed_bytes=self.draw.randrange(10**7),
                push_ns=self.draw.randrange(10 * MS),
            )
        )
        chain, blocks = self.draw.randrange(1, 9), order.prompt_tokens // 100
        for node_id in (f"n-{process.process_id}", order.decode_node_id):
            store = self.processes[node_id]
            if store.alive and blocks:
                store.chains[chain] = max(blocks, store.chains.get(chain, 0))
                tier = self.draw.choice(["dram", "dram", "dram", "ssd"])
                name = store.name
                self.say(
                    BlocksStored(node_id=node_id, incarnation=name, block_keys=keys(blocks, chain), tier=tier)
                )
                if self.draw.random() < 0.3:
                    gone = keys(blocks, chain)[16 * self.draw.randrange(blocks) :]
                    self.say(
                        BlocksEvicted(node_id=node_id, incarnation=name, block_keys=gone, tier=tier), 1 * S
                    )

    def end_decode(self, process: Process, order: StartDecode) -> None:
        if not process.alive or process.orders.get(order.order_id) is not order:
            return
        answer = {"order_id": order.order_id, "request_id": order.request_id, "worker_id": order.worker_id}
        if order.order_id not in self._prefilled:
            self.later(100 * MS, lambda: self.end_decode(process, order))  # waits, until it is cancelled
            return
        del process.orders[order.order_id]
        if self.forgets():
            return
        if self.faults and self.draw.random() < 0.05:
            self.say(DecodeFailed(**answer, reason="x", retryable=self.draw.random() < 0.8))
        elif self.faults and self.draw.random() < 0.05:
            self.say(DecodeRefused(**answer, reason="x"))
        else:
            self.say(DecodeStarted(**answer))
            self.processes[order.frontend_id].open.pop(order.request_id, None)
            self.told.setdefault(order.request_id, []).append("finished")
            self.say(
                RequestFinished(
                    **answer,
                    finish_reason=self.draw.choice(["stop", "length", "abort"]),
                    completion_tokens=self.draw.randrange(1, 200),
                    decode_ns=self.draw.randrange(3 * S),
                )
            )


def digest(log: list[Stamped], decided: list[list[Decision]], core: Core) -> str:
    """Of every decision, in order, and of the state after the last."""
    state = hashlib.blake2b(core.digest().encode())
    for stamped, decisions in zip(log, decided, strict=True):
        for position, decision in enumerate(decisions):
            state.update(
                repr(Ordered(cause_seq=stamped.seq, position=position, decision=decision)).encode()
                if isinstance(decision, SetTimer)
                else encode(decision)
            )
    return state.hexdigest()


def choose_by_hash() -> None:
    """What the rules of the core forbid: among prefill workers the one whose id has the smallest hash."""

    def choose(state: Any, candidates: Any, draw: str) -> Any:
        return min(candidates, key=lambda candidate: hash(candidate.worker_id), default=None)

    admission.choose_prefill = choose


def main() -> None:
    if sys.argv[1] == "--by-hash":
        choose_by_hash()
        del sys.argv[1]
    for seed in sys.argv[1:]:
        cluster = Cluster(int(seed), checked=False)
        cluster.run(chaos_s=15, calm_s=5)
        print(seed, len(cluster.log), digest(cluster.log, cluster.decided, cluster.core))


if __name__ == "__main__":
    main()
