"""Holds that are ended from outside: by the conductor, or by the peer that pushed."""

from __future__ import annotations

import pytest

from halfmoon.store.errors import OrderUnknown
from halfmoon.store.pool import guard as guards
from halfmoon.store.pool.guard import PoolGuard, open_pool, peer_writer
from halfmoon.store.pool.slots import Owner

S = 1_000_000_000
READER, WRITER = Owner("o1", "decode-0"), Owner("o1", peer_writer("prefill-0"))


class Clock:
    """The monotonic clock that the guard reads."""

    def __init__(self) -> None:
        self.now_ns = 100 * S

    def monotonic_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(guards, "time", made)
    return made


@pytest.fixture
def guard(clock: Clock) -> PoolGuard:
    """Three slots of four are reserved for a push from prefill-0; decode-0 reads them as they come."""
    made = PoolGuard(open_pool(4, "s3fifo", {}), ttl_ns=60 * S, grace_ns=S, announce=lambda changes: None)
    made.open_put(WRITER, [], 3, writer=WRITER.party)
    made.share(WRITER, READER)
    made.close_writer(WRITER, WRITER.party)
    return made


def passes(guard: PoolGuard, clock: Clock, elapsed_ns: int) -> None:
    """So much time, while the agent sweeps."""
    until_ns = clock.now_ns + elapsed_ns
    while clock.now_ns < until_ns:
        clock.now_ns = min(until_ns, clock.now_ns + S)
        guard.sweep()


def free_slots(guard: PoolGuard) -> int:
    guard.sweep()
    return guard.counts().free


def test_slots_of_a_reader_are_nobody_elses_until_it_has_heard_that_its_order_ended(
    guard: PoolGuard, clock: Clock
) -> None:
    guard.release(WRITER)
    guard.release_order("o1")
    assert free_slots(guard) == 1
    passes(guard, clock, guards.READER_GRACE_NS - 1)
    assert free_slots(guard) == 1
    guard.release(READER)
    assert free_slots(guard) == 4


def test_a_reader_that_never_hears_of_it_keeps_its_slots_for_the_grace_and_no_longer(
    guard: PoolGuard, clock: Clock
) -> None:
    guard.release(WRITER)
    guard.release_order("o1")
    passes(guard, clock, guards.READER_GRACE_NS)
    assert free_slots(guard) == 4


def test_nothing_is_done_any_more_with_a_hold_that_was_ended(guard: PoolGuard) -> None:
    guard.release_order("o1")
    with pytest.raises(OrderUnknown, match="order o1 holds nothing here for decode-0"):
        guard.hold(READER)
    with pytest.raises(OrderUnknown):
        guard.open_put(READER, [], 1, writer="worker")
    assert guard.begin_write("o1", READER.party, [0]) == "no reservation"


def test_a_writers_part_of_a_reservation_ends_without_the_readers(guard: PoolGuard, clock: Clock) -> None:
    guard.release(WRITER, writers=[WRITER.party], remember=True)
    clock.now_ns += 30 * S
    assert free_slots(guard) == 1
    guard.release(READER, writers=["worker"], remember=True)
    assert free_slots(guard) == 4


def test_time_in_which_the_agent_itself_stood_still_is_no_time_of_a_lease(
    guard: PoolGuard, clock: Clock
) -> None:
    """Nobody could renew a lease with it, and its own threads may be in the middle of a copy."""
    guard.open_writer(WRITER, "ssd-1", clock.now_ns + 2 * S)
    passes(guard, clock, S)
    clock.now_ns += 3600 * S
    assert free_slots(guard) == 1
    assert guard.owners("o1") == [WRITER, READER]
    passes(guard, clock, 60 * S)
    assert free_slots(guard) == 4
