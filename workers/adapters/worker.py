"""The adapter of an engine: a worker, and the store of its node, to the cluster; a client to the engine.

The shell of `AdapterState`, or of the machine of another role: it feeds the machine events and obeys its actions.
Nothing is decided here. Beside it the engine's cache is mirrored (`EngineMirror`) and announced as a node's blocks are,
by a store that nobody can read. An engine that does not answer any more is lost: the worker leaves, its requests are
placed anew, and the command that runs it begins anew when the engine is back. The way to the engine is `EngineLink`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import assert_never

from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    Decision,
    Fetch,
    StartDecode,
    StartMixed,
    StartPrefill,
)
from halfmoon.schemas.events import StoreJoined
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.weights import PrefixCacheReset, ResetPrefixCache
from halfmoon.store.agent.announcer import Announcer
from halfmoon.workers import machines
from halfmoon.workers.adapters.actions import Action, AskEngine, HangUp, StepSeen, TellDecode
from halfmoon.workers.adapters.decode_half import DecodeAdapterState
from halfmoon.workers.adapters.engine_link import EngineLink
from halfmoon.workers.adapters.events import PromptOrdered
from halfmoon.workers.adapters.prefill_half import PrefillAdapterState
from halfmoon.workers.adapters.relayed import RelayedAnswers
from halfmoon.workers.adapters.state import AdapterState
from halfmoon.workers.decode.actions import EndSpan
from halfmoon.workers.decode.events import DecodeOrdered, KvHeard
from halfmoon.workers.decode.spans import end_decode
from halfmoon.workers.machines import Announce, AnswerResend, Deliver, Report, TakeTokens
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


MACHINES: dict[WorkerRole, type[AdapterState]] = {
    "mixed": AdapterState,
    "prefill": PrefillAdapterState,
    "decode": DecodeAdapterState,
}


class AdapterWorker(Worker):
    """See the module; every decision is in `state`. `eos_ids`: the model's end tokens. `role`: one of `MACHINES`."""

    state: AdapterState

    def __init__(
        self,
        bus: Bus,
        engine: EngineLink,
        config: WorkerConfig,
        eos_ids: frozenset[int],
        role: WorkerRole = "mixed",
    ) -> None:
        self.role = role
        super().__init__(bus, engine.api, None, config)
        self.engine_link, self._eos_ids = engine, eos_ids
        engine.hear = self.hear
        engine.relayed = self._relayed = RelayedAnswers(
            bus, config.worker_id, engine.api.reached_at, engine.api.headers, engine.vocabulary
        )
        self.announcer = Announcer(
            bus, node_id=config.node_id, incarnation=self.incarnation, heartbeat_ns=config.heartbeat_ns
        )
        self._asking: dict[str, asyncio.Task[None]] = {}
        #: Of these its log has a line; one is enough.
        self._warned: set[str] = set()

    async def prepare(self) -> None:
        config = self.config
        facts = self.facts(self._eos_ids)
        self.state = MACHINES[self.role](facts, config.profile, words=self.engine_link.words)
        await self.serve_resends()
        await self.bus.serve(subjects.reset(config.worker_id), ResetPrefixCache, self._reset_prefix_cache)
        await self._relayed.open()
        if self.role == "decode":
            self.spawn(self._follow_kv(self.bus.follow_kv(await self.bus.open_kv(config.worker_id))))
        # Before the worker: it takes no orders while its node has no store.
        mirror = self.engine_link.mirror
        mirror.changed = self.announcer.add
        self.announcer.start(mirror, self._store_joined)
        self.spawn(self.engine_link.look_after())

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
        self.engine_link.mirror.changed = None
        await self.announcer.leave(self._why_it_leaves())
        self.engine_link.lost.cancel()

    def _why_it_leaves(self) -> str:
        return self.engine_link.why_lost()[:500] or "stopped"

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
                self.deliver(action)
            case AskEngine():
                if action.computes_again:
                    self._warn_once(PROMPTS_RECOMPUTED, action.computes_again)
                task = self.spawn(self.engine_link.ask(action))
                self._asking[action.order_id] = task
                task.add_done_callback(functools.partial(self._asked, action.order_id))
            case TellDecode():
                told, kind = action.message, type(action.message).__name__
                subject = subjects.kv(action.decode_worker_id, kind, self.config.worker_id)
                self.bus.publish_soon(subject, told, message_id=f"{told.order_id}-{kind}")
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

    async def _follow_kv(self, heard: AsyncIterator[tuple[str, KvMessage]]) -> None:
        async for author_id, message in heard:
            self.hear(KvHeard(at_ns=time.monotonic_ns(), author_id=author_id, message=message))

    async def take_tokens(self, ask: TakeTokens) -> None:
        """No grammar is compiled: the machine refuses a request with one, because no engine takes ours."""
        reply = await self.inbox.take(ask.frontend_id, ask.request_id, ask.order_id, self.role)
        self._hear_taken(ask, reply)

    async def _reset_prefix_cache(self, _: ResetPrefixCache) -> PrefixCacheReset:
        return await self.engine_link.reset_prefix_cache()
