"""Each invariant of a pool, and a change of a real pool that it refuses. The numbers are those of
`docs/invariants.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.slots import Owner, SlotState

Change = Callable[[Pool], None]
FREE, IDLE, LEASED, RESERVED, CONDEMNED = 5, 0, 1, 2, 3


def made() -> Pool:
    """Slots in each state: idle, leased, reserved, condemned with a writer, and free ones."""
    pool = Pool(6, quotas={"tenant": 2})
    for name in ("idle", "leased", "reserved", "condemned"):
        owner = Owner(name, "w")
        pool.open_put(
            owner, [name.encode()], 1, expires_ns=10**9, tenant="tenant" if name == "leased" else ""
        )
        if name in ("idle", "leased"):
            pool.commit(owner, {0: 1})
    pool.release(Owner("idle", "w"))
    pool.open_writer(Owner("condemned", "w"), "tcp", deadline_ns=10**9)
    pool.release(Owner("condemned", "w"))
    return pool


def a_slot_more_than_keys(pool: Pool) -> None:
    pool.hold(Owner("leased", "w")).keys.append(b"another")


def free_twice(pool: Pool) -> None:
    pool._free.append(FREE)


def a_holder_too_many(pool: Pool) -> None:
    pool.slots[LEASED].holders += 1


def a_writer_too_many(pool: Pool) -> None:
    pool.slots[RESERVED].writers += 1


def free_and_leased(pool: Pool) -> None:
    pool._free.append(LEASED)


def free_and_not_listed(pool: Pool) -> None:
    pool._free.remove(FREE)


def idle_and_not_in_order(pool: Pool) -> None:
    pool._idle.remove(IDLE)


def reserved_and_in_the_order_of_idle_ones(pool: Pool) -> None:
    pool._idle.add(RESERVED, b"reserved", pinned=False)


def free_and_held(pool: Pool) -> None:
    pool.slots[RESERVED].state = SlotState.FREE
    pool._free.append(RESERVED)


def reserved_by_nobody(pool: Pool) -> None:
    pool.slots[FREE].state = SlotState.RESERVED
    pool._free.remove(FREE)


def condemned_and_held(pool: Pool) -> None:
    pool.slots[RESERVED].state = SlotState.CONDEMNED
    pool._lingering.add(RESERVED)


def lingers_with_a_writer(pool: Pool) -> None:
    pool._lingering.add(CONDEMNED)


def in_two_orders(pool: Pool) -> None:
    pool._idle._pinned.add(IDLE, b"idle")


def counts_for_another_tenant(pool: Pool) -> None:
    pool.slots[LEASED].tenant = "another"


def over_its_quota(pool: Pool) -> None:
    pool._quotas["tenant"] = 0


def pinned_and_not_listed(pool: Pool) -> None:
    pool.slots[IDLE].pinned_until_ns = 1


def found_at_another_slot(pool: Pool) -> None:
    pool._by_key[b"idle"] = LEASED


def key_of_no_block(pool: Pool) -> None:
    pool._by_key[b"another"] = FREE


PLANTED: list[tuple[str, Change]] = [
    ("I42", a_slot_more_than_keys),
    ("I43", free_twice),
    ("I44", a_holder_too_many),
    ("I44", a_writer_too_many),
    ("I45", free_and_leased),
    ("I45", free_and_not_listed),
    ("I46", idle_and_not_in_order),
    ("I46", reserved_and_in_the_order_of_idle_ones),
    ("I47", free_and_held),
    ("I47", reserved_by_nobody),
    ("I47", condemned_and_held),
    ("I48", lingers_with_a_writer),
    ("I49", in_two_orders),
    ("I50", counts_for_another_tenant),
    ("I51", over_its_quota),
    ("I52", pinned_and_not_listed),
    ("I53", found_at_another_slot),
    ("I53", key_of_no_block),
]


@pytest.mark.parametrize(
    ("number", "change"), PLANTED, ids=[f"{number}-{change.__name__}" for number, change in PLANTED]
)
def test_a_pool_that_was_changed_is_refused_by_number(number: str, change: Change) -> None:
    pool = made()
    pool.check()
    change(pool)
    with pytest.raises(AssertionError, match=re.escape(number) + " "):
        pool.check()
