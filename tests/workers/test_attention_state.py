"""The machine of an attention worker: who gets room, in which heads, and when it ends. No asyncio, no model."""

from __future__ import annotations

from typing import Any

import pytest
from decode_script import LAYOUT
from msgspec.structs import replace

from halfmoon.schemas.lending import HoldRequest
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.attention.actions import AnswerHold, DropHold, LoadHold, OfferHold
from halfmoon.workers.attention.events import HoldAsked, HoldLoaded
from halfmoon.workers.attention.state import Action, AttentionState
from halfmoon.workers.machines import Announce, AnnounceRequested, OrderCancelled, WorkerStopped

#: Blocks of four tokens, segments of two blocks, four KV heads.
SPLIT = replace(LAYOUT, segment_tokens=8, kv_heads=4)


class Machine:
    """Holds heads 2 and 3."""

    def __init__(self, kv_blocks: int = 6, incarnation: str = "i1") -> None:
        self.state = AttentionState(
            worker_id="a1",
            incarnation=incarnation,
            layout=SPLIT,
            kv_blocks=kv_blocks,
            first_kv_head=2,
            kv_heads=2,
        )

    def on(self, kind: type, **fields: Any) -> list[Action]:
        actions = self.state.on(kind(at_ns=1, **fields))
        self.state.validate()
        return actions

    def ask(self, ask_id: int = 1, **fields: Any) -> list[Action]:
        return self.on(HoldAsked, ask_id=ask_id, request=wanted(**fields))


def wanted(blocks: int = 3, **fields: Any) -> HoldRequest:
    defaults: dict[str, Any] = {
        "owner_id": "d0",
        "order_id": "9-1",
        "source_node_ids": ["n0"],
        "first_block": 0,
        "block_keys": b"".join(n.to_bytes(KEY_BYTES, "big") for n in range(blocks)),
        "tokens": 17,
        "first_kv_head": 2,
        "kv_heads": 2,
    }
    return HoldRequest(**{**defaults, **fields})


def test_whole_blocks_are_loaded_and_offered_with_room_for_more() -> None:
    machine = Machine()
    (load,) = machine.ask()
    assert isinstance(load, LoadHold)
    assert len(load.blocks) == 5
    assert machine.ask(2) == []  # the answer was lost: it is not loaded twice
    assert machine.on(HoldLoaded, hold=load.hold) == [
        OfferHold(load.hold, load.blocks, 12),
        AnswerHold(1, load.hold),
        AnswerHold(2, load.hold),
    ]
    assert machine.state.heartbeat(5).orders == ["9-1"]
    assert machine.state.heartbeat(5).kv_blocks_used == 5
    assert machine.on(OrderCancelled, order_id="9-1") == [DropHold(load.hold)]
    assert machine.state.kv_blocks_used == 0


def test_a_prompt_of_less_than_a_block_is_not_loaded() -> None:
    offer, answer = Machine().ask(blocks=0, source_node_ids=[])
    assert isinstance(offer, OfferHold)
    assert (len(offer.blocks), offer.tokens) == (5, 0)
    assert answer == AnswerHold(1, offer.hold)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"kv_heads": 0}, "kv_heads: 4 from 2 on, and this cache has 2 from 2 on"),
        ({"first_kv_head": 0}, "kv_heads: 2 from 0 on, and this cache has 2 from 2 on"),
        ({"first_block": 1}, "first_block: no segment of 2 blocks begins at 1"),
        ({"tokens": 0}, "block_keys: 3 blocks from first_block on are no whole segments of 2"),
        ({"tokens": 11}, "tokens: no room for 11, where 12 are to be brought here"),
        ({"tokens": 25}, "full: 6 blocks are free, 7 were asked for"),
        ({"source_node_ids": []}, "source_node_ids: none"),
    ],
)
def test_bad_questions_are_refused_by_field(fields: dict[str, Any], refused: str) -> None:
    assert Machine().ask(**fields) == [AnswerHold(1, refused=refused)]


def test_parts_of_a_sequence_are_held_whole_segments_and_its_end_with_room_for_more() -> None:
    machine = Machine(kv_blocks=8)
    (first,) = machine.ask(1, blocks=2, tokens=0)
    (last,) = machine.ask(2, blocks=5, first_block=2, tokens=17, order_id="9-2")
    assert isinstance(first, LoadHold)
    assert isinstance(last, LoadHold)
    assert (len(first.blocks), len(last.blocks)) == (2, 5)
    assert machine.on(HoldLoaded, hold=first.hold)[0] == OfferHold(first.hold, first.blocks, 8)
    assert machine.on(HoldLoaded, hold=last.hold)[0] == OfferHold(last.hold, last.blocks, 12)
    again = {"adopts": "9-2", "block_keys": b"", "source_node_ids": [], "order_id": "9-3"}
    assert machine.ask(3, **again, first_block=0) == [
        AnswerHold(3, refused="adopts: nothing of order 9-2 is here, or not so much")
    ]
    assert machine.ask(4, **again, first_block=2) == [AnswerHold(4, last.hold)]


def test_an_end_of_a_sequence_without_a_whole_block_is_loaded_with_nothing() -> None:
    (load,) = Machine().ask(blocks=2, first_block=2, tokens=3)
    assert isinstance(load, LoadHold)
    assert len(load.blocks) == 1


def test_an_order_that_ends_while_it_is_loaded_frees_its_blocks_then() -> None:
    machine = Machine()
    (load,) = machine.ask()
    assert isinstance(load, LoadHold)
    assert machine.on(OrderCancelled, order_id="9-1") == []
    assert machine.state.kv_blocks_used == 5
    assert machine.on(HoldLoaded, hold=load.hold) == [AnswerHold(1, refused="the order is over")]
    assert machine.state.kv_blocks_used == 0


def test_a_load_that_fails_is_told_and_frees_its_blocks() -> None:
    machine = Machine()
    (load,) = machine.ask()
    assert isinstance(load, LoadHold)
    assert machine.on(HoldLoaded, hold=load.hold, problem="no such block") == [
        AnswerHold(1, refused="no such block")
    ]
    assert machine.state.kv_blocks_used == 0


@pytest.mark.parametrize("kind", [AnnounceRequested, WorkerStopped])
def test_who_joins_again_or_leaves_holds_nothing(kind: type) -> None:
    machine = Machine()
    offer, _ = machine.ask(blocks=0)
    assert isinstance(offer, OfferHold)
    actions = machine.on(kind)
    assert actions == [DropHold(offer.hold), *([Announce()] if kind is AnnounceRequested else [])]
    assert machine.state.heartbeat(0).orders == []


def test_what_is_held_of_an_order_is_anothers_once_it_asks_for_it() -> None:
    machine = Machine()
    (load,) = machine.ask()
    assert isinstance(load, LoadHold)
    again = {"order_id": "9-2", "adopts": "9-1", "block_keys": b"", "source_node_ids": []}
    refused = "adopts: nothing of order 9-1 is here, or not so much"
    assert machine.ask(2, **again) == [AnswerHold(2, refused=refused)]  # it is not here yet
    machine.on(HoldLoaded, hold=load.hold)
    assert machine.ask(3, **{**again, "tokens": 18}) == [AnswerHold(3, refused=refused)]
    assert machine.ask(4, **again) == machine.ask(4, **again) == [AnswerHold(4, load.hold)]
    assert machine.state.heartbeat(0).orders == ["9-2"]
    assert machine.on(OrderCancelled, order_id="9-1") == []
    assert machine.on(OrderCancelled, order_id="9-2") == [DropHold(load.hold)]


def test_a_number_of_an_earlier_life_names_nothing_here() -> None:
    lives = [Machine(incarnation=incarnation) for incarnation in ("3f9c01d2a7e8b645", "3f9c01d2a7e8b646")]
    numbers = [load.hold for machine in lives for load in machine.ask() if isinstance(load, LoadHold)]
    assert len(numbers) == len(set(numbers)) == 2
    assert all(0 < number < 2**31 for number in numbers)
