"""The core in a simulated world: simulated workers obey its decisions, and their answers are its next events.

The core is the one that runs live, unchanged; its shell here is `say` (append to the log) and `_do` (decisions to the
processes that obey them), both without delay: the bus takes about a millisecond, which is left out. Every process sends
a heartbeat, as live ones do, every ten simulated seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from halfmoon.conductor.core.invariants import check
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.context import SimulationContext
from halfmoon.conductor.simulation.decode import SimulatedDecode
from halfmoon.conductor.simulation.mixed import SimulatedMixed
from halfmoon.conductor.simulation.network import Network
from halfmoon.conductor.simulation.nodes import Node
from halfmoon.conductor.simulation.options import (
    AS_RECORDED,
    ClusterShape,
    ConfigurationImpossible,
    RunOptions,
)
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.prefill import SimulatedPrefill
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import LoadSample
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    ChangeRole,
    Decision,
    FailRequest,
    RejectRequest,
    ReleaseOrder,
    ReplicateBlocks,
    SetTimer,
    StartDecode,
    StartMixed,
    StartPrefill,
    StartStage,
)
from halfmoon.schemas.events import (
    ClusterConfigured,
    Event,
    FrontendHeartbeat,
    FrontendJoined,
    RequestArrived,
    Stamped,
    StoreHeartbeat,
    StoreJoined,
    TimerFired,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import ELASTIC_ROLES, ROLES, WorkerRole
from halfmoon.workers.token_budget import iteration_ns_of

#: Of every process, where costs are the profile's and predictions are not corrected.
HEARTBEAT_NS = 10 * SECOND_NS
#: Time from a worker's last order in one role to its first in the other; live it was 0.2 s.
CHANGE_NS = SECOND_NS // 5
#: How often one that changes looks whether it is done.
LOOK_NS = SECOND_NS // 50
#: Least number of events between two checks of the invariants; it is never below the number of blocks, each of which a
#: check looks at.
CHECK_EVERY = 5_000


#: Of a mixed worker without a token budget: by then a chunk keeps any device busy.
TOKEN_BUDGET_MAX = 8_192


class World:
    """Call `run`; then `outcomes`, `samples` and the counters of `context` have the results."""

    def __init__(
        self,
        cluster: ClusterShape,
        policy: Policy,
        profile: Profile,
        run: RunOptions = AS_RECORDED,
        *,
        outcomes: dict[str, Outcome] | None = None,
        elastic: bool = False,
    ) -> None:
        #: Workers may change roles: by the policy's planner, or by `RoleWanted`.
        self.elastic = elastic or policy.elastic != "off"
        self.profile = profile
        self.layout = profile.layout(cluster.block_tokens)
        #: Prefill workers may compute long prompts together.
        self.together = policy.prefill_group > 1
        if self.together and not profile.activation_bytes:
            raise ConfigurationImpossible(
                f"prefill_group: profile {profile.name} does not say activation_bytes"
            )
        link_bytes_s = cluster.link_bytes_s or profile.link_bytes_s
        # The times of steps come with heartbeats: where these are to be learned they are as frequent as live.
        self.heartbeat_ns = (
            policy.heartbeat_ns if policy.correction_window or run.cost_times else HEARTBEAT_NS
        )
        self.policy = msgspec.structs.replace(
            policy,
            heartbeat_ns=self.heartbeat_ns,
            lost_after_ns=4 * self.heartbeat_ns,
            link_bytes_s=link_bytes_s,
            link_latency_ns=profile.link_latency_ns,
        )
        self.clock = Clock(run.seed, run.noise_percent, run.cost_times)
        self.outcomes: dict[str, Outcome] = {} if outcomes is None else outcomes
        self.context = SimulationContext(
            profile,
            self.clock,
            Network(self.clock, link_bytes_s, profile.link_latency_ns),
            self.outcomes,
            self,
            block_tokens=cluster.block_tokens,
            policy=policy,
        )
        self.core = Core()
        self.samples: list[LoadSample] = []
        #: Sees every event with its decisions, as `live.run`'s does.
        self.after_step: Callable[[Stamped, list[Decision]], None] | None = None
        self._arrivals: dict[str, Arrival] = {}
        self._closed_loop = run.closed_loop
        #: By the request whose end they wait for.
        self._followers: dict[str, list[tuple[Arrival, str]]] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._digest = blake2b(digest_size=16)
        self._encode = msgspec.msgpack.Encoder().encode
        self._events = 0
        self._check_at = CHECK_EVERY
        self.open = 0
        self.prefill_workers: dict[str, SimulatedPrefill] = {}
        self.decode_workers: dict[str, SimulatedDecode] = {}
        self.mixed_workers: dict[str, SimulatedMixed] = {}
        #: All of them.
        self._workers: dict[str, SimulatedPrefill | SimulatedDecode | SimulatedMixed] = {}
        #: Of a mixed worker's iteration.
        self._token_budget = self._iteration_ns = 0
        #: Time computed by workers that have another role by now.
        self._prefill_ns = self._decode_ns = 0
        #: Workers that finish their orders before they change, and the number that have changed.
        self._changing: dict[str, WorkerRole] = {}
        self.role_changes = 0
        self._build(cluster)

    def _build(self, cluster: ClusterShape) -> None:
        if cluster.lacks:
            raise ConfigurationImpossible(f"{cluster.lacks}: at least one worker is needed")
        block_bytes = self.layout.block_bytes
        kv_blocks = cluster.kv_blocks if cluster.kv_blocks >= 0 else self.profile.kv_bytes // block_bytes
        pool = cluster.pool_blocks if cluster.pool_blocks >= 0 else self.profile.pool_bytes // block_bytes
        decode_pool = cluster.decode_pool_blocks if cluster.decode_pool_blocks >= 0 else pool
        if kv_blocks < 1:
            raise ConfigurationImpossible(
                f"a worker's own cache holds no block of {cluster.block_tokens} tokens"
            )
        self.say(ClusterConfigured(code_version="simulation", log_version=1, policy=self.policy))
        self.say(FrontendJoined(frontend_id="frontend", incarnation="i1"))
        self._beat(
            lambda: FrontendHeartbeat(frontend_id="frontend", incarnation="i1", open_requests=self.open), 0, 1
        )
        if cluster.mixed:
            self._token_budget = cluster.token_budget or TOKEN_BUDGET_MAX
            self._iteration_ns = cluster.iteration_ns
            if not cluster.token_budget:
                self._iteration_ns = iteration_ns_of(self.policy.tbt_slo_ns)
        counts: dict[WorkerRole, int] = {
            "prefill": cluster.prefill,
            "decode": cluster.decode,
            "mixed": cluster.mixed,
        }
        self._processes = 2 * sum(counts.values())
        for role, count in counts.items():
            slots = decode_pool if role == "decode" else pool
            for place in range(count):
                self._add_worker(role, f"{role}-{place:0{len(str(count - 1))}}", slots, kv_blocks)

    def _add_worker(self, role: WorkerRole, worker_id: str, slots: int, kv_blocks: int) -> None:
        """A worker and its node, with a pool of `slots` blocks; both join and start their heartbeats."""
        context, node_id = self.context, f"node-{worker_id}"
        number = 2 * len(context.nodes)
        node = context.nodes[node_id] = Node(self.say, node_id, slots)
        self.say(
            StoreJoined(
                node_id=node_id, incarnation="i1", host=node_id, layout=self.layout, slots=slots, endpoints=[]
            )
        )
        self._join(role, worker_id, kv_blocks, "i1")
        self._beat(lambda: self._store_heartbeat(node), number, self._processes)
        self._beat(lambda: self._heartbeat(worker_id), number + 1, self._processes)

    def _join(self, role: WorkerRole, worker_id: str, kv_blocks: int, incarnation: str) -> None:
        context, node_id = self.context, f"node-{worker_id}"
        duties = ROLES[role].duties
        mixed = duties == {"prompts", "batch"}
        if duties == {"prompts"}:
            self._workers[worker_id] = self.prefill_workers[worker_id] = SimulatedPrefill(
                context,
                worker_id,
                context.nodes[node_id],
                self.decode_workers,
                self.prefill_workers,
                incarnation=incarnation,
            )
        elif duties == {"batch"}:
            self._workers[worker_id] = self.decode_workers[worker_id] = SimulatedDecode(
                context, worker_id, kv_blocks, incarnation=incarnation
            )
        elif mixed:
            self._workers[worker_id] = self.mixed_workers[worker_id] = SimulatedMixed(
                context,
                worker_id,
                context.nodes[node_id],
                self.layout,
                kv_blocks=kv_blocks,
                token_budget=self._token_budget,
                iteration_ns=self._iteration_ns,
            )
        else:
            raise ValueError(f"{role} workers are not simulated here")
        self.say(
            WorkerJoined(
                worker_id=worker_id,
                role=role,
                node_id=node_id,
                incarnation=incarnation,
                layout=self.layout,
                kv_blocks=kv_blocks,
                context_tokens_max=self.profile.context_tokens_max,
                batch_max=self.profile.batch_max,
                profile=self.profile.cost,
                token_budget=self._token_budget if mixed else 0,
                iteration_ns=self._iteration_ns if mixed else 0,
                may_become=list(ELASTIC_ROLES) if self.elastic and role in ELASTIC_ROLES else [],
                stage_addresses=[worker_id] if self.together and duties == {"prompts"} else [],
                activation_bytes=self.profile.activation_bytes if self.together else 0,
                answers=duties == {"prompts"},
            )
        )

    # --- roles ----------------------------------------------------------------------------------------------

    def _change(self, worker_id: str, role: WorkerRole) -> None:
        """Finish open orders, leave, and join in the other role."""
        self._changing[worker_id] = role
        incarnation = self._workers[worker_id].incarnation
        self.say(WorkerDraining(worker_id=worker_id, incarnation=incarnation))
        self._leave_if_done(worker_id)

    def _leave_if_done(self, worker_id: str) -> None:
        worker, role = self._workers[worker_id], self._changing[worker_id]
        if worker.orders_open():
            self.clock.after(LOOK_NS, self._leave_if_done, worker_id)
            return
        del self._changing[worker_id]
        known = self.core.state.workers[worker_id]
        del self._workers[worker_id]
        self.prefill_workers.pop(worker_id, None)
        self.decode_workers.pop(worker_id, None)
        self._prefill_ns += worker.prefill_ns
        self._decode_ns += worker.decode_ns
        self.say(WorkerLeft(worker_id=worker_id, incarnation=worker.incarnation))
        self.role_changes += 1
        incarnation = f"i{int(worker.incarnation[1:]) + 1}"
        self.clock.after(CHANGE_NS, self._join, role, worker_id, known.kv_blocks, incarnation)

    def _heartbeat(self, worker_id: str) -> WorkerHeartbeat | None:
        """None while it is between two roles."""
        worker = self._workers.get(worker_id)
        return worker.heartbeat() if worker is not None else None

    # --- the log --------------------------------------------------------------------------------------------

    def say(self, event: Event) -> None:
        """Append `event` to the log at this time, after the calls that run now are done."""
        self.clock.at(self.clock.now_ns, self._append, event)

    def _append(self, event: Event) -> None:
        self._events += 1
        stamped = Stamped(seq=self._events, at_ns=self.clock.now_ns, event=event)
        decisions = self.core.step(stamped)
        if self.after_step is not None:
            self.after_step(stamped, decisions)
        if decisions:
            self._digest.update(self._encode(decisions))
            for decision in decisions:
                self._do(decision)
        if self._events >= self._check_at:
            check(self.core.state)
            self._check_at = self._events + max(CHECK_EVERY, self.core.state.index.blocks)

    def _do(self, decision: Decision) -> None:
        match decision:
            case StartPrefill():
                self._placed(decision, decision.decode_worker_id)
                prefill = self.prefill_workers[decision.worker_id]
                prefill.obeyed_seq = self._events
                prefill.start(decision)
            case StartMixed():
                self._placed(decision, decision.worker_id)
                mixed = self.mixed_workers[decision.worker_id]
                mixed.obeyed_seq = self._events
                mixed.start(decision)
            case StartDecode():
                decode = self.decode_workers[decision.worker_id]
                decode.obeyed_seq = self._events
                decode.start(decision)
            case RejectRequest():
                self.ended(decision.request_id, decision.reason)
            case FailRequest():
                self.ended(decision.request_id, "failed")
            case CancelOrder():
                worker = self._workers[decision.worker_id]
                worker.obeyed_seq = self._events
                worker.cancel(decision.order_id)
            case SetTimer():
                self.clock.at(
                    decision.at_ns, self._append, TimerFired(key=decision.key, at_ns=decision.at_ns)
                )
            case ReleaseOrder():
                pass  # the worker let go of it
            case ReplicateBlocks():
                # A simulated pool has copies of fetched blocks, and no others.
                pass
            case ChangeRole():
                self._change(decision.worker_id, decision.role)
            case StartStage():
                part = self.prefill_workers[decision.worker_id]
                part.obeyed_seq = self._events
                part.start_part(decision)
            case AnnounceYourself():
                raise AssertionError(("no simulated process is forgotten", decision))

    def _placed(self, order: StartPrefill | StartMixed, decode_id: str) -> None:
        outcome = self.outcomes[order.request_id]
        outcome.prefill_id, outcome.decode_id = order.worker_id, decode_id
        outcome.predicted_ttft_ns = order.predicted.ttft_ns
        outcome.predicted_tbt_ns = order.predicted.tbt_ns

    @property
    def events(self) -> int:
        """The number of events in the log."""
        return self._events

    def digest(self) -> str:
        """A name of all decisions, in order."""
        return self._digest.hexdigest()

    def _beat(self, heartbeat: Callable[[], Event | None], number: int, of: int) -> None:
        """Send a heartbeat every `heartbeat_ns`, as number `number` of `of` spread over that time."""

        def beat() -> None:
            event = heartbeat()
            if event is not None:
                self._append(event)
            self.clock.after(self.heartbeat_ns, beat)

        self.clock.after(self.heartbeat_ns + self.heartbeat_ns * number // of, beat)

    def _store_heartbeat(self, node: Node) -> StoreHeartbeat:
        return StoreHeartbeat(node_id=node.node_id, incarnation="i1", slots_used=len(node.pool))

    # --- requests -------------------------------------------------------------------------------------------

    def keys(self, request_id: str) -> list[bytes]:
        """Keys of the prompt's whole blocks."""
        found = self._keys.get(request_id)
        if found is None:
            found = self._keys[request_id] = split_keys(self._arrivals[request_id].block_keys)
        return found

    def ended(self, request_id: str, end: str) -> None:
        outcome = self.outcomes[request_id]
        outcome.end, outcome.ended_ns = end, self.clock.now_ns
        self.open -= 1
        self._keys.pop(request_id, None)
        self._arrivals.pop(request_id, None)
        for arrival, follower in self._followers.pop(request_id, ()):
            self.clock.after(arrival.think_ns, self._arrive, arrival, follower)

    def _arrive_in_turn(
        self, coming: Iterator[tuple[Arrival, str]], arrival: Arrival, request_id: str
    ) -> None:
        """`coming`: those after it, by time."""
        if (following := next(coming, None)) is not None:
            self.clock.at(following[0].at_ns, self._arrive_in_turn, coming, *following)
        self._arrive(arrival, request_id)

    def _arrive(self, arrival: Arrival, request_id: str) -> None:
        self.open += 1
        self._arrivals[request_id] = arrival
        self.outcomes[request_id] = Outcome(
            arrived_ns=self.clock.now_ns,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
        )
        self._append(
            RequestArrived(
                request_id=request_id,
                frontend_id="frontend",
                prompt_tokens=arrival.prompt_tokens,
                max_tokens=max(arrival.max_tokens, arrival.output_tokens),
                block_keys=arrival.block_keys,
                ttft_slo_ns=arrival.ttft_slo_ns,
                tbt_slo_ns=arrival.tbt_slo_ns,
                tenant=arrival.tenant,
                priority=arrival.priority,
                sketch=arrival.sketch,
                documents=arrival.documents,
            )
        )

    # --- running --------------------------------------------------------------------------------------------

    def run(
        self,
        arrivals: Sequence[Arrival],
        *,
        sample_ns: int,
        progress: Callable[[int], None] | None = None,
    ) -> bool:
        """Run until every request has ended; False when interrupted before (the results so far are kept)."""
        if not arrivals:
            return True
        first = list[tuple[Arrival, str]]()
        for place, arrival in enumerate(arrivals):
            if self._closed_loop and arrival.follows >= 0:
                self._followers.setdefault(f"r{arrival.follows}", []).append((arrival, f"r{place}"))
            else:
                first.append((arrival, f"r{place}"))
        coming = iter(first)
        begin = next(coming)
        self.clock.at(begin[0].at_ns, self._arrive_in_turn, coming, *begin)
        self.clock.at(begin[0].at_ns, self._sample, sample_ns)
        step, outcomes, wanted = self.clock.step, self.outcomes, len(arrivals)
        told = 0
        try:
            while self.open or len(outcomes) < wanted:
                step()
                if progress is not None and len(outcomes) - told >= 100:
                    told = len(outcomes)
                    progress(told)
        except KeyboardInterrupt:
            return False
        check(self.core.state)
        return True

    def computed_ns(self) -> tuple[int, int]:
        """(time that all devices computed prompts, time that they decoded)."""
        workers = self._workers.values()
        return (
            self._prefill_ns + sum(worker.prefill_ns for worker in workers),
            self._decode_ns + sum(worker.decode_ns for worker in workers),
        )

    def _sample(self, sample_ns: int) -> None:
        """Predicted queue of those that prefill and present step of those that decode, over their SLOs."""
        known, now_ns, policy = self.core.state.workers, self.clock.now_ns, self.policy
        mixed = self.mixed_workers.values()
        prefilling: list[SimulatedPrefill | SimulatedMixed] = [*self.prefill_workers.values(), *mixed]
        decoding: list[SimulatedDecode | SimulatedMixed] = [*self.decode_workers.values(), *mixed]
        queued = sum(
            queue_ns(known[each.worker_id], now_ns) for each in prefilling if each.worker_id in known
        )
        steps = sum(each.present_step_ns() for each in decoding)
        self.samples.append(
            LoadSample(
                at_ns=now_ns,
                prefill_load=queued / max(1, len(prefilling)) / max(1, policy.ttft_slo_ns),
                decode_load=steps / max(1, len(decoding)) / max(1, policy.tbt_slo_ns),
                queued=sum(each.queued for each in prefilling),
                running=sum(each.running for each in decoding),
                prefill=len(self.prefill_workers),
                decode=len(self.decode_workers),
                mixed=len(self.mixed_workers),
            )
        )
        self.clock.after(sample_ns, self._sample, sample_ns)
