"""Invariants of the decode machine. A violation is a fault of ours; its assertion has the values."""

from __future__ import annotations

from halfmoon.workers.decode.orders import Orders
from halfmoon.workers.decode.sequence import DecodeSequence, Stage
from halfmoon.workers.model.segments import AWAY


def check(orders: Orders, batch_max: int) -> None:
    """Raises AssertionError."""
    # It runs after every event of a simulated world: values for a message are gathered only when one is needed.
    _check_stages(orders)
    assert len(orders.running) <= batch_max, ("I56 batch too large", len(orders.running), batch_max)
    _check_work(orders)
    _check_blocks(orders)
    copies: dict[DecodeSequence, list[int]] = {}
    for sequence, count in orders.copies.values():
        assert count >= 1, ("I63 nothing to copy", sequence.order_id)
        copies.setdefault(sequence, []).append(count)
    _check_moves(orders)
    for sequence in orders.open.values():
        _check_sequence(orders, sequence, copies.get(sequence, []))
    _check_ended(orders)


def _check_stages(orders: Orders) -> None:
    """Every open order is in exactly one place, the one of its `stage`."""
    known = orders.open
    places = [*orders.waiting.values(), *orders.running, *orders.swapped]
    if orders.moving_in is not None and orders.moving_in.stage is not Stage.ENDED:
        places.append(orders.moving_in)
    for sequence in places:
        assert known.get(sequence.order_id) is sequence, (
            "I55 not open, or another of the id",
            sequence.order_id,
        )
    there = (len(places), len(set(places)), len(known))
    assert there == (len(known),) * 3, ("I55 in no place, or in two", places, list(known))
    for stage, some in (
        (Stage.WAITING, orders.waiting.values()),
        (Stage.RUNNING, orders.running),
        (Stage.SWAPPED, orders.swapped),
    ):
        for sequence in some:
            assert sequence.stage is stage, ("I55 another stage", stage, sequence.order_id, sequence.stage)


def _check_work(orders: Orders) -> None:
    """The compute thread does one thing at a time, and sleeps only when nothing could be done."""
    work = [bool(orders.in_step), orders.moving_out is not None, orders.moving_in is not None]
    assert sum(work) + orders.asleep <= 1, ("I57 compute thread", work, orders.asleep)
    for sequence in orders.in_step:
        there = sequence.stage is Stage.ENDED or sequence in orders.running
        assert there, ("I57 in the step and not in the batch", sequence.order_id)
    if orders.moving_out is not None and orders.moving_out.stage is not Stage.ENDED:
        assert orders.moving_out in orders.running, ("I57 swapped out of nowhere", orders.moving_out.order_id)
    if orders.asleep and not orders.stopped:
        for order_id, sequence in orders.waiting.items():
            assert not sequence.ready, ("I58 ready and nobody wakes the compute thread", order_id)
        assert not orders.running, ("I58 running and nobody wakes the compute thread", len(orders.running))
    if orders.layout.layers:
        for sequence in _busy(orders):
            assert sequence.table or sequence.loaded, (
                "I59 blocks given away while a thread works on them",
                sequence.order_id,
            )


def _busy(orders: Orders) -> list[DecodeSequence]:
    """Whose blocks a thread reads or writes; one may stand here more than once."""
    busy = [*orders.in_step, *orders.sharing.values(), *orders.pushing.values()]
    if orders.moving_in is not None:
        busy.append(orders.moving_in)
    if orders.moving_out is not None:
        busy.append(orders.moving_out)
    if orders.copies:
        busy += [sequence for sequence, _ in orders.copies.values()]
    return busy


def _holders(orders: Orders) -> dict[DecodeSequence, None]:
    """Sequences that may have blocks, each once: the open ones, and those that ended while a thread works on them."""
    return dict.fromkeys([*orders.open.values(), *_busy(orders)])


def _check_blocks(orders: Orders) -> None:
    """Every block is free, or in one table."""
    orders.blocks.check()
    held = [block for sequence in _holders(orders) for block in sequence.own_blocks]
    held += [block for hold in orders.holds.open.values() for block in hold.blocks]
    push = orders.moves.push
    if push is not None and push.orphaned:
        held += push.blocks
    each_once = len(set(held)) == len(held)
    assert each_once, ("I60 a block of two", {s.order_id: s.table for s in _holders(orders)})
    assert orders.blocks.are_used(held), ("I60 a free block in a table", held)
    assert len(held) == orders.blocks_used, ("I60 blocks of nobody", len(held), orders.blocks_used)


def _check_moves(orders: Orders) -> None:
    """A sequence that moves runs, and is all here until it is all there."""
    push, size = orders.moves.push, orders.layout.block_tokens
    for order_id, move in orders.moves.open.items():
        sequence = move.sequence
        assert orders.open.get(order_id) is sequence, ("I61 moves and is not open", order_id)
        assert sequence in orders.running, ("I61 moves and does not run", order_id)
        mine = sequence.table[sequence.away : sequence.away + move.blocks]
        assert AWAY not in mine, ("I61 moves and is away", order_id, sequence.table)
        assert len(mine) == move.blocks, ("I61 moves more than it has", order_id, move.blocks, sequence.table)
        assert 0 <= move.tokens <= move.blocks * size, (
            "I61 moved tokens",
            order_id,
            move.tokens,
            move.blocks,
        )
    if push is not None:
        read = orders.blocks.are_used(push.blocks)
        assert read, ("I59 blocks given away that are being sent", push.blocks)
    for sequence in orders.open.values():
        away = sequence.blocks_away()
        assert sequence.away == away, ("I62 parts elsewhere", sequence.order_id, sequence.away, away)
        if sequence.table:
            here = [block for block in sequence.table if block != AWAY]
            assert sequence.own_blocks == here, ("I62 away in the middle", sequence.order_id, sequence.table)


def _check_sequence(orders: Orders, sequence: DecodeSequence, copies: list[int]) -> None:
    """An open order. `copies`: how many layers of blocks each copy of it that is under way has."""
    order_id, kv, layout, output = sequence.order_id, sequence.kv, orders.layout, sequence.output
    complete = sequence.loaded
    assert kv.copying == len(copies), ("I63 copies under way", order_id, kv.copying, len(copies))
    started = kv.started.count(1)
    assert sequence.asked_ns or not any(part.hold for part in sequence.parts), ("I62 held unasked", order_id)
    assert kv.copied + sum(copies) == started, ("I63 copied", order_id, kv.copied, copies, started)
    assert not sequence.finish_reason, ("I64 finished and open", order_id, sequence.finish_reason)
    assert len(output) == len(sequence.tokens), ("I64 output", order_id)
    if output:
        assert sequence.result is not None, ("I64 output before the first token", order_id)
        assert sequence.taken, ("I64 output before the prompt", order_id)
        if sequence.replay:
            known = sequence.replay[: len(output)]
            assert output[: len(known)] == known, ("I64 other tokens than the client has", order_id)
    if layout.layers and orders.has_store:
        # Its lease must last until the KV is here, and no longer.
        assert sequence.released == complete, ("I65 lease", order_id, sequence.released, complete)
    if sequence.stage is Stage.WAITING:
        blocks, whole = len(sequence.table), kv.blocks if layout.layers else 0
        assert blocks in (0, whole), (
            "I63 blocks of a prompt",
            order_id,
            sequence.table,
            whole,
        )
        assert blocks or not started or sequence.elsewhere, ("I63 copied to nowhere", order_id)
        return
    if layout.layers:
        assert complete, ("I66 joined before its KV", order_id, kv.copied, len(kv.started))
        held = len(sequence.table) or sequence.held_blocks + sequence.away
        needed = sequence.length + (sequence in orders.in_step)
        assert sequence.elsewhere or held * layout.block_tokens >= needed, (
            "I66 no block for its KV",
            order_id,
            held,
            needed,
        )
    if sequence.stage is Stage.SWAPPED and sequence is not orders.moving_in:
        assert not sequence.table, ("I67 swapped out with blocks", order_id, sequence.table)
        assert sequence.held_blocks, ("I67 swapped out with nothing held", order_id)


def _check_ended(orders: Orders) -> None:
    """An order that has ended is not open and has given back its lease."""
    assert orders.open.keys().isdisjoint(orders.finished), ("I64 finished and open", list(orders.finished))
    leases = bool(orders.layout.layers and orders.has_store)
    for order_id, sequence in orders.finished.items():
        assert sequence.stage is Stage.ENDED, ("I68 finished and alive", order_id, sequence.stage)
        assert sequence.finish_reason in ("stop", "length"), ("I68 finished how", sequence.finish_reason)
        if leases:
            assert sequence.released, ("I65 finished with its lease", order_id)
    for order_id in orders.early:
        assert order_id not in orders.open, ("I68 early and open", order_id)
    for sequence in orders.sharing.values():
        assert sequence.stage is Stage.ENDED, ("I68 shared and open", sequence.order_id)
