"""Decode workers of a make-believe cluster: the real `DecodeState`, in a shell with marks instead of KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

from halfmoon.schemas.decisions import AnnounceYourself, CancelOrder, Decision, StartDecode
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.kv import KvLoaded, KvMessage
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import ResendReply, ResendRequest, TakeReply
from halfmoon.store.pool.slots import Owner
from halfmoon.workers import machines
from halfmoon.workers.decode import actions as decode_actions
from halfmoon.workers.decode import events as decode_events
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.state import DecodeState
from tests.chaos.stores import Fetching, Memory
from tests.chaos.texts import BLOCK_TOKENS, END, LAYERS
from tests.chaos.workers import ASK_NS, Worker
from tests.conductor.conductor_scripts import MS


class DecodeWorker(Worker):
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
        #: What it attends to for others, by the number of the hold; whose answers are waited for.
        self.offered: dict[int, list[int]] = {}
        self.hold_asks: dict[int, Callable[[decode_actions.AnswerHold], None]] = {}
        self.ask_number = 0
        self.hear(decode_events.EngineIdled)

    def kv_blocks(self) -> int:
        return self.world.decode_kv_blocks

    def machine_heartbeat(self) -> WorkerHeartbeat:
        return self.state.heartbeat(self.done[0])

    def open_orders(self) -> list[str]:
        return list(self.state.orders.open)

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
                self.hear(decode_events.DecodeOrdered, order=decision)
            case CancelOrder():
                if decision.order_id in self.state.orders.open:
                    self.cancelled[decision.order_id] = True
                self.hear(machines.OrderCancelled, order_id=decision.order_id)
            case AnnounceYourself():
                self.drop_all()
                self.hear(machines.AnnounceRequested)
            case _:
                raise AssertionError(decision)

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
        (answer,) = self.on(decode_events.ResendRequested, request=request)
        assert isinstance(answer, decode_actions.AnswerResend), answer
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
                order_id = action.order_id
                self.later(action.after_ns, lambda: self.release(order_id))
            case act.CopyLayers():
                self.later(draw.randrange(1, 40 * MS), lambda: self.copy(action))
            case act.ShareOutput():
                self.share(action)
            case act.Wake():
                self.soon(draw.randrange(2 * MS), decode_events.EngineIdled)
            case act.RunStep():
                step_ns = draw.choice([1 * MS, draw.randrange(1, 150 * MS)])
                lives = self.lenders(action.batch)
                self.check_step(action.batch)
                self.later(step_ns, lambda: self.step(action.batch, step_ns, lives))
            case act.SwapOut():
                self.net.counts["swapped out"] += 1
                held = [list(self.cache[block]) for block in action.table]
                self.worked(decode_events.SwappedOut, held=held)
            case act.SwapIn():
                self.later(draw.randrange(1, 20 * MS), lambda: self.swap_in(action))
            case act.AskHold():
                self.later(action.after_ns, lambda: self.ask_hold(action))
            case act.AnswerHold():
                self.hold_asks.pop(action.ask_id)(action)
            case act.LoadHold():
                self.load_hold(action)
            case act.OfferHold():
                self.net.counts["parts lent"] += 1
                self.offered[action.hold] = action.blocks
            case act.DropHold():
                del self.offered[action.hold]
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
            self.cache[block][layer] = self.view[slot][layer]
        self.hear(decode_events.LayersCopied, copy_id=action.copy_id)

    def share(self, action: decode_actions.ShareOutput) -> None:
        """Generated blocks join the pool under keys of their own."""
        text = self.world.text(self.state.orders.sharing[action.order_id].order.request_id)
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
                assert have == [keys[place]] * LAYERS, ("shares other bytes", action.order_id, place, have)
                if place not in hold.present:
                    self.view[slot][:] = have
            self.store.commit(owner, 0, len(keys))
            self.later(self.net.lag_ns(), ended)

        self.ask(work, ended)

    # --- lending ----------------------------------------------------------------------------------------------

    def ask_hold(self, action: decode_actions.AskHold) -> None:
        """One question; silence ends it."""
        lender, order_id, over = self.world.decode_worker(action.worker_id), action.request.order_id, [False]

        def end(reply: decode_actions.AnswerHold) -> None:
            if over[0]:
                return
            over[0] = True
            fields = {"order_id": order_id, "worker_id": action.worker_id}
            if reply.refused:
                self.hear(decode_events.PartNotHeld, reason=reply.refused, **fields)
            else:
                self.hear(decode_events.PartHeld, hold=reply.hold, **fields)

        def arrive() -> None:
            lender.ask_number += 1
            lender.hold_asks[lender.ask_number] = lambda reply: lender.net.send(self, lambda: end(reply))
            lender.hear(decode_events.HoldAsked, ask_id=lender.ask_number, request=action.request)

        self.later(ASK_NS, lambda: end(decode_actions.AnswerHold(0, refused="it does not answer")))
        self.net.send(lender, arrive)

    def load_hold(self, action: decode_actions.LoadHold) -> None:
        """Through the own node's pool into the cache."""
        request, order_id = action.request, f"{action.request.order_id}-hold-{action.hold}"
        owner, keys = Owner(order_id, self.process_id), split_keys(request.block_keys)
        holders = [self.world.store(node) for node in request.source_node_ids]
        mine = keys[request.first_block :]

        def ended(problem: str) -> None:
            self.release(order_id)
            self.hear(decode_events.HoldLoaded, hold=action.hold, problem=problem)

        def copy(_: str, problem: str) -> None:
            if problem:
                ended(problem)
                return
            assert self.view is not None
            slots = self.store.guard.hold(owner).slots
            for slot, block in zip(slots, action.blocks, strict=True):
                self.cache[block][:] = self.view[slot]
            ended("")

        def work() -> None:
            hold = self.store.open_put(owner, mine, len(mine), keys[: request.first_block])
            self.kept[order_id] = True
            answer = self.watched(copy, ended)
            if len(hold.present) == len(mine):
                answer("", "")
            else:
                Fetching(self.store, owner, 0, len(mine), holders, answer)

        self.ask(work, lambda problem: ended(str(problem)))

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
            assert sequence.output == text.tokens[:have], ("decodes another text", sequence.order_id)
            if self.world.null:
                continue
            place, offset = divmod(sequence.length, BLOCK_TOKENS)
            assert len(sequence.table) > place, ("no block to write to", sequence.order_id, place)
            if offset == 0:
                self.cache[sequence.table[place]][:] = [text.mark(place)] * LAYERS
            for block in range(sequence.kv.away, place + 1):
                marks = self.cache[sequence.table[block]]
                wanted = [text.mark(block)] * LAYERS
                assert marks == wanted, ("KV of somebody else", sequence.order_id, block, marks, wanted)

    def lenders(self, batch: list[DecodeSequence]) -> dict[str, int]:
        """The lives of those who hold parts of the batch; 0 for one that is not there or does not have its part."""
        lives: dict[str, int] = {}
        for sequence in batch:
            text = self.world.text(sequence.order.request_id)
            for part in sequence.parts:
                lender = self.world.decode_worker(part.worker_id)
                there = lender.alive and self.net.reachable(lender) and self.net.reachable(self)
                held = lender.offered.get(part.hold) if there else None
                lives.setdefault(part.worker_id, lender.life if held is not None else 0)
                for place, block in enumerate(held or ()):
                    wanted = [text.mark(part.first_block + place)] * LAYERS
                    assert lender.cache[block] == wanted, (
                        "lends KV of somebody else",
                        sequence.order_id,
                        place,
                    )
        return lives

    def step(self, batch: list[DecodeSequence], step_ns: int, lives: dict[str, int]) -> None:
        lives_now = self.lenders(batch)
        for worker_id, life in lives.items():
            if not life or lives_now[worker_id] != life:
                self.net.counts["lenders lost"] += 1
                self.hear(decode_events.StepFailed, worker_id=worker_id, reason="it is away")
                self.hear(decode_events.EngineIdled)
                return
        self.check_step(batch)
        tokens = []
        for sequence in batch:
            drawn = self.world.text(sequence.order.request_id).token(len(sequence.output))
            tokens.append(sequence.next_known() or SampledToken(token_id=drawn))
        self.hear(decode_events.StepEnded, tokens=tokens, step_ns=step_ns)
        self.hear(decode_events.EngineIdled)
