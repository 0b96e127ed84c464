"""The shell that workers share: joining, heartbeats, orders, tokens from the frontend, leaving.

A worker is one asyncio loop, which obeys and reports, and one compute thread, which owns the engine. Orders
come from the DECISIONS stream; each is answered by exactly one event, or cancelled.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar

from halfmoon.bus.connection import Bus
from halfmoon.bus.tasks import end_tasks
from halfmoon.bus.telemetry.tracing import Tracing
from halfmoon.schemas import subjects
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import ChangeRole, Decision
from halfmoon.schemas.events import WorkerDraining, WorkerHeartbeat, WorkerJoined, WorkerLeft
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.tokens import ResendReply, ResendRequest, TakeReply
from halfmoon.schemas.types import ExactNumerics, Message
from halfmoon.store.agent_client import AgentClient
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.workers import hold_points
from halfmoon.workers.kept_profile import ProfileCheck
from halfmoon.workers.machines import (
    AnswerResend,
    Deliver,
    ResendRequested,
    TakeTokens,
    TokensTaken,
    WorkerFacts,
)
from halfmoon.workers.options import WorkerOptions
from halfmoon.workers.token_inbox import TokenInbox
from halfmoon.workers.worker_metrics import WorkerMetrics

T = TypeVar("T")


class Now(TypedDict):
    """The times that an event carries."""

    at_ns: int
    wall_ns: int


def now() -> Now:
    """The time by both clocks."""
    return {"at_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}


@dataclass(frozen=True, kw_only=True)
class ChannelConfig:
    """This worker's identity to others over a channel, and the options of channels."""

    hello: ChannelHello
    options: ChannelOptions


class WorkerConfig(WorkerOptions, frozen=True, kw_only=True):
    """One worker process: its options, and settings that follow from them, the model and the machine."""

    worker_id: str
    node_id: str
    layout: Layout
    profile: CostProfile
    context_tokens_max: int
    heartbeat_ns: int = SECOND_NS
    #: Orders whose KV is fetched while earlier ones compute.
    prepared_max: int = 3
    #: Whether exact numerics hold on this CPU; "": not tried, or not claimed.
    exact_numerics: ExactNumerics = ""
    #: How it attends for others, or they for it (exact numerics only); None: neither.
    lending: ChannelConfig | None = None
    #: Prefill: how it computes prompts together with others; None: it does not.
    stage_channels: ChannelConfig | None = None
    #: Decode: the KV of its sequences lies at attention workers.
    cache_elsewhere: bool = False
    #: 0: the profile's number.
    decode_groups: int = 0
    #: 0: it is no mixed worker. And the time of its iterations; 0: not bounded.
    token_budget: int = 0
    iteration_ns: int = 0
    #: Attention: the KV heads that its cache has, and the first of them.
    first_kv_head: int = 0
    kv_heads: int = 0
    #: Attention: it may hold part of a sequence, in whole segments.
    holds_segments: bool = False
    #: Roles that its process can take, its own among them; (): it keeps its own.
    may_become: tuple[WorkerRole, ...] = ()


class WorkerMachine(Protocol):
    """The part of a worker's pure machine that every shell drives: it takes events, and returns actions."""

    @property
    def kv_blocks_used(self) -> int: ...

    def on(self, event: Any) -> Sequence[Any]: ...

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat: ...


class Worker(ABC):
    """Base of `PrefillWorker`, `DecodeWorker`, `MixedWorker` and `AttentionWorker`."""

    role: WorkerRole
    #: Every decision is in it; `prepare` makes it.
    state: WorkerMachine
    #: Frontends give it the tokens of requests.
    takes_tokens = True
    #: It computes with the tokens of prompts, or tells others of them.
    needs_prompts = True
    #: It answers requests of one token without a decode worker.
    answers = False

    def __init__(self, bus: Bus, engine: Any, store: AgentClient | None, config: WorkerConfig) -> None:
        self.bus = bus
        self.engine = engine
        self.store = store
        self.config = config
        self.incarnation = uuid.uuid4().hex[:16]
        self.inbox = TokenInbox(bus, config.worker_id, needs_prompts=self.needs_prompts)
        self.metrics = WorkerMetrics(
            self, node_id=config.node_id, model=config.layout.model, kv_blocks=config.kv_blocks
        )
        self.draining = False
        #: Where the profile was measured on this machine.
        self.profile_check: ProfileCheck | None = None
        #: OpenTelemetry, where it is switched on.
        self.tracing: Tracing | None = None
        #: Cause of the newest decision that was obeyed; heartbeats have it beside the open orders.
        self.obeyed_seq = 0
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Events that came while the machine's actions are being obeyed: it gets them afterwards.
        self._heard: deque[Any] = deque()
        self._obeying = False
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        #: Gets the exception of a task that should never have failed: the process must end.
        self.failed: asyncio.Future[None] = self._loop.create_future()
        #: Gets the role that the process is to take when this worker has left.
        self.next_role: asyncio.Future[WorkerRole] = self._loop.create_future()

    def facts(self, eos_ids: Iterable[int] = ()) -> WorkerFacts:
        """For its machine. `eos_ids`: the model's end tokens, for a worker that decodes."""
        config = self.config
        return WorkerFacts(
            worker_id=config.worker_id,
            incarnation=self.incarnation,
            node_id=config.node_id,
            layout=config.layout,
            kv_blocks=config.kv_blocks,
            has_store=self.store is not None,
            eos_ids=frozenset(eos_ids),
        )

    # --- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for orders, then join; the first order may come at once."""
        reader = await self.bus.open_decisions(self.config.worker_id)
        if self.takes_tokens:
            await self.inbox.open()
        await self.prepare()
        self.spawn(self._obey_all(reader))
        if hold_points.PLACE is not None:
            worker_id = self.config.worker_id
            await asyncio.to_thread(hold_points.reached, f"{hold_points.JOINING}-{worker_id}", 0, worker_id)
        self.announce()
        self.spawn(self._heartbeats())

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Take nothing new, finish open orders within `drain_s`, leave."""
        if self._stopped:
            return
        self.draining = True
        worker_id = self.config.worker_id
        self.bus.append_soon(
            WorkerDraining(worker_id=worker_id, incarnation=self.incarnation), source_id=worker_id
        )
        deadline = self._loop.time() + drain_s
        while self.orders_open() and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._stopped = True
        await self.release_all()
        self.bus.append_soon(
            WorkerLeft(worker_id=worker_id, incarnation=self.incarnation, reason=self._why_it_leaves()),
            source_id=worker_id,
        )
        await end_tasks(self._tasks)
        self.failed.cancel()
        self.next_role.cancel()
        self._compute.shutdown(wait=True, cancel_futures=True)
        self._copies.shutdown(wait=True, cancel_futures=True)

    def _why_it_leaves(self) -> str:
        return f"becomes a {self.next_role.result()} worker" if self.next_role.done() else "stopped"

    def announce(self) -> None:
        config = self.config
        self.bus.append_soon(
            WorkerJoined(
                worker_id=config.worker_id,
                role=self.role,
                node_id=config.node_id,
                incarnation=self.incarnation,
                layout=config.layout,
                kv_blocks=config.kv_blocks,
                context_tokens_max=config.context_tokens_max,
                batch_max=config.batch_max,
                profile=config.profile,
                exact_numerics=config.exact_numerics,
                prompt_tokens_max=self.prompt_tokens_max(),
                lends=self.lends(),
                cache_elsewhere=config.cache_elsewhere,
                first_kv_head=config.first_kv_head,
                decode_groups=config.decode_groups,
                token_budget=config.token_budget,
                iteration_ns=config.iteration_ns,
                kv_heads=config.kv_heads,
                may_become=list(config.may_become),
                stage_addresses=self.stage_addresses(),
                activation_bytes=self.activation_bytes(),
                answers=self.answers,
            ),
            source_id=config.worker_id,
        )

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_ns / SECOND_NS)
            self.report(self.heartbeat())

    async def _obey_all(self, reader: Any) -> None:
        async for ordered in self.bus.follow_decisions(reader):
            match ordered.decision:
                case ChangeRole(role=role) if role in self.config.may_become and not self.next_role.done():
                    self.next_role.set_result(role)
                case decision:
                    self.obey(decision)
            self.obeyed_seq = max(self.obeyed_seq, ordered.cause_seq)

    # --- tokens to frontends --------------------------------------------------------------------------------

    async def serve_resends(self) -> None:
        """Answer frontends that missed tokens, by the machine."""
        asked = subjects.resend(self.config.worker_id, "*")
        await self.bus.serve(asked, ResendRequest, self._resend, author="frontend_id")

    def _resend(self, request: ResendRequest) -> ResendReply:
        (answer,) = self.state.on(ResendRequested(request=request, **now()))
        assert isinstance(answer, AnswerResend), answer
        return answer.reply

    def deliver(self, action: Deliver) -> None:
        self.bus.publish_soon(subjects.tokens(action.frontend_id, self.config.worker_id), action.message)

    # --- for the subclasses ---------------------------------------------------------------------------------

    @abstractmethod
    async def prepare(self) -> None:
        """Whatever must stand before the first order."""

    @abstractmethod
    def obey(self, decision: Decision) -> None:
        """Begin, or end, the decision's work; returns at once."""

    def heartbeat(self) -> WorkerHeartbeat:
        """How the worker is, and which orders it has open."""
        return self.state.heartbeat(self.obeyed_seq)

    @abstractmethod
    def orders_open(self) -> int:
        """Orders not yet answered."""

    def kv_blocks_used(self) -> int:
        """Blocks of the engine's own paged cache in use."""
        return self.state.kv_blocks_used

    def lends(self) -> bool:
        """It holds whole segments of others' sequences."""
        return self.config.holds_segments

    def prompt_tokens_max(self) -> int:
        """The longest prompt that is computed here though the cache does not hold it; 0: it must."""
        return 0

    def stage_addresses(self) -> list[str]:
        """Where it listens for workers whose prompts it computes some layers of; []: nowhere."""
        return []

    def activation_bytes(self) -> int:
        """Bytes of one token between two layers, where it may be sent; 0: nowhere."""
        return 0

    @abstractmethod
    async def release_all(self) -> None:
        """Give back whatever open orders hold in the stores."""

    @abstractmethod
    def obey_action(self, action: Any) -> None:
        """Begin an action of the machine; returns at once. Its end may come within the call."""

    # --- the machine ----------------------------------------------------------------------------------------

    def hear(self, event: Any) -> None:
        """On the loop: feed the machine the event, and obey.

        An action may be carried out at once, and hear its own end. That waits here until all that followed from
        `event` has begun: the machine's actions are begun in their order. Without a turn of the loop for each,
        orders that came together are answered together, by one write to the socket.
        """
        self._heard.append(event)
        if self._obeying:
            return
        self._obeying = True
        try:
            while self._heard:
                for action in self.state.on(self._heard.popleft()):
                    self.obey_action(action)
        finally:
            self._obeying = False

    def hear_given(self, ask: TakeTokens) -> bool:
        """Hear the tokens of an order that its frontend gave ahead; False: `take_tokens` must wait for them."""
        reply = self.inbox.given(ask.frontend_id, ask.order_id, grammar=False)
        if reply is not None:
            self._hear_taken(ask, reply)
        return reply is not None

    async def take_tokens(self, ask: TakeTokens) -> None:
        """Hear the tokens of an order, once all that they are drawn by is ready."""
        reply = await self.inbox.take(ask.frontend_id, ask.request_id, ask.order_id, self.role)
        if reply is not None and reply.sampling.grammar:
            # A second, at worst: neither the loop nor the batch waits for it.
            await asyncio.to_thread(self.engine.prepare_grammar, reply.sampling.grammar)
        self._hear_taken(ask, reply)

    def _hear_taken(self, ask: TakeTokens, reply: TakeReply | None) -> None:
        self.hear(TokensTaken(order_id=ask.order_id, reply=reply, **now()))

    # --- helpers --------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(problem)

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """`work` on the compute thread; at once where the engine computes nothing."""
        if self.config.layout.layers == 0:
            return work(*args)
        return await self._loop.run_in_executor(self._compute, work, *args)

    async def on_copy_thread(self, copy: Callable[[], None]) -> None:
        """`copy` on the thread that moves KV between the node's pool and the engine's cache."""
        await self._loop.run_in_executor(self._copies, copy)

    def report(self, event: Message) -> None:
        self.metrics.saw(event)
        if self.profile_check is not None:
            self.profile_check.saw(event)
        self.bus.append_soon(event, source_id=self.config.worker_id)  # type: ignore[arg-type]
