"""Decode workers of a make-believe cluster: the real `DecodeState`, in a shell with marks instead of KV."""

from __future__ import annotations

from typing import Any, assert_never

from halfmoon.schemas.decisions import (
    AnnounceYourself,
    CancelOrder,
    ChangeRole,
    Decision,
    EndMove,
    MoveKv,
    StartDecode,
)
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.kv import KvLoaded, KvMessage
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import ResendReply, ResendRequest, TakeReply
from halfmoon.store.pool.slots import Owner
from halfmoon.workers import machines
from halfmoon.workers.attention.actions import AnswerHold, DropHold, LoadHold, OfferHold
from halfmoon.workers.decode import actions as decode_actions
from halfmoon.workers.decode import events as decode_events
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.state import DecodeState
from tests.chaos.holders import Holder
from tests.chaos.remote_caches import Lost, RemoteCaches
from tests.chaos.similar import own_mark, whole_mark
from tests.chaos.stores import Memory
from tests.chaos.texts import BLOCK_TOKENS, END, LAYERS
from tests.chaos.workers import ASK_NS
from tests.conductor.conductor_scripts import MS


class DecodeWorker(Holder):
    """Drives a `DecodeState`. `cache[block][layer]` is the mark of what a block of the engine's cache holds."""

    role = "decode"

    def make_machine(self) -> None:
        world = self.world
        self.state = DecodeState(
            worker_id=self.process_id,
            node_id=self.store.process_id,
            incarnation=self.incarnation,
            layout=world.layout,
            kv_blocks=self.kv_blocks(),
            batch_max=world.batch_max,
            profile=world.profile,
            has_store=not world.null,
            eos_ids=frozenset([END]),
        )
        self.cache: Memory = [[b""] * LAYERS for _ in range(self.kv_blocks())]
        self.hold_nothing()
        self.caches = RemoteCaches(self)
        #: What others said that they hold: order, worker and number.
        self.told: dict[tuple[str, str, int], bool] = {}
        self.hear(decode_events.EngineIdled)

    def lends(self) -> bool:
        return self.world.lending

    def kv_blocks(self) -> int:
        return self.world.decode_kv_blocks

    def machine_heartbeat(self) -> WorkerHeartbeat:
        heartbeat = self.state.heartbeat(self.done[0])
        self.world.slow_holders.told(self, heartbeat)
        return heartbeat

    def open_orders(self) -> list[str]:
        return list(self.state.orders.open)

    def orders_held(self) -> list[str]:
        return [*self.state.orders.open, *self.state.orders.holds.order_ids()]

    def kept_too(self) -> list[str]:
        return self.state.orders.leased()

    def under_way(self) -> str:
        used = self.state.orders.blocks_used
        return super().under_way() or (f"blocks used at {self.process_id}: {used}" if used else "")

    def memory_lost(self) -> None:
        self.hear(decode_events.MemoryLost)

    def obey(self, decision: Decision) -> None:
        match decision:
            case StartDecode():
                if decision.resumes:
                    self.net.counts["resumed elsewhere"] += 1
                self.hear(decode_events.DecodeOrdered, order=decision)
            case MoveKv():
                self.hear(decode_events.MoveOrdered, order=decision)
            case EndMove():
                self.hear(decode_events.MoveEnded, plan_id=decision.plan_id)
            case CancelOrder():
                if decision.order_id in self.state.orders.open:
                    self.cancelled[decision.order_id] = True
                self.hear(machines.OrderCancelled, order_id=decision.order_id)
            case AnnounceYourself():
                self.drop_all()
                self.hear(machines.AnnounceRequested)
            case ChangeRole():
                self.change_role(decision.role)
            case _:
                self.obey_none(decision)

    def hear_kv(self, author_id: str, message: KvMessage) -> None:
        self.hear(decode_events.KvHeard, author_id=author_id, message=message)

    def hear_loaded(self, order_id: str, layer: int) -> None:
        message = KvLoaded(order_id=order_id, layer=layer, first_block=0, blocks=0)
        self.hear_kv(self.store.process_id, message)

    def on(self, kind: type[Any], **fields: Any) -> list[decode_actions.Action]:
        now_ns = self.net.now_ns
        actions = self.state.on(kind(at_ns=now_ns, wall_ns=now_ns, **fields))
        self.state.validate()
        return actions

    def hear(self, kind: type[Any], **fields: Any) -> None:
        """The machine hears, the shell obeys."""
        for action in self.on(kind, **fields):
            self.do(action)

    def soon(self, delay_ns: int, kind: type[Any], **fields: Any) -> None:
        self.later(delay_ns, lambda: self.hear(kind, **fields))

    def resend(self, request: ResendRequest) -> ResendReply:
        (answer,) = self.on(machines.ResendRequested, request=request)
        assert isinstance(answer, machines.AnswerResend), answer
        return answer.reply

    def do(self, action: decode_actions.Action) -> None:
        act, draw = decode_actions, self.net.draw
        match action:
            case act.TakeTokens():
                order_id = action.order_id
                self.take(action, lambda reply: self.taken(order_id, reply))
            case act.Report():
                self.report(action.event)
            case act.Announce():
                self.announce()
            case act.Deliver():
                frontend, message = self.world.frontend(action.frontend_id), action.message
                self.net.send(frontend, lambda: frontend.hear_tokens(message), repeats=True)
            case act.Release():
                self.later(action.after_ns, lambda: self.end_lease(action))
            case act.CopyLayers():
                self.later(draw.randrange(1, 40 * MS), lambda: self.copy(action))
            case act.PushTokens():
                self.push(action)
            case act.PushTail():
                self.push_tail(action)
            case act.ShareOutput():
                self.share(action)
            case act.Wake():
                self.soon(draw.randrange(2 * MS), decode_events.EngineIdled)
            case act.RunStep():
                step_ns = draw.choice([1 * MS, draw.randrange(1, 150 * MS)])
                self.check_step(action.batch)
                waits = self.world.slow_holders.waits(action.batch)
                if self.world.attention:
                    # Slow, so that many die while they decode.
                    slow = self.world.attention_draw
                    step_ns = slow.choice([step_ns, slow.randrange(1, 600 * MS)])
                    step_ns += max(waits.values(), default=0)
                    lost = self.caches.begin(action.batch)
                    self.later(step_ns, lambda: self.step_elsewhere(action.batch, step_ns, lost, waits))
                else:
                    step_ns += max(waits.values(), default=0)
                    lives = self.lenders(action.batch)
                    self.later(step_ns, lambda: self.step(action.batch, step_ns, lives, waits))
            case act.SwapOut():
                self.net.counts["swapped out"] += 1
                held = [list(self.cache[block]) for block in action.table]
                self.worked(decode_events.SwappedOut, held=held)
            case act.SwapIn():
                self.later(draw.randrange(1, 20 * MS), lambda: self.swap_in(action))
            case act.AskHold():
                self.later(action.after_ns, lambda: self.ask_hold(action))
            case AnswerHold() | LoadHold() | OfferHold() | DropHold():
                self.do_hold(action)
            case act.AnswerResend():
                raise AssertionError("a reply to nobody")
            case act.Measure() | act.EndSpan():
                pass
            case _:
                assert_never(action)

    def taken(self, order_id: str, reply: TakeReply | None) -> None:
        self.hear(machines.TokensTaken, order_id=order_id, reply=reply)

    # --- the copy thread ------------------------------------------------------------------------------------

    def copy(self, action: decode_actions.CopyLayers) -> None:
        assert self.view is not None
        for layer, slot, block in action.copies:
            self.cache[block][layer] = own_mark(self.view[slot][layer])
        self.hear(decode_events.LayersCopied, copy_id=action.copy_id)

    def end_lease(self, action: decode_actions.Release) -> None:
        """Asks first whether the order's slots were its own to the end, where that counts."""
        order_id = action.order_id

        def answered(held: bool) -> None:
            if action.confirm:
                self.hear(decode_events.LeaseConfirmed, order_id=order_id, held=held)
            self.release(order_id)

        def work() -> None:
            self.store.guard.hold(Owner(order_id, self.process_id))
            self.later(self.net.lag_ns(), lambda: answered(True))

        if action.confirm:
            self.ask(work, lambda _: answered(False))
        else:
            self.release(order_id)

    def share(self, action: decode_actions.ShareOutput) -> None:
        """Generated blocks join the pool under keys of their own."""
        sequence = self.state.orders.sharing[action.order_id]
        stood_in = sequence.result is not None and sequence.result.similar is not None
        assert not stood_in, ("I118 shares what was computed behind a similar prompt's KV", sequence)
        text = self.world.text(sequence.order.request_id)
        order_id, owner = f"{action.order_id}-out", Owner(f"{action.order_id}-out", self.process_id)
        shared = range(action.known_blocks, len(action.tokens) // BLOCK_TOKENS)
        keys = [text.mark(block) for block in shared]

        def ended(_: object = None) -> None:
            self.release(order_id)
            self.hear(decode_events.OutputShared, order_id=action.order_id)

        def work() -> None:
            hold = self.store.open_put(owner, keys, len(keys), text.keys)
            assert self.view is not None
            self.kept[order_id] = True
            self.net.counts["outputs shared"] += 1
            for place, slot in enumerate(hold.slots):
                have = self.cache[action.table[action.known_blocks + place]]
                assert have == [keys[place]] * LAYERS, (
                    "I96 shares other bytes",
                    action.order_id,
                    place,
                    have,
                )
                if place not in hold.present:
                    self.view[slot][:] = have
            self.store.commit(owner, 0, len(keys))
            self.later(self.net.lag_ns(), ended)

        self.ask(work, ended)

    # --- lending ----------------------------------------------------------------------------------------------

    def ask_hold(self, action: decode_actions.AskHold) -> None:
        """One question; silence ends it."""
        lender, order_id, over = self.world.holder(action.worker_id), action.request.order_id, [False]

        def end(reply: AnswerHold, life: int = 0) -> None:
            if over[0]:
                return
            over[0] = True
            plan_id = action.request.plan_id
            fields = {"order_id": order_id, "worker_id": action.worker_id, "plan_id": plan_id}
            if reply.refused:
                self.hear(decode_events.PartNotHeld, reason=reply.refused, **fields)
            else:
                self.told[order_id, action.worker_id, reply.hold] = True
                self.caches.addresses[action.worker_id] = life
                self.hear(decode_events.PartHeld, hold=reply.hold, **fields)

        def arrive() -> None:
            life = lender.life
            lender.asked(action.request, lambda reply: lender.net.send(self, lambda: end(reply, life)))

        self.later(ASK_NS, lambda: end(AnswerHold(0, refused="it does not answer")))
        self.net.send(lender, arrive)

    def fill(self, block: int, marks: list[bytes]) -> None:
        self.cache[block][:] = marks

    def push_tail(self, action: decode_actions.PushTail) -> None:
        text = self.world.text(self.state.orders.pushing[action.order_id].order.request_id)

        def send() -> None:
            problem = self.caches.push(action, text)
            self.hear(decode_events.TailPushed, order_id=action.order_id, problem=problem)

        self.later(self.net.draw.randrange(1, 20 * MS), send)

    def push(self, action: decode_actions.PushTokens) -> None:
        """Over a channel: it arrives and is answered, or the channel is lost."""
        lender, over = self.world.decode_worker(action.worker_id), [False]

        def end(problem: str) -> None:
            if not over[0]:
                over[0] = True
                moved_bytes = 0 if problem else action.tokens
                self.hear(decode_events.TokensPushed, moved_bytes=moved_bytes, problem=problem)

        def arrive() -> None:
            blocks = lender.offered.get(action.hold)
            problem = "it has no such hold" if blocks is None else ""
            if blocks is not None and lender.pushed[action.hold] != action.first:
                problem = "other tokens were due"
            if blocks is not None and not problem:
                for place, source in enumerate(action.blocks):
                    block = action.first // BLOCK_TOKENS + place
                    if action.first + action.tokens >= (block + 1) * BLOCK_TOKENS:  # its last token is there
                        lender.cache[blocks[block]][:] = self.cache[source]
                lender.pushed[action.hold] += action.tokens
            lender.net.send(self, lambda: end(problem))

        self.later(ASK_NS, lambda: end("it does not answer"))
        self.net.send(lender, arrive)

    # --- the compute thread ---------------------------------------------------------------------------------

    def worked(self, kind: type[Any], **fields: Any) -> None:
        """The compute thread is done with one instruction, and asks for the next."""

        def end() -> None:
            self.hear(kind, **fields)
            self.hear(decode_events.EngineIdled)

        self.later(self.net.draw.randrange(1, 20 * MS), end)

    def swap_in(self, action: decode_actions.SwapIn) -> None:
        held: Any = action.held
        for block, marks in zip(action.table, held, strict=True):
            self.cache[block][:] = marks
        self.hear(decode_events.SwappedIn)
        self.hear(decode_events.EngineIdled)

    def check_step(self, batch: list[DecodeSequence]) -> None:
        """Every block that the step reads holds its sequence's KV; it writes the next token's into the last."""
        for sequence in batch:
            text, have = self.world.text(sequence.order.request_id), len(sequence.output)
            assert sequence.output == text.tokens[:have], ("I97 decodes another text", sequence.order_id)
            if self.world.null or sequence.elsewhere:
                continue
            place, offset = divmod(sequence.length, BLOCK_TOKENS)
            assert len(sequence.table) > place, ("I102 no block to write to", sequence.order_id, place)
            if offset == 0:
                self.cache[sequence.table[place]][:] = [text.mark(place)] * LAYERS
            for block in range(sequence.away, place + 1):
                marks = self.cache[sequence.table[block]]
                if sequence.left_out:
                    marks = [whole_mark(mark) for mark in marks]
                wanted = [text.mark(block)] * LAYERS
                assert marks == wanted, ("I96 KV of somebody else", sequence.order_id, block, marks, wanted)

    def lenders(self, batch: list[DecodeSequence]) -> dict[tuple[str, int], int]:
        """The lives of those who hold parts of the batch, by worker and hold; 0 for one that is not there or does not
        have the part.
        """
        lives: dict[tuple[str, int], int] = {}
        for sequence in batch:
            text = self.world.text(sequence.order.request_id)
            for part in sequence.parts:
                said = (sequence.order_id, part.worker_id, part.hold)
                assert said in self.told, ("I100 counts as held what nobody said", said)
                lender = self.world.decode_worker(part.worker_id)
                there = lender.alive and self.net.reachable(lender) and self.net.reachable(self)
                held = lender.offered.get(part.hold) if there else None
                if held is not None:
                    have, all_of_it = lender.pushed[part.hold], len(sequence.blocks_of(part)) * BLOCK_TOKENS
                    assert have == all_of_it, (
                        "I100 asked for what is not there yet",
                        sequence.order_id,
                        have,
                    )
                lives[part.worker_id, part.hold] = lender.life if held is not None else 0
                for place, block in enumerate(held or ()):
                    wanted = [text.mark(sequence.blocks_of(part).start + place)] * LAYERS
                    assert lender.cache[block] == wanted, (
                        "I96 lends KV of somebody else",
                        sequence.order_id,
                        place,
                    )
        return lives

    def step(
        self,
        batch: list[DecodeSequence],
        step_ns: int,
        lives: dict[tuple[str, int], int],
        waits: dict[str, int],
    ) -> None:
        lives_now = self.lenders(batch)
        for (worker_id, hold), life in lives.items():
            if not life or lives_now[worker_id, hold] != life:
                lender = self.world.decode_worker(worker_id)
                there = lender.alive and self.net.reachable(lender) and self.net.reachable(self)
                # Who answers says which part it does not have.
                refused = hold if there and life in (0, lender.life) else 0
                self.net.counts["rows refused" if refused else "lenders lost"] += 1
                fields = {"worker_id": worker_id, "reason": "it is away", "hold": refused}
                self.hear(decode_events.StepFailed, **fields)
                self.hear(decode_events.EngineIdled)
                return
        self.check_step(batch)
        self.step_ended(batch, step_ns, waits)

    def step_elsewhere(
        self, batch: list[DecodeSequence], step_ns: int, lost: Lost | None, waits: dict[str, int]
    ) -> None:
        lost = lost or self.caches.end(batch)
        if lost is None:
            self.step_ended(batch, step_ns, waits)
        else:
            self.hear(decode_events.StepFailed, **lost._asdict())
            self.hear(decode_events.EngineIdled)

    def step_ended(self, batch: list[DecodeSequence], step_ns: int, waits: dict[str, int]) -> None:
        tokens = []
        for sequence in batch:
            drawn = self.world.text(sequence.order.request_id).token(len(sequence.output))
            tokens.append(sequence.next_known() or SampledToken(token_id=drawn))
        self.world.slow_holders.step_ended(self, waits)
        self.hear(decode_events.StepEnded, tokens=tokens, step_ns=step_ns, waits_ns=waits)
        self.hear(decode_events.EngineIdled)
