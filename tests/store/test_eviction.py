"""Eviction policies: what each must do by its definition, and what all must do whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.store.pool.eviction import (
    Eviction,
    EvictionName,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    S3Fifo,
    make_eviction,
)
from tests.lengths import examples

NAMES: tuple[EvictionName, ...] = ("lru", "lfu", "s3fifo")


def key(slot: int, generation: int = 0) -> bytes:
    return bytes([slot, generation])


def use(policy: Eviction, slot: int, generation: int = 0) -> None:
    """Held and given back."""
    policy.remove(slot)
    policy.add(slot, key(slot, generation))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(150), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "touch", "remove", "victim"]), st.integers(0, 7)), max_size=80
    )
)
def test_a_victim_is_idle_and_gone(name: EvictionName, steps: list[tuple[str, int]]) -> None:
    policy = make_eviction(name)
    idle: set[int] = set()
    for step, slot in steps:
        match step:
            case "add":
                if slot not in idle:
                    policy.add(slot, key(slot))
                    idle.add(slot)
            case "touch":
                policy.touch(slot)
            case "remove":
                policy.remove(slot)
                idle.discard(slot)
            case _ if idle:
                gone = policy.victim()
                assert gone in idle
                idle.remove(gone)
            case _:
                with pytest.raises(LookupError):
                    policy.victim()
        assert len(policy) == len(idle)
        assert [s for s in range(8) if s in policy] == sorted(idle)
    left = [policy.victim() for _ in range(len(idle))]
    assert sorted(left) == sorted(idle)


@pytest.mark.parametrize("name", NAMES)
def test_the_tail_of_a_chain_that_was_used_once_goes_first(name: EvictionName) -> None:
    policy = make_eviction(name)
    for slot in reversed(range(5)):  # the pool gives a chain back from its tail
        policy.add(slot, key(slot))
    assert [policy.victim() for _ in range(5)] == [4, 3, 2, 1, 0]


def test_lru_forgets_how_often() -> None:
    policy = LeastRecentlyUsed()
    for slot in (0, 0, 0, 1):
        use(policy, slot)
    policy.touch(0)
    use(policy, 2)
    assert [policy.victim() for _ in range(3)] == [1, 0, 2]


def test_lfu_keeps_what_is_used_often_and_lets_old_favourites_go() -> None:
    policy = LeastFrequentlyUsed()
    for slot in (0, 0, 0, 0, 1, 2):
        use(policy, slot)
    assert policy.victim() == 1
    generation = 0
    victims = []
    while 0 in policy:  # newcomers, each used twice: they start level with the last victim
        generation += 1
        for _ in range(2):
            use(policy, 1, generation)
        victims.append(policy.victim())
    assert victims[-1] == 0
    assert 1 < len(victims) < 10


def test_s3fifo_lets_a_scan_pass_and_knows_who_comes_back() -> None:
    policy = S3Fifo()
    for slot in (0, 1):  # used again while new: they belong to the main queue
        use(policy, slot)
        use(policy, slot)
    for slot in range(2, 8):
        policy.add(slot, key(slot))
    first = policy.victim()
    assert first == 2
    policy.add(first, key(first))  # it is back, and remembered
    scanned = []
    for generation in range(1, 9):  # blocks that nobody uses twice
        scanned.append(policy.victim())
        policy.add(scanned[-1], key(scanned[-1], generation))
    assert not {0, 1, first} & set(scanned)


def test_s3fifo_takes_a_new_block_when_the_whole_main_queue_is_held() -> None:
    policy = S3Fifo()
    for slot in range(4):  # all go to the main queue on the way to this victim
        use(policy, slot)
        use(policy, slot)
    assert policy.victim() == 0
    for slot in (1, 2, 3):
        policy.remove(slot)
    policy.add(4, key(4))  # a quarter of what is here: the main queue is due, and has nothing to give
    assert policy.victim() == 4
    with pytest.raises(LookupError):
        policy.victim()


def test_s3fifo_remembers_no_more_than_it_may() -> None:
    policy = S3Fifo()
    for slot in range(4):
        policy.add(slot, key(slot))
    for generation in range(1, 100):
        slot = policy.victim()
        policy.add(slot, key(slot, generation))
        assert len(policy._ghosts) <= S3Fifo.REMEMBERED * 4
