"""The decode machine in every interleaving that hypothesis can think of, over a cache that remembers what was written.

A copy or a swap reads and writes when its end is told, so blocks that were given away too early show as wrong KV.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from decode_script import LAYOUT, Script, opened, order, ready, reply, result
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import DecodeFailed, DecodeRefused, RequestFinished
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.kv import TransferFailed, TransferOpened
from halfmoon.schemas.sampling import SampledToken
from halfmoon.store.kv_arrival import KvArrival
from halfmoon.workers import machines
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import (
    Action,
    CopyLayers,
    Release,
    RunStep,
    ShareOutput,
    SwapIn,
    SwapOut,
    Wake,
)
from halfmoon.workers.decode.orders import Orders
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.machines import Deliver, Report, TakeTokens
from tests.lengths import examples

BLOCK, LAYERS = LAYOUT.block_tokens, LAYOUT.layers
SLOTS_MAX, TOKENS_MAX = 3, 12
#: Room for the longest request, and for little beside it.
BLOCKS = LAYOUT.blocks(SLOTS_MAX * BLOCK + TOKENS_MAX)
#: Tokens that the client has from an earlier placement are others than this machine's engine would draw.
KNOWN, DRAWN = 500, 100


class DecodeCluster(RuleBasedStateMachine):
    """Everything around the machine: conductor, frontends, pool, cache, threads."""

    def __init__(self) -> None:
        super().__init__()
        fast = msgspec.structs.replace(LAYOUT, numerics="fast")
        self.script = Script(layout=fast, kv_blocks=BLOCKS, batch_max=3)
        #: Orders as placed: (order, tokens of the prompt, tokens that the client has, shares its output).
        self.placed: dict[str, tuple[StartDecode, int, int, bool]] = {}
        self.begun: set[str] = set()
        #: What must still be told of an order, and what was told.
        self.untold: dict[str, list[Any]] = {}
        self.told: list[Any] = []
        self.takes: list[TakeTokens] = []
        self.copies: list[CopyLayers] = []
        self.shares: list[ShareOutput] = []
        self.confirmations: list[str] = []
        self.work: RunStep | SwapOut | SwapIn | None = None
        self.awake = False
        self.ends: Counter[str] = Counter()
        self.releases: Counter[str] = Counter()
        self.delivered: dict[str, int] = {}
        #: cache[layer, block][offset] = (order, position)
        self.cache: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}

    # --- what the machine says ------------------------------------------------------------------------------

    def on(self, kind: type[events.Event], **fields: Any) -> None:
        for action in self.script.on(kind, **fields):
            self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case TakeTokens():
                self.takes.append(action)
            case CopyLayers():
                self.copies.append(action)
            case ShareOutput():
                self.shares.append(action)
            case RunStep() | SwapOut() | SwapIn():
                assert self.work is None, (self.work, action)
                self.work = action
            case Wake():
                assert self.work is None, self.work
                assert not self.awake, "woken twice"
                self.awake = True
            case Release():
                self.releases[action.order_id] += 1
                if action.confirm:
                    self.confirmations.append(action.order_id)
            case Deliver():
                for delivery in action.message.deliveries:
                    expected = self.delivered[delivery.order_id]
                    assert delivery.index == expected, ("tokens lost or repeated", delivery, expected)
                    tokens = [token.token_id for token in delivery.tokens]
                    assert tokens == [DRAWN + delivery.index + i for i in range(len(tokens))], tokens
                    self.delivered[delivery.order_id] += len(tokens)
            case Report(event=RequestFinished() | DecodeFailed() | DecodeRefused()):
                self.ends[action.event.order_id] += 1
                if isinstance(action.event, RequestFinished):
                    assert action.event.completion_tokens == self.delivered[action.event.order_id]
            case _:
                pass

    # --- what happens to it ---------------------------------------------------------------------------------

    @rule(
        prompt=st.integers(1, SLOTS_MAX * BLOCK),
        max_tokens=st.integers(1, TOKENS_MAX),
        known=st.integers(0, 3),
        present=st.booleans(),
        fails=st.integers(0, 7),
        shares=st.booleans(),
        comes=st.integers(0, 3),
    )
    def place(
        self, prompt: int, max_tokens: int, known: int, present: bool, fails: int, shares: bool, comes: int
    ) -> None:
        number = len(self.placed) + 1
        one = order(number, prompt_tokens=prompt, max_tokens=max_tokens)
        blocks, first = LAYOUT.blocks(prompt), int(present)
        slots = [10 * number + place for place in range(blocks)]
        messages: list[Any] = [opened(one.order_id, *slots, present=(0,) if present else ())]
        if fails == 0:
            messages.append(TransferFailed(order_id=one.order_id, request_id="r", reason="x"))
        elif blocks > first:
            messages += [ready(one.order_id, layer, first, blocks - first) for layer in range(LAYERS)]
        self.untold[one.order_id] = [*messages, result(one.order_id, DRAWN)]
        known = min(known, max_tokens - 1)
        self.delivered[one.order_id] = known
        self.placed[one.order_id] = (one, prompt, known, shares)
        if comes:
            self.begin(one)

    @precondition(lambda self: self.placed)
    @rule(pick=st.integers(0, 99))
    def order_comes(self, pick: int) -> None:
        """Or comes again, while it is known. (The bus drops a repeat that comes later.)"""
        one = self.pick(list(self.placed.values()), pick)[0]
        if one.order_id not in self.begun or self.script.state.orders.known(one.order_id):
            self.begin(one)

    def begin(self, one: StartDecode) -> None:
        self.begun.add(one.order_id)
        self.on(events.DecodeOrdered, order=one)

    @precondition(lambda self: any(self.untold.values()))
    @rule(pick=st.integers(0, 99), places=st.lists(st.integers(0, 4), min_size=1, max_size=6))
    def kv_is_told(self, pick: int, places: list[int]) -> None:
        messages = self.pick([some for some in self.untold.values() if some], pick)
        for place in places[: len(messages)]:
            message = messages.pop(place % len(messages))
            self.told.append(message)
            self.on(events.KvHeard, author_id="p0", message=message)

    @precondition(lambda self: self.told)
    @rule(pick=st.integers(0, 99))
    def kv_is_told_again(self, pick: int) -> None:
        self.on(events.KvHeard, author_id="p0", message=self.pick(self.told, pick))

    @precondition(lambda self: self.takes)
    @rule(pick=st.integers(0, 99), how=st.integers(0, 30))
    def tokens_come(self, pick: int, how: int) -> None:
        ask = self.takes.pop(pick % len(self.takes))
        _, prompt, known, shares = self.placed[ask.order_id]
        given = reply(
            prompt,
            output_ids=pack_tokens([KNOWN + i for i in range(known)]),
            root_key=b"r" * 16 if shares else b"",
            block_keys=b"k" * 16 * (prompt // BLOCK),
            gone=how == 0,
        )
        self.on(machines.TokensTaken, order_id=ask.order_id, reply=None if how == 1 else given)

    @precondition(lambda self: self.begun)
    @rule(pick=st.integers(0, 99))
    def order_is_cancelled(self, pick: int) -> None:
        order_id = self.pick(sorted(self.begun), pick)
        self.ends[order_id] += order_id in self.script.state.orders.open
        self.on(machines.OrderCancelled, order_id=order_id)

    @precondition(lambda self: self.copies)
    @rule(pick=st.integers(0, 99))
    def copy_ends(self, pick: int) -> None:
        copy = self.copies.pop(pick % len(self.copies))
        for layer, slot, block in copy.copies:
            order_id, place = f"{slot // 10}-1", slot % 10
            prompt = self.placed[order_id][1]
            positions = range(place * BLOCK, min(prompt, (place + 1) * BLOCK))
            self.cache[layer, block] = {at % BLOCK: (order_id, at) for at in positions}
        self.on(events.LayersCopied, copy_id=copy.copy_id)

    @precondition(lambda self: self.work is not None or self.awake)
    @rule(times=st.integers(1, 6))
    def compute(self, times: int) -> None:
        for _ in range(times):
            if self.work is not None or self.awake:
                self.compute_once()

    def compute_once(self) -> None:
        work, self.work = self.work, None
        match work:
            case RunStep():
                self.on(events.StepEnded, tokens=self.step(work), step_ns=1_000_000)
            case SwapOut():
                held = [[dict(self.cache.get((layer, b), {})) for layer in range(LAYERS)] for b in work.table]
                self.on(events.SwappedOut, held=held)
            case SwapIn():
                for block, layers in zip(work.table, work.held, strict=True):  # type: ignore[call-overload]
                    self.cache |= {(layer, block): dict(rows) for layer, rows in enumerate(layers)}
                self.on(events.SwappedIn)
        self.awake = False
        self.on(events.EngineIdled)

    def step(self, step: RunStep) -> list[SampledToken]:
        """Reads the KV of every position, and writes that of the newest token."""
        tokens = []
        for sequence in step.batch:
            order_id, length = sequence.order_id, sequence.length
            for layer in range(LAYERS):
                block = sequence.table[length // BLOCK]
                self.cache.setdefault((layer, block), {})[length % BLOCK] = (order_id, length)
                for at in range(length + 1):
                    found = self.cache[layer, sequence.table[at // BLOCK]].get(at % BLOCK)
                    assert found == (order_id, at), ("another's KV", order_id, at, found)
            index = len(sequence.output)
            tokens.append(sequence.next_known() or SampledToken(token_id=DRAWN + index))
        return tokens

    @precondition(lambda self: self.confirmations)
    @rule(pick=st.integers(0, 99), held=st.booleans())
    def lease_has_ended(self, pick: int, held: bool) -> None:
        order_id = self.confirmations.pop(pick % len(self.confirmations))
        self.on(events.LeaseConfirmed, order_id=order_id, held=held)

    @precondition(lambda self: self.shares)
    @rule(pick=st.integers(0, 99))
    def output_is_shared(self, pick: int) -> None:
        share = self.shares.pop(pick % len(self.shares))
        for at in range(len(share.tokens)):
            for layer in range(LAYERS):
                found = self.cache[layer, share.table[at // BLOCK]].get(at % BLOCK)
                assert found == (share.order_id, at), ("another's KV is shared", share.order_id, at, found)
        self.on(events.OutputShared, order_id=share.order_id)

    @rule(draw=st.integers(0, 30))
    def something_rare(self, draw: int) -> None:
        orders = self.script.state.orders
        match draw:
            case 0:
                self.on(events.MemoryLost)
                # What was opened there for an order that is still on its way is gone, and its writer finds out.
                for order_id in self.placed.keys() - self.begun:
                    if any(isinstance(m, TransferOpened) and m.order_id == order_id for m in self.told):
                        lost = TransferFailed(order_id=order_id, request_id="r", reason="no such slots")
                        self.untold[order_id] = [lost]
            case 1:
                self.ends.update(orders.open.keys())
                self.on(machines.AnnounceRequested)
            case _:
                beat = self.script.state.heartbeat(7)
                assert beat.orders == list(orders.open)
                assert set(beat.lacking) <= set(beat.orders)

    def pick(self, some: list[Any], pick: int) -> Any:
        return some[pick % len(some)]

    # --- the end --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Everything that is under way comes to its end, and so does every order."""
        orders = self.script.state.orders
        for _ in range(1_000):
            if self.takes:
                self.tokens_come(0, 9)
            elif self.copies:
                self.copy_ends(0)
            elif self.shares:
                self.output_is_shared(0)
            elif self.work is not None or self.awake:
                self.compute_once()
            elif waits := [key for key in orders.open if self.untold[key]]:
                message = self.untold[waits[0]].pop(0)
                self.on(events.KvHeard, author_id="p0", message=message)
            else:
                break
        assert not orders.open, ("never ended", list(orders.open))
        assert orders.blocks_used == 0, ("blocks of nobody", orders.blocks_used)
        for order_id in self.begun:
            assert self.ends[order_id] == 1, ("not one end", order_id, self.ends[order_id])
            assert self.releases[order_id] == 1, ("not one release", order_id, self.releases[order_id])


DecodeCluster.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=80, deadline=None)
TestTheDecodeMachineInEveryInterleaving = DecodeCluster.TestCase

#: (class, method, what stands in for it): each a fault that was made once, or nearly.
FAULTS: dict[str, tuple[type[Any], str, Any]] = {
    "counts KV that is told again": (
        KvArrival,
        "_is_fresh",
        lambda self, layer, block: layer < LAYERS and block < len(self.slots),
    ),
    "frees blocks that a thread works on": (Orders, "_is_busy", lambda *_: False),
    "forgets KV that comes before its order": (Orders, "_keep_early", lambda *_: None),
    "answers twice": (Orders, "report", lambda self, event: self.out.extend([Report(event), Report(event)])),
    "draws the tokens that the client has": (DecodeSequence, "next_known", lambda _: None),
    "never gives a lease back": (Orders, "_release", lambda *_: None),
    "takes blocks back and believes them full": (KvArrival, "take_back", lambda _: None),
    "sleeps while a sequence is ready": (Orders, "_wake", lambda _: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_machine_with_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    quick = settings(
        max_examples=300,
        stateful_step_count=80,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        print_blob=False,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(DecodeCluster, settings=quick)
