"""Prefill workers of a make-believe cluster: the real `PrefillState`, in a shell that computes marks instead of KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    ChangeRole,
    Decision,
    StartPrefill,
    StartStage,
)
from halfmoon.schemas.events import PrefillFinished, WorkerHeartbeat
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.store import order_of_hold, reference_hold
from halfmoon.schemas.tokens import ResendReply, ResendRequest, TakeReply
from halfmoon.store.errors import StoreError, StoreFull
from halfmoon.store.pool.slots import Owner
from halfmoon.workers import machines
from halfmoon.workers.machines import AnswerResend, Deliver, ResendRequested
from halfmoon.workers.model.segments import AWAY
from halfmoon.workers.prefill import actions as prefill_actions
from halfmoon.workers.prefill import events as prefill_events
from halfmoon.workers.prefill.cache_window import CacheWindow
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.state import PrefillState
from tests.chaos.similar import StandIn, fetch_reference, reserve_reference
from tests.chaos.stages import StageCaller, StageChannel, StageRun
from tests.chaos.stores import Fetching, Memory
from tests.chaos.texts import BLOCK_TOKENS, END, LAYERS, Text
from tests.chaos.workers import CONTEXT_TOKENS, Worker
from tests.conductor.conductor_scripts import MS, S

#: How long the engine waits for a cached layer.
LAYER_NS_MAX = 4 * S


class PrefillWorker(Worker):
    """Drives a `PrefillState`."""

    role = "prefill"

    def make_machine(self) -> None:
        world = self.world
        self.state = PrefillState(
            self.facts(frozenset([END])),
            prepared_max=world.prepared_max,
            chunk_tokens=world.chunk_tokens,
            stream_layers=world.stream_layers,
        )
        self.computation: Computation | StageRun | None = None
        #: Channels of those whose prompts this worker is to compute a part of, by order.
        self.came: dict[str, StageChannel] = {}
        self.pushes: dict[str, int] = {}
        #: Keys of the similar prompts of open orders.
        self.referring: dict[str, list[bytes]] = {}

    def facts(self, eos_ids: frozenset[int] = frozenset()) -> machines.WorkerFacts:
        return machines.WorkerFacts(
            worker_id=self.process_id,
            incarnation=self.incarnation,
            node_id=self.store.process_id,
            layout=self.world.layout,
            kv_blocks=self.kv_blocks(),
            has_store=not self.world.null,
            eos_ids=eos_ids,
        )

    def kv_blocks(self) -> int:
        return self.world.prefill_kv_blocks

    def prompt_tokens_max(self) -> int:
        return CONTEXT_TOKENS if self.state.outgrows_cache else 0

    def stage_addresses(self) -> list[str]:
        return self.world.stages.addresses(self.process_id)

    def machine_heartbeat(self) -> WorkerHeartbeat:
        return self.state.heartbeat(self.done[0])

    def open_orders(self) -> list[str]:
        return list(self.state.jobs)

    def obey(self, decision: Decision) -> None:
        match decision:
            case StartPrefill():
                self.hear(prefill_events.PrefillOrdered, order=decision)
            case StartStage():
                self.hear(prefill_events.StageOrdered, order=decision)
            case CancelOrder():
                if decision.order_id in self.state.jobs:
                    self.cancelled[decision.order_id] = True
                self.hear(machines.OrderCancelled, order_id=decision.order_id)
            case AnnounceYourself():
                self.drop_all()
                self.hear(machines.AnnounceRequested)
            case ChangeRole():
                self.change_role(decision.role)
            case _:
                self.obey_none(decision)

    def hear(self, kind: type[Any], **fields: Any) -> None:
        """The machine hears, the shell obeys."""
        state = self.state
        actions = state.on(kind(at_ns=self.net.now_ns, **fields))
        state.validate()
        for action in actions:
            self.do(action)

    def soon(self, delay_ns: int, kind: type[Any], **fields: Any) -> None:
        self.later(delay_ns, lambda: self.hear(kind, **fields))

    def hear_loaded(self, order_id: str, layer: int) -> None:
        order = order_of_hold(order_id)
        kind = prefill_events.LayersFetched if order == order_id else prefill_events.ReferenceLayers
        self.hear(kind, order_id=order, layer=layer)

    def text(self, order_id: str) -> Text:
        assert order_id in self.state.jobs, ("I103 works for an ended order", order_id)
        return self.world.text(self.state.jobs[order_id].order.request_id)

    def do(self, action: prefill_actions.Action) -> None:
        act = prefill_actions
        match action:
            case act.SendLayer():
                self.push(action)
            case act.CommitPrompt():
                owner = Owner(action.order_id, self.process_id)
                first, blocks = action.first_block, action.blocks
                self.ask(lambda: self.store.commit(owner, first, blocks), lambda _: None)
            case act.TakeTokens():
                order_id = action.order_id
                self.take(action, lambda reply: self.taken(order_id, reply))
            case act.ReserveSlots():
                self.open_put(action)
            case act.PauseOrder():
                self.soon(action.pause_ns, prefill_events.PauseEnded, order_id=action.order_id)
            case act.StartFetch():
                self.fetch(action)
            case act.ReserveReference():
                reserve_reference(self, action)
            case act.FetchReference():
                fetch_reference(self, action)
            case act.StartPush():
                self.open_push(action)
            case act.ComputePrompt():
                self.computation = Computation(self, action, self.text(action.order_id))
            case act.ComputeStage():
                self.computation = StageRun(self, action, self.text(action.order_id))
            case act.DropStage():
                if (came := self.came.pop(action.order_id, None)) is not None:
                    came.close()
            case (
                act.LoadLayers()
                | act.FailLoads()
                | act.LoadReference()
                | act.FailReference()
                | act.StopComputing()
            ):
                assert self.computation is not None, action
                assert self.computation.order_id == action.order_id, (self.computation.order_id, action)
                self.computation.steer(action)
            case act.DrawFirstToken():
                token = SampledToken(token_id=self.text(action.order_id).token(0))
                kind = prefill_events.FirstTokenDrawn
                self.soon(self.net.draw.randrange(20 * MS), kind, order_id=action.order_id, first=token)
            case act.SendResult():
                decode, result = self.world.decode_worker(action.decode_worker_id), action.result
                self.net.send(decode, lambda: decode.hear_kv(self.process_id, result), repeats=True)
            case Deliver():
                self.deliver(action)
            case act.EndPush():
                self.close_push(action.order_id)
            case act.Report():
                self.report(action.event)
            case act.EndOrder():
                self.pushes.pop(action.order_id, None)
                if not self.world.null:
                    self.release(action.order_id)
                if self.referring.pop(action.order_id, None) is not None:
                    self.release(reference_hold(action.order_id))
            case act.Announce():
                self.announce()
            case act.BeginSpan() | AnswerResend():
                raise AssertionError("nothing is traced here, and nobody asked")
            case _:
                assert_never(action)

    def role_in(self, order_id: str) -> str:
        job = self.state.jobs.get(order_id)  # it may have ended while the frontend was out of reach
        return "mixed" if isinstance(job, Job) and job.order.answers else self.role

    def report(self, event: Any) -> None:
        """Where the worker answers a request, the report of its prefill comes behind."""
        if isinstance(event, PrefillFinished) and event.order_id in self.state.answers:
            assert event.order_id in self.answered, ("I125 not answered", self.process_id, event)
            self.net.counts["answers of one token"] += 1
            self.say(event)
        else:
            super().report(event)

    def deliver(self, action: Deliver) -> None:
        frontend, message = self.world.frontend(action.frontend_id), action.message
        self.net.send(frontend, lambda: frontend.hear_tokens(message), repeats=True)

    def resend(self, request: ResendRequest) -> ResendReply:
        (answer,) = self.state.on(ResendRequested(at_ns=self.net.now_ns, request=request))
        assert isinstance(answer, AnswerResend), answer
        return answer.reply

    def taken(self, order_id: str, reply: TakeReply | None) -> None:
        self.hear(machines.TokensTaken, order_id=order_id, reply=reply)

    def open_put(self, action: prefill_actions.ReserveSlots) -> None:
        order_id, owner = action.order_id, Owner(action.order_id, self.process_id)

        def work() -> None:
            hold = self.store.open_put(owner, split_keys(action.block_keys), action.blocks, [])
            slots, present = list(hold.slots), list(hold.present)
            self.later(self.net.lag_ns(), lambda: answered(slots, present))

        def answered(slots: list[int], present: list[int]) -> None:
            if order_id in self.open_orders():
                self.kept[order_id] = True
                self.pushes[order_id] = 0
            self.hear(prefill_events.SlotsReserved, order_id=order_id, slots=slots, present=present)

        self.ask(work, lambda problem: self.put_failed(prefill_events.ReserveSlotsFailed, order_id, problem))

    def put_failed(self, kind: type[Any], order_id: str, problem: StoreError) -> None:
        full = isinstance(problem, StoreFull)
        self.net.counts["store full"] += full
        self.hear(kind, order_id=order_id, reason=str(problem), full=full)

    def fetch(self, action: prefill_actions.StartFetch) -> None:
        order_id, owner = action.order_id, Owner(action.order_id, self.process_id)
        holders = [
            self.world.store(node) for node in dict.fromkeys([action.source_node_id, *action.replicas])
        ]

        def failed(problem: str) -> None:
            self.hear(prefill_events.FetchFailed, order_id=order_id, reason=problem)

        def answered(source: str, problem: str) -> None:
            if problem:
                failed(problem)
                return
            self.hear(
                prefill_events.BlocksFetched,
                order_id=order_id,
                source_node_id=source,
                moved_bytes=action.blocks * self.world.layout.block_bytes,
                elapsed_ns=self.net.draw.randrange(10 * MS),
            )

        def work() -> None:
            answer = self.watched(answered, failed)
            Fetching(self.store, owner, action.first_block, action.blocks, holders, answer)

        self.ask(work, lambda problem: failed(str(problem)))

    def open_push(self, action: prefill_actions.StartPush) -> None:
        order_id, owner = action.order_id, Owner(action.order_id, self.process_id)
        target = self.world.store(action.target_node_id)
        decode = self.world.decode_worker(action.decode_worker_id)

        def work() -> None:
            self.store.open_push(owner, action.request_id, target, decode)
            self.soon(self.net.lag_ns(), prefill_events.PushOpened, order_id=order_id)

        self.ask(work, lambda problem: self.put_failed(prefill_events.OpenPushFailed, order_id, problem))

    def push(self, action: prefill_actions.SendLayer) -> None:
        """Nobody waits for its answer: a lost one is found when the push is closed."""
        self.pushes[action.order_id] += 1
        store, owner = self.store, Owner(action.order_id, self.process_id)
        layers = range(action.layer, action.layer + action.layers)
        first, blocks = action.first_block, action.blocks
        if not self.net.chance(self.net.loss / 10):
            self.net.send_surely(self, store, lambda: store.push(owner, layers, first, blocks))

    def computed(self, order_id: str) -> None:
        """The shell asks whether the slots that were attended to are still the order's."""
        owner, kind = Owner(order_id, self.process_id), prefill_events.PromptComputed

        def work() -> None:
            self.store.guard.hold(owner)
            self.soon(self.net.lag_ns(), kind, order_id=order_id, finished_at_ns=self.net.now_ns)

        def failed(problem: StoreError) -> None:
            self.hear(prefill_events.LoadFailed, order_id=order_id, reason=str(problem))

        self.ask(work, failed)

    def close_push(self, order_id: str) -> None:
        owner, pushes = Owner(order_id, self.process_id), self.pushes[order_id]

        def failed(problem: str) -> None:
            self.hear(prefill_events.PushFailed, order_id=order_id, reason=problem)

        def answered(problem: str) -> None:
            if problem:
                failed(problem)
                return
            draw = self.net.draw
            self.hear(
                prefill_events.PushClosed,
                order_id=order_id,
                moved_bytes=draw.randrange(10**7),
                elapsed_ns=draw.randrange(10 * MS),
            )

        def work() -> None:
            running = self.store.pushes.get(owner)
            if running is None:
                raise StoreError(f"order {order_id} has no push here")
            self.store.guard.hold(owner)
            running.close(pushes, self.watched(answered, failed))

        self.ask(work, lambda problem: failed(str(problem)))


class Computation:
    """A prompt on the compute thread. Layers of the prefix are loaded as they come, then the chunks are computed."""

    def __init__(self, worker: PrefillWorker, action: prefill_actions.ComputePrompt, text: Text) -> None:
        self.worker, self.action, self.text = worker, action, text
        self.order_id = action.order_id
        self.fetched_layer = action.fetched_layer
        self.failure = ""
        self.stopped = False
        self.began_ns = worker.net.now_ns
        self.memory = worker.view
        layout = worker.world.layout
        self.window = CacheWindow(
            layout.blocks(len(action.token_ids)),
            room=worker.kv_blocks(),
            each=layout.segment_tokens // BLOCK_TOKENS,
        )
        self.outgrows = self.window.blocks < layout.blocks(len(action.token_ids))
        self.cache: Memory = [[b""] * LAYERS for _ in range(self.window.blocks)]
        draw = worker.net.draw
        self.pace_ns = draw.choice([1 * MS, draw.randrange(1, 60 * MS)])
        #: Who has the first layers; the others are computed here.
        self.caller = StageCaller(self) if action.stages else None
        self.first_layer = action.stages[-1].first_layer if action.stages else 0
        self.stand_in: StandIn | None = None
        if (reference := action.reference) is not None:
            starts = [chunk.start for chunk in action.chunks]
            self.stand_in = StandIn(self, reference, starts.index(reference.first_token))
        self._next(self._load_layer, self.first_layer)

    def steer(
        self,
        action: prefill_actions.LoadLayers
        | prefill_actions.FailLoads
        | prefill_actions.LoadReference
        | prefill_actions.FailReference
        | prefill_actions.StopComputing,
    ) -> None:
        match action:
            case prefill_actions.LoadLayers():
                self.fetched_layer = max(self.fetched_layer, action.layer)
            case prefill_actions.FailLoads():
                self.failure = action.reason
            case prefill_actions.LoadReference() | prefill_actions.FailReference():
                if self.stand_in is not None:
                    self.stand_in.steer(action)
            case prefill_actions.StopComputing():
                self.stopped = True
            case _:
                assert_never(action)

    def _next(self, step: Callable[[int], None], number: int) -> None:
        self.worker.later(self.pace_ns, lambda: step(number))

    def tell(self, kind: type[Any], **fields: Any) -> None:
        self.worker.hear(kind, order_id=self.order_id, **fields)

    def _end(self, kind: type[Any], **fields: Any) -> None:
        if self.caller is not None:
            self.caller.close()
        self.tell(kind, **fields)

    def _lost(self) -> bool:
        """The other stage does not do its part; then this was told, and nothing more is computed."""
        if self.caller is None:
            return False
        self.caller.poll()
        if self.caller.problem:
            reason, stage_id = self.caller.problem, self.caller.stage_id
            self._end(prefill_events.StageLost, stage_id=stage_id, reason=f"stage {stage_id}: {reason}")
        return bool(self.caller.problem)

    def _load_layer(self, layer: int) -> None:
        if self.stopped:
            self._end(prefill_events.ComputingStopped)
        elif self._lost():
            pass
        elif layer == LAYERS or not self.action.prefix_blocks:
            self.compute_chunk(0)
        elif self.failure or self.worker.net.now_ns - self.began_ns > LAYER_NS_MAX:
            self._end(prefill_events.LoadFailed, reason=self.failure or "nothing came")
        elif layer > self.fetched_layer:
            self._next(self._load_layer, layer)
        else:
            table = self._table(self.action.prefix_blocks, 1)
            for block in range(self.action.prefix_blocks):
                self._check(block, layer)
                if table[block] != AWAY:
                    self.cache[table[block]][layer] = self.text.mark(block)
            self.tell(prefill_events.PrefixLayerLoaded, layer=layer)
            self._next(self._load_layer, layer + 1)

    def _table(self, first: int, blocks: int) -> list[int]:
        return self.window.table(list(range(len(self.cache))), first, blocks)

    def _attend(self, first: int, blocks: int, layer: int) -> None:
        """A chunk writes its own blocks to the cache, and attends to what is before it: there, or in the pool."""
        if not self.outgrows:
            return
        table = self._table(first, blocks)
        for block in range(first, first + blocks):
            self.cache[table[block]][layer] = self.text.mark(block)
        for block in range(first):
            if table[block] == AWAY:
                self._check(block, layer)
            else:
                have, wanted = self.cache[table[block]][layer], self.text.mark(block)
                assert have == wanted, (
                    "I96 attends to other bytes",
                    self.order_id,
                    block,
                    layer,
                    have,
                    wanted,
                )

    def _check(self, block: int, layer: int) -> None:
        self.held(block, layer)

    def held(self, block: int, layer: int) -> bytes:
        """What the pool has of the prompt's block."""
        assert self.memory is not None
        have, wanted = self.memory[self.action.slots[block]][layer], self.text.mark(block)
        assert have == wanted, ("I96 loaded other bytes", self.order_id, block, layer, have, wanted)
        return have

    def store(self, block: int, layer: int, mark: bytes) -> None:
        """Into the pool; committed blocks stay as they are."""
        assert self.memory is not None
        if block not in self.action.present:
            self.memory[self.action.slots[block]][layer] = mark

    def compute_chunk(self, number: int, *, whole: bool = False) -> None:
        """`whole`: nothing stands in for it."""
        chunks = self.action.chunks
        if self.stopped:
            self._end(prefill_events.ComputingStopped)
            return
        if number == len(chunks):
            if self.outgrows:
                self.worker.net.counts["outgrown caches"] += 1
                self.worker.computed(self.order_id)
            else:
                self._end(prefill_events.PromptComputed, finished_at_ns=self.worker.net.now_ns)
            return
        if self.stand_in is not None and self.stand_in.number == number and not whole:
            self.stand_in.step(0)
            return
        if self.caller is not None:
            if self._lost():
                return
            if self.caller.rows <= number:
                self._next(self.compute_chunk, number)
                return
        chunk = chunks[number]
        first, end = chunk.start // BLOCK_TOKENS, -(-chunk.stop // BLOCK_TOKENS)
        for layer in range(self.first_layer, self.worker.world.layout.layers):
            for block in range(first, end):
                self.store(block, layer, self.text.mark(block))
            self._attend(first, end - first, layer)
            self.tell(prefill_events.LayerStored, layer=layer, first_block=first, blocks=end - first)
        if not self.worker.world.null:
            self.tell(prefill_events.ChunkStored, first_block=first, blocks=end - first)
        # Small chunks take no time of their own: three at a time.
        if number % 3 == 2 or number + 1 == len(chunks):
            self._next(self.compute_chunk, number + 1)
        else:
            self.compute_chunk(number + 1)
