"""A node's pool: held blocks stay, tails go first, what finds no room is left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.conductor.simulation.nodes import BlockCache

KEYS = [bytes((value,)) for value in range(12)]


def keys(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def filled(slots: int, *chains: str) -> BlockCache:
    pool = BlockCache(slots)
    for chain in chains:
        pool.commit(keys(chain))
        pool.release(keys(chain))
    return pool


def test_the_longest_unused_goes_first_and_of_a_chain_its_tail() -> None:
    pool = filled(6, "abc", "def")
    assert pool.commit(keys("xy")) == (keys("xy"), keys("cb"))
    assert pool.run(keys("abc")) == 1


def test_what_is_used_again_stays() -> None:
    pool = filled(4, "ab", "cd")
    pool.release(pool.hold(keys("ab")))
    assert pool.commit(keys("xy")) == (keys("xy"), keys("dc"))


def test_held_blocks_are_not_evicted_and_what_finds_no_room_is_left_out() -> None:
    pool = filled(3, "abc")
    assert pool.hold(keys("abz")) == keys("ab")
    assert pool.commit(keys("xyz")) == (keys("x"), keys("c"))
    pool.release(keys("ab"))
    assert pool.commit(keys("y")) == (keys("y"), keys("b"))


@given(
    slots=st.integers(1, 8),
    before=st.lists(st.lists(st.sampled_from(KEYS), unique=True), max_size=4),
    busy=st.lists(st.sampled_from(KEYS), unique=True),
    asked=st.lists(st.sampled_from(KEYS), unique=True),
    meanwhile=st.lists(st.sampled_from(KEYS), unique=True),
)
def test_a_commit_that_releases_at_once_is_a_commit_and_a_release(
    slots: int, before: list[list[bytes]], busy: list[bytes], asked: list[bytes], meanwhile: list[bytes]
) -> None:
    found = []
    for at_once in (True, False):
        pool = BlockCache(slots)
        for chain in before:
            pool.release(pool.commit(chain)[0])
        pool.hold(busy)
        held = pool.hold(asked)
        pool.release(pool.commit(meanwhile)[0])
        if at_once:
            added, evicted = pool.commit_released(asked, held)
        else:
            added, evicted = pool.commit(asked)
            pool.release([key for key in asked if key in {*held, *added}])
        # All that nobody holds, in the order in which it goes.
        goes = pool.commit([b"%d" % value for value in range(100, 100 + slots)])[1]
        found.append((added, evicted, goes, pool.held, [key in pool for key in KEYS]))
    assert found[0] == found[1]
