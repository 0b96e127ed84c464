"""In how many groups a decode worker whose KV lies elsewhere has its rows take turns."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.workers.decode.group_choice import GROUPS, GroupChoice

HELLO = ChannelHello(
    worker_id="d0", cluster="c", version="v", model="m", layers=10, heads=4, kv_heads=4, head_dim=2, exact=True,
    segment_tokens=1024, dtype="float32",
)  # fmt: skip
#: 1 ms for each row, 1 ms for each thousand tokens.
COST = CostProfile(
    linear_row_ns=1_000_000, group_rows=16, attention_token_ps=1_000_000, channel_trip_ns=1_000,
    channel_byte_ps=1, query_row_bytes=32,
)  # fmt: skip


def batch(*lengths: int, kv_heads: int = 4, places: int = 1) -> Any:
    return [
        SimpleNamespace(
            order_id=f"o{row}",
            length=length,
            parts=[
                KvPart(worker_id=f"a{at}", first_kv_head=at * kv_heads, kv_heads=kv_heads)
                for at in range(4 // kv_heads)
            ]
            if places == 1
            else [KvPart(worker_id=f"a{row % places}", first_kv_head=0, kv_heads=4)],
        )
        for row, length in enumerate(lengths)
    ]


def test_two_groups_where_both_have_as_much_to_do_and_one_where_products_cost_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    choice = GroupChoice(0, COST, HELLO)
    assert choice.groups(batch(*[1_000] * 4)) == 3  # messages are hidden too
    assert "4 sequences take turns in 3 groups: a step of 4.0 ms, 8.0 ms in one" in caplog.text
    padded = replace(COST, linear_row_ns=0, linear_group_ns=4_000_000)
    assert GroupChoice(0, padded, HELLO).groups(batch(*[500] * 4)) == 1
    assert GroupChoice(0, padded, HELLO).groups(batch(*[4_000] * 4)) == 2


def test_several_places_and_parts_of_the_heads_have_less_to_do_each() -> None:
    padded = replace(COST, linear_row_ns=0, linear_group_ns=4_000_000)
    whole = batch(*[3_000] * 4)
    assert GroupChoice(0, padded, HELLO).groups(whole) == 2
    assert GroupChoice(0, padded, HELLO).groups(batch(*[3_000] * 4, kv_heads=1)) == 1
    assert GroupChoice(0, padded, HELLO).groups(batch(*[3_000] * 4, places=4)) == 1


def test_of_segments_each_place_attends_to_its_own() -> None:
    first = KvPart(worker_id="a0", first_kv_head=0, kv_heads=4, segments=3)
    last = KvPart(worker_id="a1", first_kv_head=0, kv_heads=4, first_segment=3)
    parts = [first, last]
    spread: Any = [SimpleNamespace(order_id="o", length=4_000, parts=parts)]
    step = GroupChoice(0, COST, HELLO)._step(spread)
    assert (step.place_rows, step.place_tokens) == (1, 3 * 4 * 256)


def test_the_choice_stays_while_the_batch_does_and_the_option_goes_first() -> None:
    padded = replace(COST, linear_row_ns=0, linear_group_ns=4_000_000)
    choice = GroupChoice(0, padded, HELLO)
    assert [choice.groups(batch(*[tokens] * 4)) for tokens in (500, 4_000)] == [1, 1]
    assert choice.groups(batch(*[4_000] * 3)) == 2
    assert GroupChoice(5, padded, HELLO).groups(batch(1_000)) == 5
    assert GroupChoice(0, CostProfile(), HELLO).groups(batch(1_000)) == GROUPS
