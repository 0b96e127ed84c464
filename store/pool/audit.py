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
        assert len(hold.slots) == len(hold.keys), ("I42 keys of a hold", hold)
        for number in hold.slots:
            holders[number] += 1
    for writer in writers.values():
        for number in writer.slots:
            writing[number] += 1
    committed = SlotState.COMMITTED
    free = set(free_slots)
    assert len(free) == len(free_slots), "I43 a slot is free twice"
    idle = set(queues.order())
    for number, slot in enumerate(slots):
        state, held, written = slot.state, slot.holders, slot.writers
        assert (held, written) == (holders[number], writing[number]), (
            "I44 holders and writers",
            number,
            slot,
        )
        if state is committed:
            assert number not in free, ("I45 free and committed", number, slot)
            assert (number in idle) == (not held and not written), ("I46 idle", number, slot)
            continue
        assert number not in idle, ("I46 idle", number, slot)
        assert (number in free) == (state is SlotState.FREE), ("I45 free", number, slot)
        if state is SlotState.FREE:
            assert (held, written) == (0, 0), ("I47 free and held", number, slot)
        elif state is SlotState.RESERVED:
            assert held, ("I47 reserved by nobody", number, slot)
        else:
            assert held == 0, ("I47 condemned and held", number, slot)
            assert (number in lingering) == (written == 0), ("I48 lingering", number, slot)
    assert len(queues) == len(idle), "I49 an idle slot is in two orders"
    for number in idle:
        assert number in queues, ("I49 in the order of idle slots and not idle", number)
