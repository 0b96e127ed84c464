"""The prefill worker's machine: events in, whole lists of actions out. No asyncio, no model, no clock."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prefill_script import (
    BLOCK_TOKENS,
    FIRST,
    LAYERS,
    LAYOUT,
    OTHER_KEYS,
    TOKENS,
    Script,
    open_push,
    open_put,
    prompt,
    reply,
    take,
)

from halfmoon.schemas.decisions import Fetch
from halfmoon.schemas.events import PrefillFailed, PrefillFinished
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    OrderCancelled,
    Report,
    TokensTaken,
    WorkerStopped,
)
from halfmoon.workers.prefill.actions import (
    BeginSpan,
    CommitPrompt,
    DrawFirstToken,
    EndOrder,
    EndPush,
    FailLoads,
    LoadLayers,
    PauseOrder,
    SendLayer,
    SendResult,
    StartFetch,
    StopComputing,
)
from halfmoon.workers.prefill.events import (
    BlocksFetched,
    ChunkStored,
    ComputingStopped,
    FetchFailed,
    FirstTokenDrawn,
    LayersFetched,
    LayerStored,
    LoadFailed,
    OpenPushFailed,
    PauseEnded,
    PrefixLayerLoaded,
    PromptComputed,
    PushClosed,
    PushFailed,
    PushOpened,
    ReserveSlotsFailed,
    SlotsReserved,
)
from halfmoon.workers.prefill.stages import PrefillStage

MS, S = 1_000_000, 1_000_000_000
FETCH = Fetch(node_id="n3", first_block=0, blocks=2, replicas=["n4"])
FETCHING = StartFetch(order_id="1-1", source_node_id="n3", first_block=0, blocks=2, replicas=["n4"])


@pytest.fixture
def script() -> Script:
    return Script()


def end(order_id: str = "1-1", arrived_ns: int = 1_000, **fields: Any) -> EndOrder:
    return EndOrder(order_id=order_id, arrived_ns=arrived_ns, **fields)


def cancelled(order_id: str = "1-1", **fields: Any) -> EndOrder:
    return end(order_id, cancelled=True, error="cancelled", **fields)


def failed(reason: str, *, retryable: bool, order_id: str = "1-1") -> Report:
    request_id = f"r{order_id.partition('-')[0]}"
    return Report(
        event=PrefillFailed(
            order_id=order_id, request_id=request_id, worker_id="p1", reason=reason, retryable=retryable
        )
    )


# --- the way of an order ------------------------------------------------------------------------------------


def test_an_order_takes_its_tokens_its_slots_its_turn_and_is_answered_once(script: Script) -> None:
    assert script.receive() == [take()]
    assert script(TokensTaken, reply=reply(), after_ns=10) == [open_put()]
    assert script(SlotsReserved, slots=[4, 5, 6], present=[], after_ns=20) == [open_push()]
    assert script(PushOpened, after_ns=30) == [prompt()]
    assert script.state.heartbeat(3).kv_blocks_used == 3
    assert script(LayerStored, layer=0, first_block=0, blocks=1) == []
    assert script(LayerStored, layer=1, first_block=0, blocks=1) == [
        SendLayer(order_id="1-1", layer=0, layers=2, first_block=0, blocks=1)
    ]
    assert script(ChunkStored, first_block=0, blocks=1) == [
        CommitPrompt(order_id="1-1", first_block=0, blocks=1)
    ]
    assert script(PromptComputed, finished_at_ns=99, after_ns=40) == [
        DrawFirstToken(order_id="1-1", sampling=Sampling(), token_ids=array("I", TOKENS))
    ]
    result = PrefillResult(
        order_id="1-1",
        request_id="r1",
        first=FIRST,
        queue_ns=60,
        transfer_ns=20,
        compute_ns=40,
        cached_tokens=0,
        finished_at_ns=99,
    )
    assert script(FirstTokenDrawn, first=FIRST, after_ns=50) == [
        SendResult(decode_worker_id="d1", result=result),
        EndPush(order_id="1-1"),
    ]
    assert script.state.heartbeat(3).orders == ["1-1"]
    finished = PrefillFinished(
        order_id="1-1",
        request_id="r1",
        worker_id="p1",
        queue_ns=60,
        transfer_ns=20,
        compute_ns=40,
        pushed_bytes=8,
        push_ns=70,
        prompt_tokens=25,
    )
    assert script(PushClosed, moved_bytes=8, elapsed_ns=70) == [Report(event=finished), end(result=result)]
    assert script(PushClosed, moved_bytes=8, elapsed_ns=70) == []
    assert script.state.heartbeat(3).orders == []


def test_the_same_order_received_again_is_one_order(script: Script) -> None:
    script.receive()
    assert script.receive() == []
    assert script.state.heartbeat(1).queued == 1


def test_without_a_store_nothing_is_opened_and_nothing_pushed() -> None:
    script = Script(has_store=False)
    script.receive()
    assert script(TokensTaken, reply=reply()) == [prompt(slots=[], present=[])]
    script(PromptComputed, finished_at_ns=1)
    actions = script(FirstTokenDrawn, first=FIRST)
    assert [type(action) for action in actions] == [SendResult, Report, EndOrder]


def test_a_traced_request_has_a_span_from_its_arrival(script: Script) -> None:
    script.receive()
    span = BeginSpan(order_id="1-1", request_id="r1", prompt_tokens=25, traceparent="00-1", arrived_ns=1_000)
    assert script(TokensTaken, reply=reply(traceparent="00-1"), after_ns=5) == [span, open_put()]


def test_fast_numerics_compute_chunks_of_many_blocks() -> None:
    script = Script(layout=replace(LAYOUT, numerics="fast"), chunk_tokens=20)
    assert script.computing() == [prompt(chunks=[range(0, 20), range(20, 25)])]


@pytest.mark.parametrize(
    ("segment_tokens", "chunk_tokens", "cached", "ends"),
    [
        (0, 100, 0, [10, 20, 25]),  # one block, where nothing is said of segments
        (40, 100, 0, [25]),
        (40, 100, 1, [25]),
        (20, 100, 0, [20, 25]),
        (20, 100, 1, [20, 25]),  # up to the end of its segment
        (40, 39, 1, [20, 25]),  # of 30 tokens a segment is not whole chunks
        (40, 9, 0, [10, 20, 25]),
    ],
)
def test_exact_numerics_compute_chunks_of_whole_blocks_in_one_segment(
    segment_tokens: int, chunk_tokens: int, cached: int, ends: list[int]
) -> None:
    script = Script(layout=replace(LAYOUT, segment_tokens=segment_tokens), chunk_tokens=chunk_tokens)
    present = list(range(cached))
    chunks = [range(start, end) for start, end in pairwise([cached * BLOCK_TOKENS, *ends])]
    assert script.computing(present=present) == [prompt(cached=cached, present=present, chunks=chunks)]


def test_layers_that_are_not_streamed_are_pushed_after_the_last() -> None:
    script = Script(stream_layers=False)
    script.computing(present=[0])
    assert script(PrefixLayerLoaded, layer=0) == []
    pushes = [SendLayer(order_id="1-1", layer=layer, first_block=0, blocks=1) for layer in range(LAYERS)]
    assert script(PrefixLayerLoaded, layer=1) == pushes
    assert script(LayerStored, layer=0, first_block=1, blocks=1) == []
    assert script(LayerStored, layer=1, first_block=1, blocks=1) == []
    assert script(PromptComputed, finished_at_ns=1)[:2] == [
        SendLayer(order_id="1-1", layer=layer, first_block=1, blocks=1) for layer in range(LAYERS)
    ]


def test_a_block_without_a_key_is_not_committed(script: Script) -> None:
    script.computing()
    assert script(ChunkStored, first_block=2, blocks=1) == []
    assert script(ChunkStored, first_block=1, blocks=2) == [
        CommitPrompt(order_id="1-1", first_block=1, blocks=1)
    ]


# --- tokens -------------------------------------------------------------------------------------------------


def test_a_frontend_that_does_not_answer_makes_an_order_retryable(script: Script) -> None:
    script.receive()
    reason = "the frontend does not answer"
    assert script(TokensTaken, reply=None) == [failed(reason, retryable=True), end(error=reason)]


def test_a_request_that_nobody_wants_any_more_is_not_retried(script: Script) -> None:
    script.receive()
    reason = "the frontend no longer wants it"
    assert script(TokensTaken, reply=reply(gone=True)) == [failed(reason, retryable=False), end(error=reason)]


def test_a_prompt_longer_than_the_cache_needs_exact_numerics_and_a_store() -> None:
    exact = replace(LAYOUT, segment_tokens=2 * BLOCK_TOKENS)
    reason = "the prompt's 3 blocks do not fit the worker's cache of 2"
    configs: list[dict[str, Any]] = [
        {"layout": replace(exact, numerics="fast")},
        {"layout": exact, "has_store": False},
        {"layout": LAYOUT},
    ]
    for config in configs:
        script = Script(kv_blocks=2, **config)
        script.receive()
        refused = [failed(reason, retryable=True), end(error=reason)]
        assert script(TokensTaken, reply=reply()) == refused, config
    script = Script(kv_blocks=2, layout=exact)
    assert script.computing() == [prompt(chunks=[range(0, 20), range(20, 25)])]
    assert script.state.heartbeat(0).kv_blocks_used == 2


def test_tokens_of_another_length_are_not_computed(script: Script) -> None:
    script.receive()
    reason = "the frontend's tokens are not those of the order"
    assert script(TokensTaken, reply=reply(token_ids=b"\0\0\0\0")) == [
        failed(reason, retryable=False),
        end(error=reason),
    ]


# --- the queue ----------------------------------------------------------------------------------------------


def test_the_first_of_the_queue_are_prepared_and_others_when_one_leaves_it() -> None:
    script = Script(prepared_max=2)
    assert [script.receive(f"{n}-1") for n in (1, 2, 3, 4)] == [[take("1-1")], [take("2-1")], [], []]
    assert script(OrderCancelled, "2-1") == [cancelled("2-1"), take("3-1")]
    script(TokensTaken, "1-1", reply=reply())
    assert script(SlotsReserved, "1-1", slots=[1, 2, 3], present=[]) == [open_push("1-1"), take("4-1")]


def test_orders_compute_one_at_a_time_in_the_order_of_their_arrival(script: Script) -> None:
    script.receive("1-1")
    script.receive("2-1")
    script(TokensTaken, "2-1", reply=reply(block_keys=OTHER_KEYS))
    script(TokensTaken, "1-1", reply=reply())
    assert script(SlotsReserved, "2-1", slots=[4, 5, 6], present=[]) == []
    assert script(SlotsReserved, "1-1", slots=[1, 2, 3], present=[]) == [open_push("1-1")]
    script(PushOpened, "1-1")
    script(PromptComputed, "1-1", finished_at_ns=1)
    actions = script(FirstTokenDrawn, "1-1", first=FIRST)
    assert actions[1:] == [EndPush(order_id="1-1"), open_push("2-1")]
    assert script.state.heartbeat(0).running == 2


def queue_of(script: Script) -> list[str]:
    return [job.order_id for job in script.state.queue]


@pytest.mark.parametrize(
    ("before", "queue"),
    [
        ("4-1", ["2-1", "3-1", "9-1", "4-1", "5-1"]),
        ("5-1", ["2-1", "3-1", "4-1", "9-1", "5-1"]),
        ("", ["2-1", "3-1", "4-1", "5-1", "9-1"]),
        # Those that are being prepared, or compute, stay where they are: it comes right behind them.
        ("2-1", ["2-1", "3-1", "9-1", "4-1", "5-1"]),
        ("1-1", ["2-1", "3-1", "9-1", "4-1", "5-1"]),
        # It has ended meanwhile: nothing says which others it was to pass.
        ("7-1", ["2-1", "3-1", "4-1", "5-1", "9-1"]),
    ],
)
def test_an_order_goes_before_the_one_that_it_names(before: str, queue: list[str]) -> None:
    script = Script(prepared_max=2)
    script.computing("1-1")
    for number in (2, 3, 4, 5):
        script.receive(f"{number}-1")
    script.receive("9-1", before=before)
    assert queue_of(script) == queue
    assert script.state.heartbeat(0).orders == ["1-1", "2-1", "3-1", "4-1", "5-1", "9-1"]


def test_an_order_that_passed_others_has_its_turn_before_them() -> None:
    script = Script(prepared_max=1)
    script.computing("1-1")
    for number in (2, 3):
        script.receive(f"{number}-1")
    script.receive("4-1", before="3-1")
    assert script(OrderCancelled, "2-1") == [cancelled("2-1"), take("4-1")]


def test_when_one_fails_the_next_has_its_turn(script: Script) -> None:
    script.computing("1-1")
    script.prepared("2-1", block_keys=OTHER_KEYS)
    script(OrderCancelled, "1-1")
    assert script(ComputingStopped, "1-1") == [cancelled("1-1"), open_push("2-1")]


# --- the store ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("full", "patience_ns"), [(True, 10 * S), (False, 3 * S)])
def test_an_own_store_that_gives_no_slots_is_asked_again_for_a_while(full: bool, patience_ns: int) -> None:
    script = Script()
    script.receive()
    script(TokensTaken, reply=reply())
    pause = PauseOrder(order_id="1-1", pause_ns=100 * MS)
    assert script(ReserveSlotsFailed, reason="x", full=full, after_ns=patience_ns) == [pause]
    assert script(PauseEnded) == [open_put()]
    assert script(ReserveSlotsFailed, reason="x", full=full, after_ns=1) == [
        failed("own store: x", retryable=True),
        end(error="own store: x"),
    ]


def test_a_decode_node_that_gives_no_slots_is_asked_again_for_a_while(script: Script) -> None:
    script.prepared()
    pause = PauseOrder(order_id="1-1", pause_ns=100 * MS)
    assert script(OpenPushFailed, reason="x", full=False, after_ns=3 * S) == [pause]
    assert script(PauseEnded) == [open_push()]
    assert script(OpenPushFailed, reason="x" * 600, full=False, after_ns=1)[0] == failed(
        ("decode node n2: " + "x" * 600)[:500], retryable=True
    )


def test_slots_that_came_after_a_pause_count_as_one_wait(script: Script) -> None:
    script.receive()
    script(TokensTaken, reply=reply())
    script(ReserveSlotsFailed, reason="x", full=True, after_ns=5)
    script(PauseEnded, after_ns=6)
    script(SlotsReserved, slots=[1, 2, 3], present=[], after_ns=7)
    assert script.state.jobs["1-1"].put_ns == 18


def test_a_push_that_fails_at_the_end_makes_the_order_retryable(script: Script) -> None:
    script.closing()
    assert script(PushFailed, reason="x") == [
        failed("push to n2: x", retryable=True),
        end(error="push to n2: x"),
    ]


# --- cached blocks ------------------------------------------------------------------------------------------


def test_blocks_that_are_here_are_loaded_and_pushed_instead_of_computed(script: Script) -> None:
    assert script.computing(present=[0, 1, 2]) == [prompt(cached=2, present=[0, 1, 2])]
    assert script(PrefixLayerLoaded, layer=0) == []
    assert script(LayerStored, layer=0, first_block=2, blocks=1) == []
    assert script(PrefixLayerLoaded, layer=1) == [
        SendLayer(order_id="1-1", layer=0, layers=2, first_block=0, blocks=2)
    ]


def test_a_fetch_overlaps_with_waiting_and_computing_and_lets_layers_load_as_they_come(
    script: Script,
) -> None:
    assert script.prepared(fetches=[FETCH]) == [FETCHING, open_push()]
    assert script(LayersFetched, layer=0) == []
    assert script(PushOpened) == [prompt(cached=2, present=[], fetched_layer=0)]
    assert script(LayersFetched, layer=0) == []
    assert script(BlocksFetched, source_node_id="n4", moved_bytes=5, elapsed_ns=6) == [
        LoadLayers(order_id="1-1", layer=1)
    ]
    script(PromptComputed, finished_at_ns=1)
    script(FirstTokenDrawn, first=FIRST)
    script(PushClosed, moved_bytes=0, elapsed_ns=0)
    (finished,) = script.reports()
    assert (finished.fetch_node_id, finished.fetched_bytes, finished.fetch_ns) == ("n4", 5, 6)
    assert (finished.cached_local_tokens, finished.cached_fetched_tokens) == (0, 2 * BLOCK_TOKENS)


def test_the_last_layer_of_a_fetch_is_loaded_once_the_fetch_was_found_to_be_right(script: Script) -> None:
    """So that no token is drawn, and no block shared, from bytes that nobody has compared."""
    script.computing(fetches=[FETCH])
    for layer in range(LAYERS):
        assert (
            script(LayersFetched, layer=layer)
            == [LoadLayers(order_id="1-1", layer=layer)][: LAYERS - 1 - layer]
        )
    assert script(BlocksFetched, source_node_id="n3", moved_bytes=5, elapsed_ns=6) == [
        LoadLayers(order_id="1-1", layer=LAYERS - 1)
    ]


@pytest.mark.parametrize("waits", [False, True], ids=["it computes", "it waits for the fetch"])
def test_a_fetch_whose_layers_were_wrong_makes_the_order_retryable(waits: bool) -> None:
    """They were pushed already: a decode worker that has copied them would not copy the right ones."""
    script = Script()
    script.computing(fetches=[FETCH])
    script(LayersFetched, layer=0)
    if waits:
        script(LoadFailed, reason="nothing came")
        said = script(FetchFailed, reason="x", corrupted=True)
    else:
        assert script(FetchFailed, reason="x", corrupted=True) == [FailLoads(order_id="1-1", reason="x")]
        said = script(LoadFailed, reason="x")
    assert said[0] == failed("cached layers: x", retryable=True)


def test_a_fetch_that_was_wrong_before_a_layer_was_told_of_is_computed_instead(script: Script) -> None:
    script.computing(fetches=[FETCH])
    script(FetchFailed, reason="x", corrupted=True)
    assert script(LoadFailed, reason="x") == [prompt()]


def test_only_what_continues_the_local_blocks_is_fetched(script: Script) -> None:
    behind = Fetch(node_id="n9", first_block=2, blocks=1)
    assert script.prepared(fetches=[behind, FETCH], present=[0])[0] == StartFetch(
        order_id="1-1", source_node_id="n3", first_block=1, blocks=1, replicas=["n4"]
    )


def test_a_fetch_that_fails_before_the_turn_costs_only_computing(script: Script) -> None:
    script.prepared(fetches=[FETCH])
    assert script(FetchFailed, reason="x") == []
    assert script(PushOpened) == [prompt()]


def test_a_fetch_that_fails_while_it_computes_is_computed_instead(script: Script) -> None:
    script.computing(fetches=[FETCH])
    assert script(FetchFailed, reason="x") == [FailLoads(order_id="1-1", reason="x")]
    assert script(LoadFailed, reason="x") == [prompt()]
    script(PromptComputed, finished_at_ns=1)
    script(FirstTokenDrawn, first=FIRST)
    script(PushClosed, moved_bytes=0, elapsed_ns=0)
    (finished,) = script.reports()
    assert (finished.fetch_node_id, finished.cached_fetched_tokens) == ("", 0)


@pytest.mark.parametrize(
    "ended",
    [
        (BlocksFetched, {"source_node_id": "n3", "moved_bytes": 1, "elapsed_ns": 1}),
        (FetchFailed, {"reason": "x"}),
    ],
)
def test_a_fetch_that_is_too_slow_is_awaited_before_its_slots_are_written(ended: Any) -> None:
    script = Script()
    script.computing(fetches=[FETCH])
    assert script(LoadFailed, reason="nothing came") == []
    assert script.state.turn is not None
    assert script.state.turn.stage is PrefillStage.AWAITING_FETCH
    assert script(ended[0], **ended[1]) == [prompt()]


def test_layers_of_the_own_pool_that_do_not_load_fail_the_order(script: Script) -> None:
    script.computing(present=[0])
    assert script(LoadFailed, reason="x")[0] == failed("cached layers: x", retryable=True)


# --- cancelled ----------------------------------------------------------------------------------------------


def test_an_order_that_waits_ends_at_once_when_it_is_cancelled() -> None:
    for events in (
        [],
        [(TokensTaken, {"reply": reply()})],
        [(TokensTaken, {"reply": reply()}), (ReserveSlotsFailed, {"reason": "x", "full": True})],
    ):
        script = Script()
        script.receive()
        for kind, fields in events:
            script(kind, **fields)
        assert script(OrderCancelled) == [cancelled()]
        assert script(OrderCancelled) == []
        assert script.reports() == []


def test_a_cancelled_order_stops_computing_before_its_next_layer_and_pushes_nothing(script: Script) -> None:
    script.computing()
    assert script(OrderCancelled) == [StopComputing(order_id="1-1")]
    assert script(OrderCancelled) == []
    assert script(LayerStored, layer=0, first_block=0, blocks=1) == []
    assert script(ChunkStored, first_block=0, blocks=1) == []
    assert script.state.heartbeat(0).orders == ["1-1"]
    assert script(ComputingStopped) == [cancelled()]


def test_what_cannot_be_taken_back_ends_a_cancelled_order_without_an_answer() -> None:
    for begun, kind, fields in (
        ("prepared", PushOpened, {}),
        ("prepared", OpenPushFailed, {"reason": "x", "full": False}),
        ("computing", PromptComputed, {"finished_at_ns": 1}),
        ("computing", LoadFailed, {"reason": "x"}),
        ("closing", PushClosed, {"moved_bytes": 1, "elapsed_ns": 1}),
        ("closing", PushFailed, {"reason": "x"}),
    ):
        script = Script()
        getattr(script, begun)()
        assert [a for a in script(OrderCancelled) if not isinstance(a, StopComputing)] == []
        assert script(kind, **fields) == [cancelled()], (begun, kind)
        assert script.reports() == []


def test_an_order_cancelled_before_its_first_token_sends_no_result(script: Script) -> None:
    script.computing()
    script(PromptComputed, finished_at_ns=1)
    script(OrderCancelled)
    assert script(FirstTokenDrawn, first=FIRST) == [cancelled()]


def test_an_order_cancelled_between_two_tries_is_not_tried_again(script: Script) -> None:
    script.prepared()
    script(OpenPushFailed, reason="x", full=True)
    assert script(OrderCancelled) == [cancelled()]
    assert script(PauseEnded) == []


def test_a_worker_that_is_not_known_drops_its_orders_and_joins_again(script: Script) -> None:
    script.computing("1-1")
    script.receive("2-1")
    assert script(AnnounceRequested) == [StopComputing(order_id="1-1"), cancelled("2-1"), Announce()]


def test_a_worker_that_stops_lets_go_of_every_order_and_takes_none(script: Script) -> None:
    script.computing("1-1")
    script.receive("2-1")
    assert script(WorkerStopped) == [StopComputing(order_id="1-1"), cancelled("1-1"), cancelled("2-1")]
    assert script.receive("3-1") == []
    assert script.reports() == []


# --- any order of events ------------------------------------------------------------------------------------

IDS = ["1-1", "2-1", "3-1", "4-1", "5-1"]
FIELDS: dict[type[Any], dict[str, st.SearchStrategy[Any]]] = {
    OrderCancelled: {},
    TokensTaken: {
        "reply": st.sampled_from([None, reply(), reply(), reply(gone=True), reply(traceparent="t")])
    },
    SlotsReserved: {"slots": st.just([1, 2, 3]), "present": st.sampled_from([[], [0], [0, 1, 2]])},
    ReserveSlotsFailed: {"reason": st.just("x"), "full": st.booleans()},
    PauseEnded: {},
    LayersFetched: {"layer": st.sampled_from(range(LAYERS))},
    BlocksFetched: {"source_node_id": st.just("n3"), "moved_bytes": st.just(1), "elapsed_ns": st.just(1)},
    FetchFailed: {"reason": st.just("x")},
    PushOpened: {},
    OpenPushFailed: {"reason": st.just("x"), "full": st.booleans()},
    PrefixLayerLoaded: {"layer": st.sampled_from(range(LAYERS))},
    LayerStored: {"layer": st.just(0), "first_block": st.just(0), "blocks": st.just(1)},
    ChunkStored: {"first_block": st.just(0), "blocks": st.just(1)},
    PromptComputed: {"finished_at_ns": st.just(1)},
    LoadFailed: {"reason": st.just("x")},
    ComputingStopped: {},
    FirstTokenDrawn: {"first": st.just(FIRST)},
    PushClosed: {"moved_bytes": st.just(1), "elapsed_ns": st.just(1)},
    PushFailed: {"reason": st.just("x")},
}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_is_heard_in_whatever_order_each_order_is_answered_at_most_once(data: st.DataObject) -> None:
    """Invariants hold after each event; nothing follows an order's EndOrder; a cancelled order is not answered."""
    script = Script(prepared_max=2)
    dropped: dict[str, bool] = {}
    for _ in range(data.draw(st.integers(5, 60))):
        order_id = data.draw(st.sampled_from(IDS))
        kind = data.draw(st.sampled_from([None, *FIELDS]))
        known = order_id in script.state.jobs
        if kind is None:
            if order_id not in dropped:
                dropped[order_id] = False
                before = data.draw(st.sampled_from(["", *IDS]))
                script.receive(order_id, data.draw(st.sampled_from([[], [FETCH]])), before)
            continue
        if kind is OrderCancelled and known:
            dropped[order_id] = True
        fields = {name: data.draw(values) for name, values in FIELDS[kind].items()}
        script(kind, order_id, after_ns=data.draw(st.sampled_from([1, S])), **fields)
    ended = [action.order_id for action in script.past if isinstance(action, EndOrder)]
    answered = [event.order_id for event in script.reports()]
    assert len(ended) == len(dict.fromkeys(ended))
    assert sorted([*ended, *script.state.jobs]) == sorted(dropped)
    assert [order_id for order_id in ended if not dropped[order_id]] == answered
    for order_id in ended:
        about = [a for a in script.past if getattr(a, "order_id", "") == order_id]
        assert isinstance(about[-1], EndOrder), about
