"""The pool's slots counted, and its invariant: every slot is accounted for exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from halfmoon.store.pool.idle_queues import IdleQueues
from halfmoon.store.pool.slots import Counts, Hold, Slot, SlotState, Writer


def counts(slots: Sequence[Slot], holds: int) -> Counts:
    by_state = dict.fromkeys(SlotState, 0)
    leased = leases = 0
    for slot in slots:
        by_state[slot.state] += 1
        if slot.state is SlotState.COMMITTED and slot.holders:
            leased += 1
            leases += slot.holders
    return Counts(
        slots=len(slots),
        free=by_state[SlotState.FREE],
        reserved=by_state[SlotState.RESERVED],
        committed=by_state[SlotState.COMMITTED],
        condemned=by_state[SlotState.CONDEMNED],
        leased=leased,
        leases=leases,
        holds=holds,
    )


def check_slots(
    slots: Sequence[Slot],
    holds: Mapping[Any, Hold],
    writers: Mapping[Any, Writer],
    free_slots: Sequence[int],
    queues: IdleQueues,
    lingering: Set[int],
) -> None:
    """Raises AssertionError with the values in it."""
    holders = [0] * len(slots)
    writing = [0] * len(slots)
    for hold in holds.values():
        assert len(hold.slots) == len(hold.keys), hold
        for number in hold.slots:
            holders[number] += 1
    for writer in writers.values():
        for number in writer.slots:
            writing[number] += 1
    free = set(free_slots)
    assert len(free) == len(free_slots), "a slot is free twice"
    idle = set(queues.order())
    assert len(queues) == len(idle), "an idle slot is in two orders"
    for number in idle:
        assert number in queues, ("in the order of idle slots and not idle", number)
    # It runs every second of a simulated world: slots are compared as a whole, and looked at one by one if they differ.
    _same(slots, "holders", [slot.holders for slot in slots], holders)
    _same(slots, "writers", [slot.writers for slot in slots], writing)
    states = [slot.state for slot in slots]
    _equal(slots, "free", free, _numbers(states, SlotState.FREE))
    committed = _numbers(states, SlotState.COMMITTED)
    _equal(
        slots, "idle", idle, {number for number in committed if not holders[number] and not writing[number]}
    )
    for number in free:
        assert (holders[number], writing[number]) == (0, 0), (number, slots[number])
    for number in _numbers(states, SlotState.RESERVED):
        assert holders[number], (number, slots[number])
    for number in _numbers(states, SlotState.CONDEMNED):
        assert holders[number] == 0, (number, slots[number])
        assert (number in lingering) == (writing[number] == 0), (number, slots[number])


def _numbers(states: Sequence[SlotState], wanted: SlotState) -> set[int]:
    return {number for number, state in enumerate(states) if state is wanted}


def _same(slots: Sequence[Slot], what: str, has: list[int], counted: list[int]) -> None:
    if has != counted:
        each = enumerate(zip(has, counted, strict=True))
        wrong = [(number, *pair, slots[number]) for number, pair in each if pair[0] != pair[1]]
        raise AssertionError((what, wrong))


def _equal(slots: Sequence[Slot], what: str, listed: set[int], wanted: set[int]) -> None:
    assert listed == wanted, (what, [(number, slots[number]) for number in sorted(listed ^ wanted)])
