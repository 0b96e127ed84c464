"""Invariants of the decode machine. A violation is a fault of ours, and says with which values."""

from __future__ import annotations

from halfmoon.workers.decode.orders import Orders
from halfmoon.workers.decode.sequence import DecodeSequence, Stage


def check(orders: Orders, batch_max: int) -> None:
    """Raises AssertionError."""
    _check_stages(orders)
    assert len(orders.running) <= batch_max, ("batch too large", len(orders.running), batch_max)
    _check_work(orders)
    _check_blocks(orders)
    for sequence in orders.open.values():
        _check_sequence(orders, sequence)
    _check_ended(orders)


def _check_stages(orders: Orders) -> None:
    """Every open order is in exactly one place, and says so."""
    places = [*orders.waiting.values(), *orders.running, *orders.swapped]
    if orders.moving_in is not None and orders.moving_in.stage is not Stage.ENDED:
        places.append(orders.moving_in)
    found = [sequence.order_id for sequence in places]
    assert sorted(found) == sorted(orders.open), ("in no place, or in two", found, list(orders.open))
    for sequence in places:
        assert orders.open[sequence.order_id] is sequence, ("another of the same id", sequence.order_id)
    for stage, there in (
        (Stage.WAITING, list(orders.waiting.values())),
        (Stage.RUNNING, orders.running),
        (Stage.SWAPPED, list(orders.swapped)),
    ):
        wrong = [(sequence.order_id, sequence.stage) for sequence in there if sequence.stage is not stage]
        assert not wrong, ("another stage than", stage, wrong)


def _check_work(orders: Orders) -> None:
    """The compute thread does one thing at a time, and sleeps only when nothing could be done."""
    work = [bool(orders.in_step), orders.moving_out is not None, orders.moving_in is not None]
    assert sum(work) + orders.asleep <= 1, ("compute thread", work, orders.asleep)
    lost = [s.order_id for s in orders.in_step if s.stage is not Stage.ENDED and s not in orders.running]
    assert not lost, ("in the step and not in the batch", lost)
    if orders.moving_out is not None and orders.moving_out.stage is not Stage.ENDED:
        assert orders.moving_out in orders.running, ("swapped out of nowhere", orders.moving_out.order_id)
    if orders.asleep and not orders.stopped:
        ready = [order_id for order_id, sequence in orders.waiting.items() if sequence.ready]
        assert not ready, ("ready and nobody wakes the compute thread", ready)
        assert not orders.running, ("running and nobody wakes the compute thread", len(orders.running))
    if orders.layout.layers:
        bare = [sequence.order_id for sequence in _busy(orders) if not sequence.table]
        assert not bare, ("blocks given away while a thread works on them", bare)
    empty = [copy_id for copy_id, (_, count) in orders.copies.items() if count < 1]
    assert not empty, ("nothing to copy", empty)


def _busy(orders: Orders) -> list[DecodeSequence]:
    """Whose blocks a thread reads or writes; one may stand here more than once."""
    moving = [sequence for sequence in (orders.moving_in, orders.moving_out) if sequence is not None]
    copied = [sequence for sequence, _ in orders.copies.values()]
    return [*orders.in_step, *moving, *copied, *orders.sharing.values()]


def _holders(orders: Orders) -> list[DecodeSequence]:
    """Who may have blocks, each once: what is open, and what ended while a thread works on its blocks."""
    return list(dict.fromkeys([*orders.open.values(), *_busy(orders)]))


def _check_blocks(orders: Orders) -> None:
    """Every block is free, or in one table."""
    orders.blocks.check()
    owner: dict[int, str] = {}
    for sequence in _holders(orders):
        for block in sequence.table:
            assert block not in owner, ("a block of two", block, owner[block], sequence.order_id)
            assert not orders.blocks.is_free(block), ("a free block in a table", block, sequence.order_id)
            owner[block] = sequence.order_id
    assert len(owner) == orders.blocks_used, ("blocks of nobody", len(owner), orders.blocks_used)


def _check_sequence(orders: Orders, sequence: DecodeSequence) -> None:
    """An open order."""
    order_id, kv, layout = sequence.order_id, sequence.kv, orders.layout
    copies = [count for copied, count in orders.copies.values() if copied is sequence]
    assert kv.copying == len(copies), ("copies under way", order_id, kv.copying, len(copies))
    started = kv.started.count(1)
    assert kv.copied + sum(copies) == started, ("copied", order_id, kv.copied, copies, started)
    assert not sequence.finish_reason, ("finished and open", order_id, sequence.finish_reason)
    assert len(sequence.output) == len(sequence.tokens), ("output", order_id)
    if sequence.output:
        assert sequence.result is not None, ("output before the first token", order_id)
        assert sequence.taken, ("output before the prompt", order_id)
        known = sequence.replay[: len(sequence.output)]
        assert sequence.output[: len(known)] == known, ("other tokens than the client has", order_id)
    if layout.layers and orders.has_store:
        # Its lease must last until the KV is here, and no longer.
        assert sequence.released == kv.complete, ("lease", order_id, sequence.released, kv.complete)
    if sequence.stage is Stage.WAITING:
        whole = [0, len(kv.slots)] if layout.layers else [0]
        assert len(sequence.table) in whole, ("blocks of a prompt", order_id, sequence.table, whole)
        assert sequence.table or not started, ("copied to nowhere", order_id)
    elif layout.layers:
        assert kv.complete, ("joined before its KV", order_id, kv.copied, len(kv.started))
        held = len(sequence.table) or sequence.held_blocks
        needed = sequence.length + (sequence in orders.in_step)
        assert held * layout.block_tokens >= needed, ("no block for its KV", order_id, held, needed)
    if sequence.stage is Stage.SWAPPED and sequence is not orders.moving_in:
        assert not sequence.table, ("swapped out with blocks", order_id, sequence.table)
        assert sequence.held_blocks, ("swapped out with nothing held", order_id)


def _check_ended(orders: Orders) -> None:
    """An order that has ended is not open and has given back its lease."""
    for order_id, sequence in orders.finished.items():
        assert order_id not in orders.open, ("finished and open", order_id)
        assert sequence.stage is Stage.ENDED, ("finished and alive", order_id, sequence.stage)
        assert sequence.finish_reason in ("stop", "length"), ("finished how", sequence.finish_reason)
        if orders.layout.layers and orders.has_store:
            assert sequence.released, ("finished with its lease", order_id)
    for order_id in orders.early:
        assert order_id not in orders.open, ("early and open", order_id)
    for sequence in orders.sharing.values():
        assert sequence.stage is Stage.ENDED, ("shared and open", sequence.order_id)
