"""An order of a prefill worker waits for blocks that an order before it computes."""

from __future__ import annotations

from typing import Any

import pytest
from prefill_script import FIRST, KEYS, OTHER_KEYS, Script, open_push, open_put, prompt, reply

from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.keys import common_blocks, share_block
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.machines import OrderCancelled, TokensTaken
from halfmoon.workers.prefill.actions import EndOrder, ReserveSlots
from halfmoon.workers.prefill.events import (
    BlocksFetched,
    ComputingStopped,
    FirstTokenDrawn,
    PromptComputed,
    PushOpened,
    SlotsReserved,
)

ONE_ALIKE = KEYS[:KEY_BYTES] + OTHER_KEYS[KEY_BYTES:]


def given(script: Script, order_id: str, **fields: Any) -> list[Any]:
    """The order and its tokens; the actions that follow from these."""
    script.receive(order_id)
    return script(TokensTaken, order_id, reply=reply(**fields))


def asks_for_slots(actions: list[Any]) -> list[str]:
    return [action.order_id for action in actions if isinstance(action, ReserveSlots)]


@pytest.mark.parametrize("keys", [KEYS, ONE_ALIKE])
def test_its_slots_are_asked_for_once_the_one_before_has_computed_them(keys: bytes) -> None:
    script = Script()
    script.computing("1-1")
    assert given(script, "2-1", block_keys=keys) == []
    assert asks_for_slots(script(PromptComputed, "1-1", finished_at_ns=99)) == []
    assert asks_for_slots(script(FirstTokenDrawn, "1-1", first=FIRST)) == ["2-1"]


def test_it_waits_for_the_tokens_of_the_one_before() -> None:
    script = Script()
    script.receive("1-1")
    assert given(script, "2-1") == []
    assert asks_for_slots(script(TokensTaken, "1-1", reply=reply())) == ["1-1"]


def test_who_has_other_blocks_asks_as_soon_as_the_tokens_of_the_one_before_are_there() -> None:
    script = Script()
    script.receive("1-1")
    assert given(script, "2-1", block_keys=OTHER_KEYS) == []
    assert asks_for_slots(script(TokensTaken, "1-1", reply=reply())) == ["1-1", "2-1"]


def test_it_computes_what_the_one_before_did_not() -> None:
    script = Script()
    script.computing("1-1")
    given(script, "2-1")
    script(PromptComputed, "1-1", finished_at_ns=99)
    assert script(FirstTokenDrawn, "1-1", first=FIRST)[-1] == open_put("2-1")
    assert script(SlotsReserved, "2-1", slots=[4, 5, 6], present=[0, 1]) == [open_push("2-1")]
    assert script(PushOpened, "2-1") == [prompt("2-1", cached=2)]


@pytest.mark.parametrize(
    ("present", "fields"),
    [
        ([], {"block_keys": OTHER_KEYS}),
        ([0], {"block_keys": ONE_ALIKE}),  # the one that they share is there already
        ([], {"sampling": Sampling(prompt_logprobs=0)}),  # all its tokens are computed, whatever is there
    ],
)
def test_nobody_waits_for_blocks_of_no_use(present: list[int], fields: dict[str, Any]) -> None:
    script = Script()
    script.computing("1-1", present=present)
    assert asks_for_slots(given(script, "2-1", **fields)) == ["2-1"]


def test_it_waits_for_a_fetch_and_no_longer() -> None:
    script = Script()
    script.computing("1-1", fetches=[Fetch(node_id="n3", first_block=0, blocks=2)])
    assert given(script, "2-1") == []
    actions = script(BlocksFetched, "1-1", source_node_id="n3", moved_bytes=1, elapsed_ns=1)
    assert asks_for_slots(actions) == ["2-1"]


def test_the_third_waits_for_the_second_and_not_for_the_first() -> None:
    script = Script()
    script.computing("1-1", block_keys=OTHER_KEYS)
    script.prepared("2-1")
    assert given(script, "3-1") == []
    script(PromptComputed, "1-1", finished_at_ns=99)
    assert asks_for_slots(script(FirstTokenDrawn, "1-1", first=FIRST)) == []
    script(PushOpened, "2-1")
    script(PromptComputed, "2-1", finished_at_ns=99)
    assert asks_for_slots(script(FirstTokenDrawn, "2-1", first=FIRST)) == ["3-1"]


def test_who_waits_goes_on_when_the_one_before_is_cancelled_and_can_be_cancelled() -> None:
    script = Script()
    script.computing("1-1")
    given(script, "2-1")
    given(script, "3-1")
    assert [type(each) for each in script(OrderCancelled, "2-1")] == [EndOrder]
    script(OrderCancelled, "1-1")
    assert asks_for_slots(script(ComputingStopped, "1-1")) == ["3-1"]


def test_blocks_in_common_are_counted_from_the_first() -> None:
    chain = [bytes([number]) * KEY_BYTES for number in range(9)]
    for common in range(9):
        one = b"".join(chain)
        other = b"".join([*chain[:common], *(b"x" * KEY_BYTES for _ in range(3))])
        assert common_blocks(one, other) == common_blocks(other, one) == common
        shared = [share_block(one, other, place) for place in range(len(chain) + 1)]
        assert shared == [place < common for place in range(len(chain) + 1)]
    assert common_blocks(b"", KEYS) == 0
