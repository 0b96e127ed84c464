"""Where the blocks of a prompt lie while it is computed: a longer one than the cache takes turns in it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prefill_script import LAYOUT

from halfmoon.workers.model.segments import AWAY
from halfmoon.workers.prefill.cache_window import CacheWindow, outgrows_cache


def test_a_prompt_that_fits_lies_there_whole() -> None:
    for window in (CacheWindow(5, room=5, each=2), CacheWindow(5, room=9, each=0)):
        assert window.blocks == 5
        for block in range(5):
            assert list(window.away(block)) == []
            assert window.table([7, 3, 8, 1, 9], block) == [7, 3, 8, 1, 9][: block + 1]
    assert CacheWindow(5, room=5, each=0).table([7, 3, 8, 1, 9], 0, 4) == [7, 3, 8, 1]


def test_the_last_segments_take_turns() -> None:
    window = CacheWindow(9, room=5, each=2)
    assert window.blocks == 4
    seen = [(list(window.away(block)), window.table([7, 3, 8, 1], block)) for block in range(9)]
    a = AWAY
    assert seen == [
        ([], [7]),
        ([], [7, 3]),
        ([], [7, 3, 8]),
        ([], [7, 3, 8, 1]),
        ([1], [7, 3, a, a, 8]),
        ([1], [7, 3, a, a, 8, 1]),
        ([1, 2], [7, 3, a, a, a, a, 8]),
        ([1, 2], [7, 3, a, a, a, a, 8, 1]),
        ([1, 2, 3], [7, 3, a, a, a, a, a, a, 8]),
    ]


@pytest.mark.parametrize(
    ("blocks", "room", "each"), [(9, 3, 3), (31, 7, 3), (30, 29, 4), (12, 11, 1), (8, 1, 1)]
)
def test_every_block_is_somewhere(blocks: int, room: int, each: int) -> None:
    """Written once, and not overwritten while it counts as being in the cache."""
    window = CacheWindow(blocks, room=room, each=each)
    cache = list(range(100, 100 + window.blocks))
    assert window.blocks <= room
    held: dict[int, int] = {}
    for block in range(blocks):
        table = window.table(cache, block)
        assert len(table) == block + 1
        held[table[-1]] = block
        for before, place in enumerate(table):
            assert (place == AWAY) == (before // each in window.away(block))
            assert place == AWAY or held[place] == before, (block, before)


def test_only_exact_numerics_with_room_for_a_segment_outgrow_the_cache() -> None:
    exact = replace(LAYOUT, segment_tokens=30)
    assert outgrows_cache(exact, 3)
    assert not outgrows_cache(exact, 2)
    assert not outgrows_cache(replace(exact, numerics="fast"), 3)
    assert not outgrows_cache(LAYOUT, 3)  # a layout of before there were segments
