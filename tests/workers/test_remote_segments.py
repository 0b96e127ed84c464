"""Segments of a live sequence at other workers: the same bits as if all of them were here, and bytes as counted."""

from __future__ import annotations

import pytest
from attention_harness import (
    BLOCK,
    LAYERS,
    LENGTHS,
    PROMPTS,
    SEGMENT,
    STEPS,
    Borrower,
    any_borrower,
    any_engine,
    any_model,
    over_each_kind,
    part,
    start,
    step,
)
from reference import prefill

from halfmoon.store.channels.header import HEADER_BYTES, Op
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.errors import PartRefused
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.remote_segments import RemoteSegments
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.layer_hooks import LayerHooks

__all__ = ["any_borrower", "any_engine", "any_model"]


@over_each_kind
def test_the_same_bits_while_parts_leave_in_mid_answer(engine: Engine, borrower: Borrower) -> None:
    tables, tokens = start(engine)
    expected = []
    for number in range(STEPS):
        digests, tokens = step(engine, tables, tokens, number, None)
        expected.append(digests)
    flat = [digest for digests in expected for digest in digests]
    assert len(set(flat)) == len(flat)

    for table in tables:
        engine.allocator.free(table)
    tables, tokens = start(engine)
    borrower.remote.begin(borrower.parts)
    moves = {
        1: [("attention-0", 0, 1, 2)],
        2: [("attention-1", 0, 4, 1), ("attention-1", 2, 0, 3)],
        3: [("attention-2", 0, 0, 1), ("attention-2", 1, 0, 1)],
        5: [("attention-0", 0, 3, 1)],
    }
    for number in range(STEPS):
        for name, row, first, segments in moves.get(number, ()):
            borrower.lend(name, row, tables, first, segments)
        digests, tokens = step(engine, tables, tokens, number, borrower.remote)
        assert digests == expected[number], number


@pytest.mark.pure
def test_bytes_are_those_of_the_formula(engine: Engine, borrower: Borrower) -> None:
    """Up: a query of each row. Down: of each segment its result and one number a head."""
    tables, tokens = start(engine)
    borrower.lend("attention-0", 0, tables, 0, 3)
    borrower.lend("attention-0", 2, tables, 1, 2)
    borrower.lend("attention-1", 0, tables, 3, 1)
    before = {name: channel.sent.payload_bytes(Op.QUERY) for name, channel in borrower.channels.items()}
    assert not any(before.values())
    for number in range(2):
        _, tokens = step(engine, tables, tokens, number, borrower.remote)
    config, size = engine.config, engine.dtype.itemsize
    row = config.heads * config.head_dim * size
    for name, rows, segments in (("attention-0", 2, 5), ("attention-1", 1, 1), ("attention-2", 0, 0)):
        channel = borrower.channels[name]
        messages = 2 * LAYERS * (rows > 0)
        assert channel.sent.payload_bytes(Op.QUERY) == 2 * LAYERS * rows * row
        assert channel.received.payload_bytes(Op.PARTIAL) == 2 * LAYERS * segments * (row + 4 * config.heads)
        assert channel.sent.messages(Op.QUERY) == channel.received.messages(Op.PARTIAL) == messages
        assert channel.sent.header_bytes(Op.QUERY) == messages * HEADER_BYTES


def chunks(engine: Engine, table: list[int], start: int, tokens: int, borrower: Borrower | None) -> list[str]:
    """Digests of the logits after each chunk of the first prompt from `start` on."""
    digests = []
    for at in range(start, tokens, BLOCK):
        rows = min(BLOCK, tokens - at)
        if borrower is not None:
            borrower.remote.begin(borrower.parts, chunk_rows=rows)
            borrower.remote.step = at
        logits = engine.prefill_chunk(
            PROMPTS[0][at : at + rows],
            at,
            table,
            want_logits=True,
            hooks=LayerHooks(elsewhere=None if borrower is None else borrower.remote),
        )
        assert logits is not None
        digests.append(engine.logits_digest(logits))
    return digests


@pytest.mark.pure
def test_a_prompt_goes_on_whose_first_segments_are_elsewhere(engine: Engine, borrower: Borrower) -> None:
    """The same bits, in whole chunks and for a last token alone; bytes by the formula."""
    table = engine.allocator.allocate(13)
    start, tokens = 5 * SEGMENT, 5 * SEGMENT + BLOCK + 1
    prefill(engine, PROMPTS[0][:start], table)
    expected = chunks(engine, table, start, tokens, None)
    tables = [table]
    for name, first, segments in (("attention-0", 0, 2), ("attention-1", 2, 1), ("attention-0", 4, 1)):
        borrower.lend(name, 0, tables, first, segments)
    assert chunks(engine, table, start, tokens, borrower) == expected
    row = engine.config.heads * engine.config.head_dim * engine.dtype.itemsize
    for name, segments in (("attention-0", 3), ("attention-1", 1), ("attention-2", 0)):
        channel = borrower.channels[name]
        rows = LAYERS * (BLOCK + 1)
        assert channel.sent.payload_bytes(Op.QUERY) == rows * row * (segments > 0)
        partial = rows * segments * (row + 4 * engine.config.heads)
        assert channel.received.payload_bytes(Op.PARTIAL) == partial


@pytest.mark.pure
@pytest.mark.slow
def test_a_chunk_whose_states_are_more_than_a_message_is_refused(engine: Engine, borrower: Borrower) -> None:
    table = engine.allocator.allocate(13)
    prefill(engine, PROMPTS[0][: 5 * SEGMENT], table)
    borrower.lend("attention-1", 0, [table], 0, 1)
    place = borrower.places["attention-1"]
    place.server.holds[1] = HeldSegments(place.server.holds[1].blocks, 10**6 * SEGMENT)
    with pytest.raises(
        PartRefused, match=r"attention-1: slots 2: states of [0-9]+ bytes, and 16777216 are taken"
    ):
        chunks(engine, table, 5 * SEGMENT, 6 * SEGMENT, borrower)


@pytest.mark.pure
def test_a_part_that_is_not_there_is_named(engine: Engine, borrower: Borrower) -> None:
    tables, tokens = start(engine)
    borrower.lend("attention-1", 0, tables, 0, 1)
    borrower.remote.begin([[part("attention-1", 0, 1, 77)]])
    with pytest.raises(PartRefused, match="attention-1: slots 2: hold 77 is not here"):
        step(engine, tables, tokens, 0, borrower.remote)
    # Nothing is lost but the step: what is right is answered as ever.
    borrower.remote.begin(borrower.parts)
    step(engine, tables, tokens, 0, borrower.remote)


@pytest.mark.pure
def test_two_groups_by_turns_have_the_bits_of_one(engine: Engine, borrower: Borrower) -> None:
    """Also after a step that one of them failed: no answer is left in the channels of the other."""
    tables, tokens = start(engine)
    expected, _ = step(engine, tables, tokens, 0, None)
    borrower.lend("attention-0", 0, tables, 1, 2)
    borrower.lend("attention-0", 2, tables, 0, 3)
    of_first, _, (of_third,), _ = borrower.parts
    place = borrower.places["attention-0"]
    with place.connect() as one, place.connect() as two:
        first, second = (
            RemoteSegments({place.name: each}, engine.config, engine.dtype) for each in (one, two)
        )
        first.begin([of_first])
        for hold in (77, of_third.hold):
            second.begin([[part(place.name, 0, 3, hold)]])
            take = lambda: engine.decode(tokens, LENGTHS, tables, [first, second], groups=2)  # noqa: E731
            if hold == 77:
                with pytest.raises(PartRefused, match="hold 77 is not here"):
                    take()
            else:
                assert [engine.logits_digest(row) for row in take()] == expected
        # One of the failed step was waited for, and one was not.
        assert one.received.messages(Op.PARTIAL) == LAYERS + 2


@pytest.mark.pure
def test_a_part_that_was_dropped_is_refused_though_it_was_listed(engine: Engine, borrower: Borrower) -> None:
    """Its blocks may have others' KV by then."""
    tables, tokens = start(engine)
    borrower.lend("attention-1", 0, tables, 0, 1)
    _, tokens = step(engine, tables, tokens, 0, borrower.remote)
    ((hold, held),) = borrower.places["attention-1"].server.holds.items()
    del borrower.places["attention-1"].server.holds[hold]
    with pytest.raises(PartRefused, match=f"attention-1: hold {hold} was dropped") as refused:
        step(engine, tables, tokens, 1, borrower.remote)
    assert refused.value.hold == hold
    # Held again under the number, by whatever chance: it is not what was listed.
    borrower.places["attention-1"].server.holds[hold] = HeldSegments(held.blocks, held.tokens)
    with pytest.raises(PartRefused, match="was dropped"):
        step(engine, tables, tokens, 1, borrower.remote)


@over_each_kind
def test_a_place_that_dies_is_lost_by_name(engine: Engine, borrower: Borrower) -> None:
    tables, tokens = start(engine)
    borrower.lend("attention-1", 0, tables, 0, 1)
    _, tokens = step(engine, tables, tokens, 0, borrower.remote)
    borrower.places["attention-1"].close()
    with pytest.raises(ChannelLost, match="attention-1"):
        step(engine, tables, tokens, 1, borrower.remote)
