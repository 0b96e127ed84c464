"""The pool: against a simple model, and the cases that bit others."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from halfmoon.store.errors import BlockMissing, OrderUnknown, StoreError, StoreFull
from halfmoon.store.pool.eviction import EvictionName, make_eviction
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.slots import Owner, SlotState
from tests.lengths import examples

SLOTS = 6


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def chain(first: int, count: int) -> list[bytes]:
    return [key(first + i) for i in range(count)]


def committed(pool: Pool, name: str, keys: list[bytes]) -> Owner:
    owner = Owner(name, "w")
    pool.open_put(owner, keys, len(keys), expires_ns=10**9)
    pool.commit(owner, dict.fromkeys(range(len(keys)), 1))
    return owner


def test_four_hundred_blocks_through_a_pool_of_two_hundred_with_fifty_leased() -> None:
    pool = Pool(200)
    leased = committed(pool, "leased", chain(0, 50))
    slots = list(pool.hold(leased).slots)
    for number in range(40):
        assert all(pool.probe(chain(0, 50)))
        before = pool.hold(leased).expires_ns
        pool.probe(chain(1000, 400))
        assert pool.hold(leased).expires_ns == before
        pool.release(committed(pool, f"o{number}", chain(1000 + 10 * number, 10)))
        pool.check()
    assert [pool.find(k) for k in chain(0, 50)] == slots
    assert pool.counts().committed == 200
    assert pool.probe(chain(1000, 400)) == [False] * 250 + [True] * 150


def test_a_probe_does_not_save_a_block_from_eviction() -> None:
    pool = Pool(2)
    pool.release(committed(pool, "a", [key(1)]))
    pool.release(committed(pool, "b", [key(2)]))
    pool.probe([key(1)])
    committed(pool, "c", [key(3)])
    assert pool.probe([key(1), key(2), key(3)]) == [False, True, True]


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    pool = Pool(4)
    pool.release(committed(pool, "a", chain(0, 4)))
    for gone in (3, 2, 1):
        pool.release(committed(pool, f"n{gone}", [key(100 + gone)]))
        assert pool.probe(chain(0, 4))[:gone] == [True] * gone
        assert not pool.probe([key(gone)])[0]


def test_the_tail_goes_first_also_when_a_writer_closed_last() -> None:
    pool = Pool(3)
    owner = Owner("a", "w")
    pool.open_put(owner, chain(0, 3), 3, expires_ns=10**9)
    pool.open_writer(owner, "worker", deadline_ns=10**9)
    pool.commit(owner, {0: 1, 1: 1, 2: 1})
    pool.release(owner)
    assert pool.counts().committed == 3
    pool.close_writer(owner, "worker")
    committed(pool, "b", [key(50)])
    assert pool.probe(chain(0, 3)) == [True, True, False]


def test_leasing_a_tail_keeps_its_heads_newer() -> None:
    pool = Pool(4)
    pool.release(committed(pool, "a", chain(0, 3)))
    pool.release(committed(pool, "b", [key(50)]))
    reader = Owner("r", "n2")
    pool.lease(reader, chain(0, 3), first_block=2, expires_ns=10**9)
    pool.release(reader)
    committed(pool, "c", [key(60), key(61)])
    assert pool.probe([*chain(0, 3), key(50)]) == [True, True, False, False]


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    pool = Pool(4)
    committed(pool, "held", chain(0, 3))
    pool.release(committed(pool, "idle", [key(9)]))
    with pytest.raises(StoreFull):
        pool.open_put(Owner("big", "w"), chain(20, 2), 2, expires_ns=10**9)
    assert pool.probe([key(9)]) == [True]
    assert pool.take_changes()[-1].kind == "stored"
    pool.check()


def test_a_present_block_is_not_evicted_for_the_put_that_names_it() -> None:
    pool = Pool(3)
    pool.release(committed(pool, "a", chain(0, 2)))
    hold = pool.open_put(Owner("b", "w"), chain(0, 2), 3, expires_ns=10**9)
    assert hold.present == [0, 1]
    with pytest.raises(StoreFull):
        pool.open_put(Owner("c", "w"), [key(7)], 1, expires_ns=10**9)


def test_two_puts_of_one_key_keep_the_first_and_free_the_second() -> None:
    pool = Pool(2)
    one, two = Owner("1", "w"), Owner("2", "w")
    for owner in (one, two):
        pool.open_put(owner, [key(1)], 1, expires_ns=10**9)
    assert pool.commit(one, {0: 5}) == [0]
    assert pool.commit(two, {0: 5}) == []
    pool.check()
    pool.release(two)
    pool.release(one)
    assert (pool.counts().free, pool.counts().committed) == (1, 1)


def test_a_slot_with_a_late_writer_is_condemned_until_it_closes_or_its_deadline_passes() -> None:
    pool = Pool(2)
    one, two = Owner("1", "w"), Owner("2", "w")
    for owner in (one, two):
        pool.open_put(owner, [], 1, expires_ns=100)
        pool.open_writer(owner, "peer", deadline_ns=200)
        pool.release(owner)
    assert pool.counts().condemned == 2
    with pytest.raises(StoreFull):
        pool.open_put(Owner("3", "w"), [], 1, expires_ns=100)
    pool.close_writer(one, "peer")
    assert pool.counts().free == 1
    pool.sweep(199)
    assert pool.counts().condemned == 1
    pool.sweep(200)
    assert pool.counts().free == 2
    pool.check()


def test_only_reserved_slots_of_the_order_may_be_written() -> None:
    pool = Pool(3)
    one = Owner("1", "w")
    slots = pool.open_put(one, [key(1)], 2, expires_ns=100).slots
    assert pool.may_write(one, slots) == ""
    assert pool.may_write(Owner("2", "w"), slots) == "no reservation"
    assert "not reserved" in pool.may_write(one, [next(i for i in range(3) if i not in slots)])
    pool.commit(one, {0: 1})
    assert "committed" in pool.may_write(one, slots)


class Books(RuleBasedStateMachine):
    """The pool against dictionaries: what is visible, what is held, and that a put fails only when it must."""

    owners = Bundle("owners")
    policy: EvictionName = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(SLOTS, eviction=make_eviction(self.policy))
        self.now = 0
        self.number = 0
        self.visible: set[bytes] = set()
        self.holds: dict[Owner, tuple[list[int], list[bytes], int]] = {}
        self.writers: dict[tuple[Owner, str], tuple[int, set[int]]] = {}

    def follow(self) -> None:
        for change in self.pool.take_changes():
            if change.kind == "stored":
                assert change.key not in self.visible
                self.visible.add(change.key)
            else:
                self.visible.remove(change.key)
        assert self.visible == set(self.pool.keys())

    def new_owner(self) -> Owner:
        self.number += 1
        return Owner(f"o{self.number}", "w")

    def must_stay(self) -> set[int]:
        """Slots that nobody may take: held, or under an open writer."""
        held = {slot for slots, _, _ in self.holds.values() for slot in slots}
        return held.union(*(slots for _, slots in self.writers.values())) if self.writers else held

    @rule(
        target=owners,
        first=st.integers(0, 9),
        keyed=st.integers(0, 4),
        tail=st.integers(0, 2),
        ttl=st.integers(1, 9),
    )
    def put(self, first: int, keyed: int, tail: int, ttl: int) -> object:
        keys, owner = chain(first, keyed), self.new_owner()
        here = [k for k in keys if k in self.visible]
        kept = self.must_stay() | {self.pool.find(k) or 0 for k in here if self.pool.find(k) is not None}
        room = SLOTS - len(kept)
        try:
            hold = self.pool.open_put(owner, keys, keyed + tail, expires_ns=self.now + ttl)
        except StoreFull:
            assert keyed + tail - len(here) > room
            return multiple()
        assert keyed + tail - len(here) <= room
        assert [keys[i] for i in hold.present] == here
        assert not {s for i, s in enumerate(hold.slots) if i not in hold.present} & self.must_stay()
        self.holds[owner] = (list(hold.slots), list(hold.keys), self.now + ttl)
        self.follow()
        return owner

    @rule(target=owners, first=st.integers(0, 9), count=st.integers(1, 3), ttl=st.integers(1, 9))
    def lease(self, first: int, count: int, ttl: int) -> object:
        owner, keys = self.new_owner(), chain(first, count)
        try:
            hold = self.pool.lease(owner, keys, first_block=0, expires_ns=self.now + ttl)
        except BlockMissing as problem:
            assert not all(k in self.visible for k in keys)
            assert all(k in self.visible for k in keys[: problem.held])  # noqa: PT017
            return multiple()
        self.holds[owner] = (list(hold.slots), keys, self.now + ttl)
        return owner

    @rule(owner=owners, index=st.integers(0, 5))
    def commit(self, owner: Owner, index: int) -> None:
        if owner not in self.holds:
            with pytest.raises(OrderUnknown):
                self.pool.commit(owner, {0: 1})
            return
        if index < len(self.holds[owner][0]):
            self.pool.commit(owner, {index: index + 1})
        self.follow()

    @rule(owner=owners, late=st.integers(1, 9))
    def writer(self, owner: Owner, late: int) -> None:
        if owner in self.holds and (owner, "x") not in self.writers:
            self.pool.open_writer(owner, "x", deadline_ns=self.now + late)
            slots = {s for s in self.holds[owner][0] if self.pool.slots[s].state is SlotState.RESERVED}
            self.writers[owner, "x"] = (self.now + late, slots)

    @rule(owner=owners)
    def close(self, owner: Owner) -> None:
        self.pool.close_writer(owner, "x")
        self.writers.pop((owner, "x"), None)

    @rule(target=owners, owner=owners, ttl=st.integers(1, 9))
    def share(self, owner: Owner, ttl: int) -> object:
        if owner not in self.holds:
            return multiple()
        to = self.new_owner()
        self.pool.share(owner, to, expires_ns=self.now + ttl)
        slots, keys, _ = self.holds[owner]
        self.holds[to] = (slots, keys, self.now + ttl)
        return to

    @rule(owner=consumes(owners))
    def release(self, owner: Owner) -> None:
        assert self.pool.release(owner) == (self.holds.pop(owner, None) is not None)

    @rule(owner=owners)
    def open_twice(self, owner: Owner) -> None:
        if owner in self.holds:
            with pytest.raises(StoreError):
                self.pool.open_put(owner, [], 1, expires_ns=1)

    @rule(step=st.integers(1, 4))
    def sweep(self, step: int) -> None:
        self.now += step
        expired = self.pool.sweep(self.now)
        assert set(expired) == {o for o, (_, _, at) in self.holds.items() if at <= self.now}
        for owner in expired:
            del self.holds[owner]
        self.writers = {at: w for at, w in self.writers.items() if w[0] > self.now}

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        held = {slot for slots, _, _ in self.holds.values() for slot in slots}
        counts = self.pool.counts()
        assert counts.reserved == sum(self.pool.slots[s].state is SlotState.RESERVED for s in held)
        assert counts.free + counts.reserved + counts.committed + counts.condemned == SLOTS
        under_writers = set().union(*(slots for _, slots in self.writers.values())) if self.writers else set()
        assert counts.condemned == len(
            {s for s in under_writers - held if self.pool.slots[s].state is not SlotState.COMMITTED}
        )


class BooksLfu(Books):
    policy = "lfu"


class BooksS3Fifo(Books):
    policy = "s3fifo"


TestBooks = Books.TestCase
TestBooksLfu = BooksLfu.TestCase
TestBooksS3Fifo = BooksS3Fifo.TestCase
for case, count in ((TestBooks, 60), (TestBooksLfu, 60), (TestBooksS3Fifo, 80)):
    case.settings = settings(max_examples=examples(count), stateful_step_count=40, deadline=None)
del case  # or it is collected once more
