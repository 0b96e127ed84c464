"""A reference in the prefill worker's machine: it is asked for, waited for by nobody, and what it makes has no keys."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from prefill_script import FIRST, KEYS, LAYERS, Script, order, prompt, reply

from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import PrefillFinished
from halfmoon.schemas.similar import Reference, ReferencePart, SimilarReuse
from halfmoon.workers.machines import TokensTaken
from halfmoon.workers.prefill.actions import (
    Action,
    CommitPrompt,
    ComputePrompt,
    FailReference,
    FetchReference,
    LoadReference,
    ReferenceSlots,
    ReserveReference,
    ReserveSlots,
    SendLayer,
    SendResult,
)
from halfmoon.workers.prefill.events import (
    ChunkStored,
    FetchFailed,
    FirstTokenDrawn,
    LayerStored,
    PrefillOrdered,
    PromptComputed,
    PushClosed,
    PushOpened,
    ReferenceFetched,
    ReferenceLayers,
    ReferenceLost,
    ReferenceReserved,
    SlotsReserved,
)

REFERENCE = Reference(node_id="n3", block_keys=b"k" * 48, resemblance=80, replicas=["n4"])
REUSE = SimilarReuse(tokens=15, computed_tokens=9, resemblance=80)


def prepared(script: Script, *, present: list[int] | None = None, **fields: Any) -> list[Action]:
    """An order with a reference, up to its slots; the actions of that."""
    script(PrefillOrdered, order=replace(order(), **{"reference": REFERENCE, **fields}))
    script(TokensTaken, reply=reply(tenant="t"))
    return script(SlotsReserved, slots=[4, 5, 6], present=present or [])


def computed(actions: list[Action]) -> ComputePrompt:
    return next(action for action in actions if isinstance(action, ComputePrompt))


def slots(**fields: Any) -> ReferenceSlots:
    return ReferenceSlots(
        **{
            "slots": [7, 8, 9],
            "blocks": [0, 1, 2],
            "first_token": 0,
            "fetched_layer": -1,
            "resemblance": 80,
            **fields,
        }
    )


def test_it_is_reserved_and_what_is_missing_fetched() -> None:
    script = Script()
    actions = prepared(script)
    assert ReserveReference(order_id="1-1", block_keys=b"k" * 48, tenant="t") in actions
    asked = script(ReferenceReserved, slots=[7, 8, 9], present=[0])
    assert asked == [
        FetchReference(order_id="1-1", source_node_id="n3", first_block=1, blocks=2, replicas=["n4"])
    ]
    script(ReferenceLayers, layer=0)
    assert computed(script(PushOpened)).reference == slots(fetched_layer=0)
    assert script(ReferenceLayers, layer=0) == []
    assert script(ReferenceFetched) == [LoadReference(order_id="1-1", layer=LAYERS - 1)]


def test_documents_come_from_one_node_after_the_other() -> None:
    """What is here is not asked for, and layers of one say nothing of the others."""
    here, there, gone = (
        Reference(node_id=node, block_keys=key * blocks, resemblance=60, first_block=first)
        for node, key, blocks, first in (
            ("n0", KEYS[:16], 1, 4),
            ("n3", b"b" * 16, 2, 0),
            ("n4", b"c" * 16, 3, 9),
        )
    )
    script = Script()
    prepared(script, reference=replace(here, others=[there, gone], replicas=["n7"]))
    assert [one.block_keys for one in script.past if isinstance(one, ReserveReference)] == [
        KEYS[:16] + b"b" * 32 + b"c" * 48
    ]
    asked = script(ReferenceReserved, slots=[7, 8, 9, 10, 11, 12], present=[0, 1])
    assert asked == [
        FetchReference(order_id="1-1", source_node_id="n3", first_block=2, blocks=1, replicas=[])
    ]
    assert script(ReferenceLayers, layer=LAYERS - 1) == []
    assert script(ReferenceFetched) == [
        FetchReference(order_id="1-1", source_node_id="n4", first_block=3, blocks=3, replicas=[])
    ]
    assert script(ReferenceLayers, layer=LAYERS - 1) == []
    made = computed(script(PushOpened))
    assert made.reference == slots(slots=[7, 8, 9, 10, 11, 12], blocks=[4, 0, 1, 9, 10, 11], resemblance=60)
    assert script(ReferenceFetched) == [LoadReference(order_id="1-1", layer=LAYERS - 1)]
    assert script(ReferenceFetched) == [], "it was said again"


def test_documents_of_one_node_are_one_fetch_and_read_layer_by_layer() -> None:
    """Wherever they stand in the list. A replica must have them all."""
    one, here, two = (
        ReferencePart(node_id=node, block_keys=key * 16 * 2, first_block=first, replicas=replicas)
        for node, key, first, replicas in (
            ("n3", b"a", 5, ["n7", "n8"]),
            ("n0", b"b", 0, []),
            ("n3", b"c", 1, ["n8", "n9"]),
        )
    )
    script = Script()
    first = replace(REFERENCE, node_id="n3", block_keys=one.block_keys, first_block=5, replicas=one.replicas)
    prepared(script, reference=replace(first, others=[here, two]))
    assert [one.block_keys for one in script.past if isinstance(one, ReserveReference)] == [
        here.block_keys + one.block_keys + two.block_keys
    ]
    asked = script(ReferenceReserved, slots=[7, 8, 9, 10, 11, 12], present=[0, 1, 2])
    assert asked == [
        FetchReference(order_id="1-1", source_node_id="n3", first_block=3, blocks=3, replicas=["n8"])
    ]
    script(ReferenceLayers, layer=0)
    made = computed(script(PushOpened))
    assert made.reference == slots(slots=[7, 8, 9, 10, 11, 12], blocks=[0, 1, 5, 6, 1, 2], fetched_layer=0)
    assert script(ReferenceFetched) == [LoadReference(order_id="1-1", layer=LAYERS - 1)]


def test_where_all_of_it_is_here_nothing_is_fetched() -> None:
    script = Script()
    prepared(script)
    assert script(ReferenceReserved, slots=[7, 8, 9], present=[0, 1, 2]) == []
    assert computed(script(PushOpened)).reference == slots(fetched_layer=LAYERS - 1)


@pytest.mark.parametrize("lost", ["at once", "after its slots", "not reserved in time"])
def test_a_prompt_without_it_is_computed_and_nothing_waits(lost: str) -> None:
    script = Script()
    prepared(script)
    if lost == "after its slots":
        script(ReferenceReserved, slots=[7, 8, 9], present=[])
    if lost != "not reserved in time":
        assert script(ReferenceLost, reason="full") == []
    assert script(PushOpened) == [prompt()]
    # What comes too late asks for nothing more.
    assert script(ReferenceReserved, slots=[7, 8, 9], present=[]) == []


def test_who_computes_is_told_that_it_is_lost() -> None:
    script = Script()
    prepared(script)
    script(ReferenceReserved, slots=[7, 8, 9], present=[])
    script(PushOpened)
    assert script(ReferenceLost, reason="gone") == [FailReference(order_id="1-1", reason="gone")]
    assert script(ReferenceFetched) == []


def test_only_blocks_of_the_exact_prefix_have_keys() -> None:
    script = Script()
    prepared(script, present=[0], local_blocks=1)
    puts = [action for action in script.past if isinstance(action, ReserveSlots)]
    assert [put.block_keys for put in puts] == [KEYS[:16]]
    script(ReferenceReserved, slots=[7, 8, 9], present=[0, 1, 2])
    asked = computed(script(PushOpened))
    assert asked.reference == slots(first_token=10, fetched_layer=LAYERS - 1)
    assert asked.chunks == [range(10, 20), range(20, 25)]
    assert not [one for one in script(ChunkStored, first_block=1, blocks=2) if isinstance(one, CommitPrompt)]


def test_what_is_missing_of_the_prefix_is_computed_whole_and_shared() -> None:
    script = Script()
    prepared(script, fetches=[Fetch(node_id="n5", first_block=0, blocks=2)])
    script(ReferenceReserved, slots=[7, 8, 9], present=[0, 1, 2])
    script(FetchFailed, reason="x")
    asked = computed(script(PushOpened))
    assert asked.reference == slots(first_token=20, fetched_layer=LAYERS - 1)
    assert asked.chunks == [range(10), range(10, 20), range(20, 25)]
    stored = script(ChunkStored, first_block=0, blocks=1)
    assert CommitPrompt(order_id="1-1", first_block=0, blocks=1) in stored


def test_the_answer_says_what_stood_in() -> None:
    script = Script()
    prepared(script)
    script(ReferenceReserved, slots=[7, 8, 9], present=[0, 1, 2])
    script(PushOpened)
    script(PromptComputed, finished_at_ns=99, similar=REUSE)
    script(FirstTokenDrawn, first=FIRST)
    script(PushClosed, moved_bytes=1, elapsed_ns=1)
    (result,) = [action.result for action in script.past if isinstance(action, SendResult)]
    (finished,) = script.reports()
    assert isinstance(finished, PrefillFinished)
    assert result.similar == finished.similar == REUSE


@pytest.mark.parametrize("percent", [0, 60])
def test_layers_of_which_tokens_were_left_out_go_when_all_are_computed(percent: int) -> None:
    """A reference that is lost on the way has all computed in their places: nobody may have copied anything before."""
    script = Script()
    script(PrefillOrdered, order=replace(order(), reference=REFERENCE))
    script(TokensTaken, reply=replace(reply(tenant="t"), retain_percent=percent))
    script(SlotsReserved, slots=[4, 5, 6], present=[])
    script(ReferenceReserved, slots=[7, 8, 9], present=[0, 1, 2])
    made = computed(script(PushOpened))
    assert made.reference == slots(fetched_layer=LAYERS - 1, retain_percent=percent)
    stored = [script(LayerStored, layer=layer, first_block=0, blocks=2) for layer in range(LAYERS)]
    behind = script(PromptComputed, finished_at_ns=1, similar=REUSE)
    sent = [[one for one in some if isinstance(one, SendLayer)] for some in (*stored, behind)]
    assert sum(map(len, sent[:-1])) == (0 if percent else 1)
    assert len(sent[-1]) == (LAYERS if percent else 0)
