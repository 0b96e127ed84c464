"""Tokens that are pushed to a hold while others are asked: the same bits, every byte counted, and refused by field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_harness import (
    BLOCK,
    EACH,
    LAYERS,
    PROMPTS,
    SEGMENT,
    STEPS,
    Borrower,
    Place,
    any_borrower,
    any_engine,
    any_model,
    part,
    start,
    step,
)
from reference import prefill

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import Dtype, MessageHeader, Op
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.errors import PartRefused
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.push import MESSAGES_MAX, push_tokens
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.model.attention.states import StateStack
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.paged_cache import PagedCache
from halfmoon.workers.model.segments import AWAY
from tests.eventually import eventually_here
from tests.store.channel_harness import in_thread
from tests.store.memory_channels import channel_kind

__all__ = ["any_borrower", "any_engine", "any_model"]


@pytest.fixture(name="place")
def any_place(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Place]:
    one = Place(engine, "attention-0", channel_kind(request.node))
    yield one
    one.close()


@pytest.fixture(name="channel")
def any_channel(place: Place) -> Iterator[WorkerChannel]:
    with place.connect() as one:
        yield one


def token_bytes(engine: Engine, layers: int = LAYERS) -> int:
    """KV of one token."""
    return 2 * layers * engine.config.kv_heads * engine.config.head_dim * engine.dtype.itemsize


@pytest.mark.pure
def test_a_part_grows_by_a_push_between_steps_and_during_them(engine: Engine, borrower: Borrower) -> None:
    tables, tokens = start(engine)
    expected = []
    for number in range(STEPS):
        digests, tokens = step(engine, tables, tokens, number, None)
        expected.append(digests)
    for table in tables:
        engine.allocator.free(table)
    tables, tokens = start(engine)
    borrower.lend("attention-1", 0, tables, 0, 1)
    place, total = borrower.places["attention-1"], 4 * SEGMENT
    place.server.holds[7] = HeldSegments(list(range(1, 9)), 0, expected=total)
    pushed = tables[0][EACH : 5 * EACH]
    with place.connect() as channel:
        sent = 0
        for number in range(STEPS):
            if number < 4:
                end = in_thread(
                    lambda at=number * EACH: push_tokens(
                        channel, 7, engine.cache, pushed[at : at + EACH], at * BLOCK, SEGMENT
                    )
                )
            digests, tokens = step(engine, tables, tokens, number, borrower.remote)
            assert digests == expected[number], number
            if number < 4:
                sent += end()
            if number == 2:
                borrower.remote.begin([[part("attention-1", 1, 4, 7)]])
                borrower.remote.ask(0, torch.zeros(4, engine.config.heads, 64, dtype=engine.dtype))
                with pytest.raises(PartRefused, match=r"attention-1: slots \d+: hold 7 has 96 of 128 tokens"):
                    borrower.remote.collect(StateStack(8, 4, engine.config.heads, 64, engine.device))
                borrower.remote.begin(borrower.parts)
            if number == 3:
                tables[0][EACH : 5 * EACH] = [AWAY] * (4 * EACH)
                engine.cache.k[:, pushed] = engine.cache.v[:, pushed] = float("nan")
                borrower.parts[0].append(part("attention-1", 1, 4, 7))
                borrower.remote.begin(borrower.parts)
        assert sent == total * token_bytes(engine) == channel.sent.payload_bytes(Op.APPEND)
        assert channel.sent.messages(Op.APPEND) == 4 * EACH * LAYERS


@pytest.mark.pure
def test_heads_and_a_last_block_in_part(engine: Engine, place: Place, channel: WorkerChannel) -> None:
    """A place may have some of the KV heads; what is pushed need not end with a block."""
    config = replace(engine.config, kv_heads=1)
    place.server._cache = cache = PagedCache(config, 4, BLOCK, engine.dtype)
    table, count = engine.allocator.allocate(3), 2 * BLOCK + 5
    prefill(engine, PROMPTS[0][:count], table)
    place.server.holds[1] = hold = HeldSegments([2, 0, 3], 0, expected=count)
    sent = push_tokens(channel, 1, engine.cache, table, 0, count, kv_heads=slice(2, 3))
    assert sent == count * token_bytes(engine) // 3
    assert hold.complete
    assert hold.tokens == count
    for theirs, ours in ((cache.k, engine.cache.k), (cache.v, engine.cache.v)):
        there = theirs[:, [2, 0, 3]].flatten(1, 2)[:, :count]
        assert torch.equal(there, ours[:, table].flatten(1, 2)[:, :count, 2:3])


#: What is wrong with a message of one token, how many tokens its payload has, and what is said of it.
FIELDS: list[tuple[dict[str, Any], int, str]] = [
    ({"slots": 9}, 1, "slots: hold 9 is not here"),
    ({"dtype": Dtype.F16}, 1, "dtype: F16, not (F32|BF16)"),
    ({"step": BLOCK + 1}, 1, "step: token 17, where 16 are here"),
    ({"step": BLOCK - 1}, 1, "step: token 15, where 16 are here"),
    ({"rows": 2}, 1, "payload_bytes: [0-9]+ of 2 tokens, where [0-9]+ were due"),
    ({"rows": 0}, 1, "payload_bytes: [0-9]+ of 0 tokens, where 0 were due"),
    ({"rows": BLOCK + 1}, BLOCK + 1, "rows: 17 tokens from 16 on, and there is room for 32"),
    ({"layer": 1}, 1, "layer: 1 of 3, where 0 was due"),
    ({"layer": 65535}, 1, "layer: 65535 of 3, where 0 was due"),
]


def refused(channel: WorkerChannel, header: MessageHeader, payload: torch.Tensor, good: int) -> str:
    """Sends a message of a push and, as its last, one that is right and has `good` bytes; the reason that comes."""
    channel.send(header._replace(parts=1), bytes_of(payload))
    channel.send(
        MessageHeader(Op.APPEND, header.dtype, rows=1, step=BLOCK, slots=1), bytes_of(payload[:good])
    )
    heard = bytearray()

    def into(answer: MessageHeader) -> memoryview:
        heard.extend(bytes(answer.payload_bytes))
        return memoryview(heard)

    assert channel.receive(into).op is Op.REFUSED
    return heard.decode()


@pytest.mark.pure
def test_a_push_is_refused_by_field_and_the_channel_goes_on(
    engine: Engine, place: Place, channel: WorkerChannel
) -> None:
    """One answer for all of a push: what comes after the problem is not taken either."""
    table, row = engine.allocator.allocate(1), token_bytes(engine, 1)
    prefill(engine, PROMPTS[0][:BLOCK], table)
    place.server.holds[1] = hold = HeldSegments([5, 6], BLOCK)
    good = MessageHeader(Op.APPEND, DTYPES[engine.dtype], rows=1, step=BLOCK, slots=1)
    for changes, rows, reason in FIELDS:
        payload = torch.zeros(rows * row, dtype=torch.uint8)
        assert re.fullmatch(reason, refused(channel, good._replace(**changes), payload, row)), changes
        assert hold.tokens == BLOCK
    assert place.cache.k.isnan().all()
    push_tokens(channel, 1, engine.cache, table, BLOCK, BLOCK)
    assert hold.tokens == 2 * BLOCK
    assert torch.equal(place.cache.k[:, 6], engine.cache.k[:, table[0]])
    assert place.cache.k[:, 5].isnan().all()


@pytest.mark.pure
def test_a_hold_that_is_full_takes_no_more(engine: Engine, place: Place, channel: WorkerChannel) -> None:
    place.server.holds[1] = HeldSegments([5], BLOCK)
    with pytest.raises(
        PartRefused, match="attention-0: rows: 16 tokens from 16 on, and there is room for 16"
    ):
        push_tokens(channel, 1, engine.cache, [0], BLOCK, BLOCK)


@pytest.mark.pure
def test_a_push_that_broke_off_begins_again(engine: Engine, place: Place, channel: WorkerChannel) -> None:
    """Also where whole blocks had come: until it is complete nobody attends to them."""
    table = engine.allocator.allocate(3)
    prefill(engine, PROMPTS[0][: 3 * BLOCK], table)
    place.server.holds[1] = hold = HeldSegments([5, 6, 7], 0, expected=3 * BLOCK)
    push_tokens(channel, 1, engine.cache, table, 0, BLOCK)
    with place.connect() as broken:
        payload = torch.zeros(BLOCK * token_bytes(engine, 1), dtype=torch.uint8)
        header = MessageHeader(Op.APPEND, DTYPES[engine.dtype], parts=9, rows=BLOCK, step=BLOCK, slots=1)
        broken.send(header, bytes_of(payload))
        # Another channel's may be read first.
        eventually_here(lambda: hold.layer_due, "the layer has come", every_s=0.005)
    push_tokens(channel, 1, engine.cache, table, 0, 3 * BLOCK)
    assert hold.complete
    assert torch.equal(place.cache.v[:, [5, 6, 7]], engine.cache.v[:, table])
    with pytest.raises(PartRefused, match="step: token 0, where 48 are here"):
        push_tokens(channel, 1, engine.cache, table, 0, BLOCK)


@pytest.mark.pure
def test_a_hold_that_is_dropped_during_a_push(engine: Engine, place: Place, channel: WorkerChannel) -> None:
    """Its blocks may be another's by then: nothing more is written to them."""
    table = engine.allocator.allocate(2)
    place.server.holds[1] = HeldSegments([5, 6], 0, expected=2 * BLOCK)
    push_tokens(channel, 1, engine.cache, table, 0, BLOCK)
    place.server.drop(1)
    with pytest.raises(PartRefused, match="slots: hold 1 is not here"):
        push_tokens(channel, 1, engine.cache, table[1:], BLOCK, BLOCK)
    assert place.cache.k[:, 6].isnan().all()


@pytest.mark.pure
def test_a_push_to_a_place_that_dies_is_lost_by_name(engine: Engine, place: Place) -> None:
    with place.connect() as channel:
        place.close()
        with pytest.raises(ChannelLost, match="attention-0"):
            push_tokens(channel, 1, engine.cache, [0], 0, BLOCK)


@pytest.mark.pure
def test_a_push_has_a_bound(engine: Engine, channel: WorkerChannel) -> None:
    blocks = [0] * (MESSAGES_MAX // LAYERS + 1)
    with pytest.raises(ValueError, match=r"tokens: [0-9]+ are [0-9]+ messages, and a push has 65536 at most"):
        push_tokens(channel, 1, engine.cache, blocks, 0, len(blocks) * BLOCK)
    assert not channel.sent.messages(Op.APPEND)
