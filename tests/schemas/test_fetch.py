"""The part of a fetch that a worker still needs, once it sees what is on its own node."""

from __future__ import annotations

import pytest

from halfmoon.schemas.decisions import Fetch

FETCH = Fetch(node_id="n1", first_block=4, blocks=6, replicas=["n2"])


@pytest.mark.parametrize(
    ("local", "usable", "first", "blocks"),
    [(4, 20, 4, 6), (7, 20, 7, 3), (4, 8, 4, 4), (9, 10, 9, 1)],
    ids=["whole", "some are local", "the prompt ends earlier", "the last block"],
)
def test_a_fetch_is_clipped_to_what_is_missing(local: int, usable: int, first: int, blocks: int) -> None:
    assert FETCH.clipped(local, usable) == Fetch(
        node_id="n1", first_block=first, blocks=blocks, replicas=["n2"]
    )


@pytest.mark.parametrize(
    ("local", "usable"),
    [(3, 20), (10, 20), (12, 20), (4, 4), (4, 2)],
    ids=["a gap before it", "all are local", "more are local", "nothing is usable", "less is usable"],
)
def test_a_fetch_that_does_not_continue_the_local_prefix_is_no_use(local: int, usable: int) -> None:
    assert FETCH.clipped(local, usable) is None
