"""The adapter of an engine: a worker, and the store of its node, to the cluster; a client to the engine.

The shell of `AdapterState`, or of the machine of another role: it feeds the machine events and obeys its actions.
Nothing is decided here. Beside it the engine's cache is mirrored (`EngineMirror`) and announced as a node's blocks are,
by a store that nobody can read. An engine that does not answer any more is `lost`: the worker leaves, its requests are
placed anew, and the command that runs it begins anew when the engine is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, assert_never

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerError
from halfmoon.bus.tail import StreamTail
from halfmoon.bus.telemetry.metrics import counter, gauge
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    Decision,
    EngineRefusal,
    Fetch,
    StartDecode,
    StartMixed,
    StartPrefill,
)
from halfmoon.schemas.events import StoreJoined
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.tokens import ResendReply, ResendRequest
from halfmoon.schemas.weights import PrefixCacheReset, ResetPrefixCache
from halfmoon.store.agent.announcer import Announcer
from halfmoon.workers import machines
from halfmoon.workers.adapters.actions import Action, AskEngine, HangUp, StepSeen, TellDecode
from halfmoon.workers.adapters.completion import EngineRefused
from halfmoon.workers.adapters.decode_half import DecodeAdapterState
from halfmoon.workers.adapters.engine_api import EngineApi, EngineAway, EngineUnfit
from halfmoon.workers.adapters.events import (
    AnswerBroke,
    EngineAsked,
    EngineLooked,
    PromptOrdered,
    TokensHeard,
)
from halfmoon.workers.adapters.mirror import EngineMirror
from halfmoon.workers.adapters.prefill_half import PrefillAdapterState
from halfmoon.workers.adapters.state import AdapterState
from halfmoon.workers.decode.actions import AnswerResend, Deliver, EndSpan
from halfmoon.workers.decode.events import DecodeOrdered, KvHeard, ResendRequested
from halfmoon.workers.decode.spans import end_decode
from halfmoon.workers.machines import Announce, Report, TakeTokens
from halfmoon.workers.mixed.events import MixedOrdered
from halfmoon.workers.worker import Worker, WorkerConfig

log = logging.getLogger(__name__)
FETCHES_PLANNED = (
    "the conductors plan to move KV to this engine, which computes it: a fleet of engines wants the policy "
    "local_cache_aware (halfmoon policy set name=local_cache_aware)"
)
PROMPTS_RECOMPUTED = (
    "the engine cannot have a prompt's KV from the one that computed it, and computes it again"
)
LOOK_S, LOOK_AGAIN_S = 1.0, 0.2
#: An engine that has not answered this many times in a row is gone.
AWAY_MAX = 2


class AdaptedModel(NamedTuple):
    """The model that the engine serves: its name there, the number of its token ids, and its end tokens."""

    name: str
    vocabulary: int
    eos_ids: frozenset[int]


MACHINES: dict[WorkerRole, type[AdapterState]] = {
    "mixed": AdapterState,
    "prefill": PrefillAdapterState,
    "decode": DecodeAdapterState,
}


class AdapterWorker(Worker):
    """See the module; every decision is in `state`. `role`: one of `MACHINES`."""

    state: AdapterState

    def __init__(
        self,
        bus: Bus,
        api: EngineApi,
        mirror: EngineMirror,
        config: WorkerConfig,
        model: AdaptedModel,
        role: WorkerRole = "mixed",
    ) -> None:
        self.role = role
        super().__init__(bus, api, None, config)
        self.api, self.mirror = api, mirror
        self.model = model
        #: Gets why the engine cannot be used any more.
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self.announcer = Announcer(
            bus, node_id=config.node_id, incarnation=self.incarnation, heartbeat_ns=config.heartbeat_ns
        )
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._look = asyncio.Event()
        #: Of these its log has a line; one is enough.
        self._warned: set[str] = set()
        #: Callers that wait for the next look at the engine to find it there.
        self._lookers: list[asyncio.Future[None]] = []

    async def prepare(self) -> None:
        config = self.config
        self.state = MACHINES[self.role](
            self.facts(self.model.eos_ids), config.profile, engine_model=self.model.name
        )
        asked = subjects.resend(config.worker_id, "*")
        await self.bus.serve(asked, ResendRequest, self._resend, author="frontend_id")
        await self.bus.serve(subjects.reset(config.worker_id), ResetPrefixCache, self._reset_prefix_cache)
        if self.role == "decode":
            self.spawn(self._follow_kv(await self.bus.open_kv(config.worker_id)))
        # Before the worker: it takes no orders while its node has no store.
        self.mirror.changed = self.announcer.add
        self.announcer.start(self.mirror, self._store_joined)
        self.spawn(self._look_after())

    def _store_joined(self) -> StoreJoined:
        config = self.config
        return StoreJoined(
            node_id=config.node_id,
            incarnation=self.incarnation,
            host=config.node_id,  # nobody maps its memory, and no other worker shares its device
            layout=config.layout,
            slots=config.kv_blocks,
            endpoints=[],
        )

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """As every worker, and its node's store after it."""
        if self._stopped:
            return
        await super().stop(drain_s=drain_s)
        self.mirror.changed = None
        await self.announcer.leave(self._why_it_leaves())
        self.lost.cancel()

    def _why_it_leaves(self) -> str:
        return self.lost.result()[:500] if self.lost.done() and not self.lost.cancelled() else "stopped"

    async def release_all(self) -> None:
        self.hear(machines.WorkerStopped(at_ns=time.monotonic_ns()))

    def obey(self, decision: Decision) -> None:
        now_ns = time.monotonic_ns()
        match decision:
            case StartMixed():
                self._pass_over(decision.fetches)
                self.hear(MixedOrdered(at_ns=now_ns, order=decision))
            case StartPrefill():
                self._pass_over(decision.fetches)
                self.hear(PromptOrdered(at_ns=now_ns, order=decision))
            case StartDecode():
                self.hear(DecodeOrdered(at_ns=now_ns, order=decision))
            case CancelOrder():
                self.hear(machines.OrderCancelled(at_ns=now_ns, order_id=decision.order_id))
            case AnnounceYourself(role="store"):
                self.announcer.announce()
            case AnnounceYourself():
                self.hear(machines.AnnounceRequested(at_ns=now_ns))
            case _:
                pass  # of a store: nothing is held for anybody

    def _pass_over(self, fetches: Sequence[Fetch]) -> None:
        if fetches:
            self._warn_once(FETCHES_PLANNED)

    def _warn_once(self, what: str, *reason: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", ": ".join((self.config.worker_id, what, *reason)))

    def orders_open(self) -> int:
        return self.state.orders_open()

    # --- the machine ----------------------------------------------------------------------------------------

    def obey_action(self, action: Action) -> None:
        match action:
            case Deliver():
                subject = subjects.tokens(action.frontend_id, self.config.worker_id)
                self.bus.publish_soon(subject, action.message)
            case AskEngine():
                if action.computes_again:
                    self._warn_once(PROMPTS_RECOMPUTED, action.computes_again)
                task = self.spawn(self._ask(action))
                self._asking[action.order_id] = task
                task.add_done_callback(functools.partial(self._asked, action.order_id))
            case TellDecode():
                kind, result = PrefillResult.__name__, action.result
                subject = subjects.kv(action.decode_worker_id, kind, self.config.worker_id)
                self.bus.publish_soon(subject, result, message_id=f"{result.order_id}-result")
            case HangUp():
                asking = self._asking.pop(action.order_id, None)
                if asking is not None:
                    asking.cancel()
            case Report():
                self.report(action.event)
            case TakeTokens():
                if not self.hear_given(action):
                    self.spawn(self.take_tokens(action))
            case StepSeen():
                self.metrics.stepped(action.step_ns, action.sequences, action.context_tokens)
            case EndSpan():
                end_decode(self.tracing, action, self.config.worker_id)
            case Announce():
                self.announce()
            case AnswerResend():
                raise AssertionError(("answered where it is asked", action))
            case _:
                assert_never(action)

    def _asked(self, order_id: str, task: asyncio.Task[None]) -> None:
        # The machine may have asked anew when it heard how this one ended.
        if self._asking.get(order_id) is task:
            del self._asking[order_id]

    async def _follow_kv(self, reader: StreamTail) -> None:
        async for author_id, message in self.bus.follow_kv(reader):
            self.hear(KvHeard(at_ns=time.monotonic_ns(), author_id=author_id, message=message))

    async def take_tokens(self, ask: TakeTokens) -> None:
        """No grammar is compiled: the machine refuses a request with one, because no engine takes ours."""
        reply = await self.inbox.take(ask.frontend_id, ask.request_id, ask.order_id, self.role)
        self._hear_taken(ask, reply)

    def _resend(self, request: ResendRequest) -> ResendReply:
        (answer,) = self.state.on(ResendRequested(at_ns=time.monotonic_ns(), request=request))
        assert isinstance(answer, AnswerResend), answer
        return answer.reply

    async def _reset_prefix_cache(self, _: ResetPrefixCache) -> PrefixCacheReset:
        blocks = len(self.mirror.keys())
        try:
            await self.api.reset_prefix_cache()
        except EngineUnfit as problem:
            raise PeerError("no_reset", f"{problem}; vLLM has it with VLLM_SERVER_DEV_MODE=1") from None
        except EngineAway as problem:
            raise PeerError("engine_away", str(problem)) from None
        # An engine that computes nothing publishes no event of it yet.
        self.mirror.forget()
        return PrefixCacheReset(blocks=blocks)

    # --- the engine -----------------------------------------------------------------------------------------

    async def _ask(self, action: AskEngine) -> None:
        order_id = action.order_id
        cached = self.mirror.blocks.leading(action.block_keys)
        self.hear(EngineAsked(at_ns=time.monotonic_ns(), order_id=order_id, cached_blocks=cached))
        try:
            async for heard in self.api.complete(action.body, self.model.vocabulary):
                now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
                self.hear(
                    TokensHeard(
                        at_ns=now_ns,
                        wall_ns=wall_ns,
                        order_id=order_id,
                        tokens=heard.tokens,
                        finish_reason=heard.finish_reason,
                        kv_params=heard.kv_params,
                    )
                )
        except EngineRefused as problem:
            self._broke(order_id, str(problem), retryable=problem.retryable, refusal=problem.refusal)
        except EngineAway as problem:
            await self._look_now()
            self._broke(order_id, str(problem), retryable=True)

    async def _look_now(self) -> None:
        """Returns when the engine turns out to be there. Where it is not, the worker leaves: orders that failed one by
        one would be placed here again, and again, until then.
        """
        there = self._loop.create_future()
        self._lookers.append(there)
        self._look.set()
        await there

    def _broke(
        self, order_id: str, reason: str, *, retryable: bool, refusal: EngineRefusal | None = None
    ) -> None:
        self.hear(
            AnswerBroke(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                reason=reason,
                retryable=retryable,
                refusal=refusal,
            )
        )

    async def _look_after(self) -> None:
        """Returns when the engine is lost."""
        away = 0
        while not self.lost.done():
            self._look.clear()
            lookers, self._lookers = self._lookers, []
            try:
                await self.api.healthy()
                samples = await self.api.samples()
            except EngineUnfit:
                samples = {}  # it answers: that is enough
            except EngineAway as problem:
                away += 1
                if away >= AWAY_MAX:
                    self.lost.set_result(f"the engine is away: {problem}")
                    return
                self._lookers += lookers
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            away = 0
            for each in lookers:
                if not each.done():
                    each.set_result(None)
            used = sum(value for _, value in samples.get("vllm:kv_cache_usage_perc", []))
            self.hear(EngineLooked(at_ns=time.monotonic_ns(), cache_percent=min(100.0, max(0.0, 100 * used))))
            if self.mirror.unfit.done():
                self.lost.set_result(self.mirror.unfit.result())
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_S)


class AdapterMetrics(Collector):
    """Counts of an engine's KV events, and of our blocks in them."""

    def __init__(self, mirror: EngineMirror) -> None:
        self._mirror = mirror

    def collect(self) -> Iterable[Metric]:
        counts, passed = self._mirror.reader.counts, self._mirror.blocks.passed_over
        told: dict[Any, float] = {(what,): count for what, count in sorted(counts.items())}
        yield counter("halfmoon_engine_events", "Batches of the engine's KV events.", ("what",), told)
        over: dict[Any, float] = {(why,): count for why, count in sorted(passed.items())}
        yield counter(
            "halfmoon_engine_blocks_passed_over", "Its blocks that are not told of.", ("why",), over
        )
        blocks = len(self._mirror.keys())
        yield gauge(
            "halfmoon_engine_blocks", "Blocks of the cluster's in the engine's cache.", (), {(): blocks}
        )
