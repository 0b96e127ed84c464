"""A node's pool: held blocks stay, tails go first, what finds no room is left out."""

from __future__ import annotations

from halfmoon.conductor.simulation.nodes import BlockCache


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
