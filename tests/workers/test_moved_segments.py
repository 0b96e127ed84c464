"""Segments that move in mid-answer, with the real model, machine and channels: the same bits as if they had stayed.

Invariant I108 of `docs/invariants.md`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from attention_harness import BLOCK, LAYERS, SEGMENT, WAIT_S, Place, any_engine, any_model
from decode_script import Script, opened, order, ready, reply, result
from reference import prefill
from test_decode_lending import keys, of_kind
from test_decode_moves import move

from halfmoon.schemas.events import KvMoved
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.pusher import Pusher
from halfmoon.workers.decode import events
from halfmoon.workers.decode.actions import Action, AskHold, CopyLayers, PushTokens, RunStep
from halfmoon.workers.decode.borrower import Borrower
from halfmoon.workers.machines import Report
from halfmoon.workers.model.engine import Engine
from tests.store.channel_harness import addresses, hello, options

__all__ = ["any_engine", "any_model"]

PROMPT, ANSWER, TOKENS_PER_STEP = 3 * SEGMENT + 9, 24, 7
EACH = SEGMENT // BLOCK


class Owner:
    """A decode machine over an engine. `digests` are those of each step's logits."""

    def __init__(self, engine: Engine, place: Place) -> None:
        self.engine, self.place = engine, place
        config, cache = engine.config, engine.cache
        dtype = {4: "float32", 2: "bfloat16"}[cache.dtype.itemsize]
        layout = Layout(
            model="m",
            model_fingerprint="f",
            layers=LAYERS,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_tokens=BLOCK,
            dtype=dtype,  # type: ignore[arg-type]
            segment_tokens=SEGMENT,
        )
        self.layout = layout
        self.script = Script(layout=layout, kv_blocks=16, node_id="n0")
        settings = options("unix", timeout_s=WAIT_S)
        self.borrower = Borrower(engine, hello("decode-0"), settings)
        self.borrower.addresses[place.name] = addresses(place.listener, "unix")
        self.pusher = Pusher(cache, hello("decode-0"), settings)
        self.digests: list[str] = []
        self.moved: list[KvMoved] = []
        self.pushes: list[PushTokens] = []

    def begin(self) -> None:
        prompt = [(i * i * 31 + 17 * i) % 40000 + 20 for i in range(PROMPT)]
        blocks = -(-PROMPT // BLOCK)
        given = order(max_tokens=ANSWER, prompt_tokens=PROMPT)
        self.script.give(given, reply(PROMPT, block_keys=keys(PROMPT // BLOCK)))
        said = [ready("1-1", layer, blocks=blocks) for layer in range(LAYERS)]
        actions = self.script.hear(opened("1-1", *range(blocks)), *said)
        table = self.script.sequence().table
        first = self.engine.argmax(prefill(self.engine, prompt, list(table)))[0]
        for copy in of_kind(actions, CopyLayers):
            self.script.on(events.LayersCopied, copy_id=copy.copy_id)
        self.script.hear(result("1-1", first))

    async def step(self) -> bool:
        """False: the answer is over."""
        actions = self.script.on(events.EngineIdled)
        self.obey(actions)
        steps = of_kind(actions, RunStep)
        if not steps:
            return False
        batch = steps[0].batch
        # The push reads while the step is made.
        logits, *_ = await asyncio.gather(
            asyncio.to_thread(self.borrower.decode, batch), *map(self.push, of_kind(actions, PushTokens))
        )
        self.digests += [self.engine.logits_digest(row) for row in logits]
        tokens = [SampledToken(token_id=token) for token in self.engine.argmax(logits)]
        self.obey(self.script.on(events.StepEnded, tokens=tokens, step_ns=1))
        return True

    def obey(self, actions: list[Action]) -> None:
        for ask in of_kind(actions, AskHold):
            count = ask.request.room_blocks
            holds = self.place.server.holds
            used = sum(len(hold.blocks) for hold in holds.values())
            blocks = list(range(23 - used, 23 - used - count, -1))
            number = len(holds) + 1
            holds[number] = HeldSegments(blocks, 0, expected=count * BLOCK)
            self.script.on(
                events.PartHeld,
                order_id="1-1",
                worker_id=self.place.name,
                hold=number,
                plan_id=ask.request.plan_id,
            )
        self.moved += [one.event for one in of_kind(actions, Report) if isinstance(one.event, KvMoved)]

    async def push(self, push: PushTokens) -> None:
        self.pushes.append(push)
        where = self.borrower.addresses[self.place.name]
        moved_bytes = await self.pusher.push(
            self.place.name, where, push.hold, push.blocks, push.first, push.tokens
        )
        self.script.on(events.TokensPushed, moved_bytes=moved_bytes)

    async def answer(self, moves_at: dict[int, int]) -> list[str]:
        """The digests of every step; before step n, `moves_at[n]` segments are ordered elsewhere."""
        self.begin()
        number = 0
        while True:
            if number in moves_at:
                ordered = move(moves_at[number], f"p{number}", tokens_per_step=TOKENS_PER_STEP)
                self.obey(self.script.on(events.MoveOrdered, order=ordered))
            if not await self.step():
                return self.digests
            number += 1

    def close(self) -> None:
        self.borrower.close()
        self.pusher.close()


@pytest.fixture(name="place")
def any_place(engine: Engine) -> Iterator[Place]:
    one = Place(engine, "d1", "unix")
    yield one
    one.close()


def test_an_answer_keeps_its_bits_while_its_segments_move(engine: Engine, place: Place) -> None:
    still, moving = Owner(engine, place), Owner(engine, place)
    try:
        expected = asyncio.run(still.answer({}))
        assert len(set(expected)) == len(expected) == ANSWER - 1
        found = asyncio.run(moving.answer({1: 1, 10: 2}))
    finally:
        still.close()
        moving.close()
    assert found == expected
    # Two moves of one and of two segments, some tokens with each step.
    token = moving.layout.token_layer_bytes * LAYERS
    assert [(one.blocks, one.moved_bytes) for one in moving.moved] == [
        (EACH, SEGMENT * token),
        (2 * EACH, 2 * SEGMENT * token),
    ]
    assert max(push.tokens for push in moving.pushes) == TOKENS_PER_STEP
    assert moving.script.state.kv_blocks_used == 0
