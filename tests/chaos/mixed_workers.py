"""Mixed workers of a make-believe cluster: the real `MixedState`, in a shell that computes marks instead of KV.

An iteration takes a while, and is checked when it ends: every row must find in the cache, token by token, what its text
has before it, or the order must be lost because its slots were given away before they had been read.
"""

from __future__ import annotations

from typing import Any

from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartMixed
from halfmoon.schemas.events import PrefillFinished, RequestFinished, WorkerHeartbeat
from halfmoon.schemas.sampling import SampledToken
from halfmoon.store.pool.slots import Owner
from halfmoon.workers import machines
from halfmoon.workers.decode import actions as decode_actions
from halfmoon.workers.decode import events as decode_events
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.mixed.actions import ChunkRows, RunIteration
from halfmoon.workers.mixed.events import IterationMade, MixedOrdered
from halfmoon.workers.mixed.state import MixedState
from halfmoon.workers.prefill.actions import EndOrder
from tests.chaos.prefill_workers import PrefillWorker
from tests.chaos.stores import Memory
from tests.chaos.texts import BLOCK_TOKENS, END, LAYERS, Text
from tests.chaos.workers import Worker
from tests.conductor.conductor_scripts import MS


class MixedWorker(PrefillWorker):
    """Drives a `MixedState`. `cache[block][offset]` stands for the KV of one token."""

    role = "mixed"

    def make_machine(self) -> None:
        world = self.world
        self.state: Any = MixedState(
            self.facts(frozenset([END])),
            world.profile,
            batch_max=world.batch_max,
            budget_tokens=self.token_budget(),
            iteration_ns=self.iteration_ns(),
            prepared_max=world.prepared_max,
        )
        self.pushes: dict[str, int] = {}
        self.cache: Memory = [[b""] * BLOCK_TOKENS for _ in range(self.kv_blocks())]
        self.hear(decode_events.EngineIdled)

    def kv_blocks(self) -> int:
        return self.world.mixed_kv_blocks

    def token_budget(self) -> int:
        return self.world.token_budget

    def iteration_ns(self) -> int:
        return self.world.iteration_ns

    def prompt_tokens_max(self) -> int:
        return 0

    def stage_addresses(self) -> list[str]:
        return []

    def machine_heartbeat(self) -> WorkerHeartbeat:
        heartbeat: WorkerHeartbeat = self.state.heartbeat(self.done[0])
        return heartbeat

    def open_orders(self) -> list[str]:
        return list(self.state.requests)

    def under_way(self) -> str:
        used = self.state.kv_blocks_used
        return super().under_way() or (f"blocks used at {self.process_id}: {used}" if used else "")

    def text(self, order_id: str) -> Text:
        return self.world.text(self.state.requests[order_id].order.request_id)

    def obey(self, decision: Decision) -> None:
        match decision:
            case StartMixed():
                self.hear(MixedOrdered, order=decision)
            case CancelOrder():
                if decision.order_id in self.state.requests:
                    self.cancelled[decision.order_id] = True
                self.hear(machines.OrderCancelled, order_id=decision.order_id)
            case AnnounceYourself():
                self.drop_all()
                self.hear(machines.AnnounceRequested)
            case _:
                raise AssertionError(decision)

    def role_in(self, order_id: str) -> str:
        return self.role

    def report(self, event: Any) -> None:
        """That its prompt is computed does not answer an order."""
        if isinstance(event, RequestFinished):
            self.net.counts["prompts computed again"] += event.preemptions
        if isinstance(event, PrefillFinished):
            assert event.order_id not in self.cancelled, (
                "I89 cancelled and answered",
                self.process_id,
                event,
            )
            self.say(event)
        else:
            Worker.report(self, event)

    def do(self, action: Any) -> None:
        act = decode_actions
        match action:
            case RunIteration():
                self.begin(action)
            case act.Deliver():
                self.deliver(action)
            case act.Wake():
                self.soon(self.net.draw.randrange(2 * MS), decode_events.EngineIdled)
            case act.Measure() | act.EndSpan():
                pass
            case EndOrder():
                if not self.world.null:
                    self.release(action.order_id)
            case _:
                super().do(action)

    # --- the compute thread ---------------------------------------------------------------------------------

    def begin(self, step: RunIteration) -> None:
        """What is loaded is what lies in the slots now."""
        loaded = {
            block: list(self.view[slot]) for load in step.loads for slot, block in load.blocks if self.view
        }
        draw = self.world.mixed_draw
        step_ns = draw.choice([1 * MS, draw.randrange(1, 150 * MS), draw.randrange(1, 400 * MS)])
        if step.chunks and step.decodes:
            self.net.counts["mixed iterations"] += 1
        computed = {chunk.sequence.order_id for chunk in step.chunks}
        self.net.counts["prefixes loaded in part"] += len({load.order_id for load in step.loads} - computed)
        self.later(step_ns, lambda: self.loaded(step, step_ns, loaded))

    def loaded(self, step: RunIteration, step_ns: int, loaded: dict[int, list[bytes]]) -> None:
        """The shell asks whether the slots were still the orders' when all had been read."""
        unsure = [load.order_id for load in step.loads]
        lost: list[str] = []

        def next_one() -> None:
            if not unsure:
                self.end(step, step_ns, loaded, lost)
                return
            owner = Owner(unsure.pop(), self.process_id)

            def held() -> None:
                self.store.guard.hold(owner)
                self.later(self.net.lag_ns(), next_one)

            def gone(_: object) -> None:
                lost.append(owner.order_id)
                next_one()

            self.ask(held, gone)

        next_one()

    def end(self, step: RunIteration, step_ns: int, loaded: dict[int, list[bytes]], lost: list[str]) -> None:
        for block, marks in loaded.items():
            assert len(set(marks)) == 1 or lost, ("I96 loaded layers of two blocks", marks)
            self.cache[block] = [marks[0]] * BLOCK_TOKENS
        for chunk in step.chunks:
            if chunk.sequence.order_id not in lost:
                self.compute(chunk.sequence, chunk.table, chunk.start, chunk.token_ids)
                self.store_blocks(chunk)
        for row in step.decodes:
            self.compute(row.sequence, row.table, row.position, [row.token_id])
        self.net.counts["slots lost while loading"] += len(lost)
        self.hear(
            IterationMade,
            wall_ns=self.net.now_ns,
            decoded=[self.drawn(row.sequence) for row in step.decodes if row.draws],
            first=[self.drawn(chunk.sequence) for chunk in step.chunks if chunk.draws],
            step_ns=step_ns,
            load_ns=step_ns // 2 if step.loads else 0,
            lost=lost,
        )
        self.hear(decode_events.EngineIdled)

    def drawn(self, sequence: DecodeSequence) -> SampledToken:
        text = self.world.text(sequence.order.request_id)
        return SampledToken(token_id=text.token(len(sequence.output)))

    def compute(self, sequence: DecodeSequence, table: list[int], start: int, token_ids: list[int]) -> None:
        """On top of all that the text has before it."""
        text = self.world.text(sequence.order.request_id)
        prompt = text.arrived.prompt_tokens
        for place, token_id in enumerate(token_ids, start):
            wanted = text.tokens[place - prompt] if place >= prompt else sequence.prompt[place]
            assert token_id == wanted, (
                "I97 computes another text",
                sequence.order_id,
                place,
                token_id,
                wanted,
            )
        if self.world.null:
            return
        assert len(table) * BLOCK_TOKENS >= start + len(token_ids), (
            "I102 rows without blocks",
            sequence.order_id,
        )
        for place in range(start):
            have = self.cache[table[place // BLOCK_TOKENS]][place % BLOCK_TOKENS]
            assert have == text.kv(place), (
                "I96 attends to other bytes",
                sequence.order_id,
                place,
                start,
                have,
            )
        for place in range(start, start + len(token_ids)):
            self.cache[table[place // BLOCK_TOKENS]][place % BLOCK_TOKENS] = text.kv(place)

    def store_blocks(self, chunk: ChunkRows) -> None:
        """Into slots that are the order's still; `writing` refuses the others."""
        owner, text = (
            Owner(chunk.sequence.order_id, self.process_id),
            self.world.text(chunk.sequence.order.request_id),
        )
        for block, slot in chunk.stores:
            place = chunk.table.index(block)
            assert self.cache[block] == [text.mark(place)] * BLOCK_TOKENS, (
                "I96 stores other bytes",
                owner,
                place,
            )
            hold = self.store.pool.holds.get(owner)
            if self.view is self.store.memory and hold is not None and slot in hold.slots:
                self.view[slot][:] = [text.mark(place)] * LAYERS
