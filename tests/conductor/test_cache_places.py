"""Attention workers in the core: who holds the KV of a request whose decode worker keeps none, and the ledger."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from conductor_scripts import LAYOUT, Script, arrived, decode, finished, keys, prefill, prefilled, worker
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from halfmoon.cli.status import describe
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.capacity import capacity
from halfmoon.conductor.core.state.records import splits_of
from halfmoon.conductor.live.metrics import ConductorMetrics, Tally
from halfmoon.conductor.replay.explain import decode_rows, remarks
from halfmoon.conductor.replay.histories import RequestHistories
from halfmoon.conductor.replay.logfile import EventLine
from halfmoon.conductor.replay.state_text import described
from halfmoon.conductor.view.status import conductor_status, node_statuses
from halfmoon.schemas.codec import decode as decode_message
from halfmoon.schemas.codec import encode
from halfmoon.schemas.decisions import (
    CacheSplit,
    CancelOrder,
    Decision,
    RejectRequest,
    ReleaseOrder,
    StartDecode,
    StartPrefill,
)
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeStarted,
    FrontendJoined,
    RequestCancelled,
    Stamped,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import AdmissionName

#: Four KV heads; blocks of 100 tokens, segments of two.
HEADS = replace(LAYOUT, segment_tokens=200, kv_heads=4)


def attention(number: int, blocks: int, first: int = 0, heads: int = 0, **fields: Any) -> WorkerJoined:
    own = {"layout": HEADS, "kv_blocks": blocks, "first_kv_head": first, "kv_heads": heads}
    return worker(f"a{number}", "attention", **{**own, **fields})


def model(number: int = 0, **fields: Any) -> WorkerJoined:
    """A decode worker that keeps no KV."""
    return decode(number, **{"layout": HEADS, "kv_blocks": 8, "cache_elsewhere": True, **fields})


def cluster(*workers: WorkerJoined, models: int = 1, **policy: Any) -> Script:
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    first = [prefill(layout=HEADS), *map(model, range(models))]
    return Script(*first, *workers, joined, heartbeat_ns=10**12, **policy)


def placed(decisions: list[Decision]) -> StartDecode:
    (order,) = [one for one in decisions if isinstance(one, StartDecode)]
    return order


def refused(decisions: list[Decision]) -> RejectRequest:
    (one,) = decisions
    assert isinstance(one, RejectRequest), one
    return one


def places(order: StartDecode) -> list[tuple[str, int, int]]:
    return [(one.worker_id, one.first_kv_head, one.kv_heads) for one in order.cache]


def lent(script: Script) -> dict[str, int]:
    workers = script.core.state.workers.values()
    return {each.worker_id: sum(each.lent.values()) for each in workers if each.lent}


def test_a_request_lies_at_the_emptiest_attention_worker_with_room_for_its_longest_answer() -> None:
    script = cluster(attention(0, 40), attention(1, 40), attention(2, 50))
    found = [
        placed(script.orders(arrived(f"r{n}", tokens=1_000, max_tokens=950, block_keys=b"")))
        for n in range(3)
    ]
    assert [places(order) for order in found] == [[("a2", 0, 4)], [("a0", 0, 4)], [("a1", 0, 4)]]
    assert lent(script) == {"a0": 20, "a1": 20, "a2": 20}
    assert script.core.state.workers["d0"].reserved_blocks == 0
    assert all(order.loans == [] for order in found)


def test_by_heads_a_request_lies_at_one_worker_for_each_range() -> None:
    script = cluster(attention(0, 30, 0, 2), attention(1, 40, 2, 2), attention(2, 50, 0, 2))
    order = placed(script.orders(arrived(tokens=1_000, max_tokens=100)))
    assert places(order) == [("a2", 0, 2), ("a1", 2, 2)]
    assert lent(script) == {"a1": 11, "a2": 11}


@pytest.mark.parametrize("heads", [[(0, 2)], [(0, 3), (3, 3)], [(0, 2), (3, 1)], [(2, 2), (2, 2)]])
def test_ranges_that_do_not_cover_all_heads_hold_nothing(heads: list[tuple[int, int]]) -> None:
    workers = [attention(n, 40, *each) for n, each in enumerate(heads)]
    said = refused(cluster(*workers).orders(arrived(tokens=1_000)))
    words = "decode workers keep no KV, and the attention workers that are ready have not all KV heads"
    assert (said.reason, said.message) == ("no_worker", words)


def test_a_request_waits_for_the_heads_that_are_away() -> None:
    script = cluster(attention(0, 40, 0, 2), arrival_wait_ns_max=10**10)
    assert [one for one in script.orders(arrived(tokens=1_000)) if isinstance(one, StartDecode)] == []
    assert list(script.core.state.parked) == ["r1"]
    assert places(placed(script.orders(attention(1, 40, 2, 2)))) == [("a0", 0, 2), ("a1", 2, 2)]


def test_of_two_widths_the_one_that_leaves_more_free_is_taken() -> None:
    script = cluster(attention(0, 30), attention(1, 40, 0, 2), attention(2, 40, 2, 2))
    first = placed(script.orders(arrived("r1", tokens=1_900, max_tokens=100)))
    second = placed(script.orders(arrived("r2", tokens=1_900, max_tokens=100)))
    assert [len(order.cache) for order in (first, second)] == [2, 1]


def test_without_an_attention_worker_a_request_waits_for_one() -> None:
    script = cluster(arrival_wait_ns_max=10**10)
    assert [one for one in script.orders(arrived(tokens=1_000)) if isinstance(one, StartDecode)] == []
    assert list(script.core.state.parked) == ["r1"]
    assert places(placed(script.orders(attention(0, 40)))) == [("a0", 0, 4)]
    said = refused(cluster().orders(arrived(tokens=1_000)))
    assert (said.reason, said.message) == (
        "no_worker",
        "decode workers keep no KV, and no attention worker is ready",
    )


def test_what_no_attention_worker_could_ever_hold_is_too_long_and_says_what_is_held() -> None:
    script = cluster(attention(0, 12), attention(1, 10), pools_bound=True)
    assert capacity(script.core.state) == (1_200, 1_200)
    said = refused(script.orders(arrived(tokens=1_150, max_tokens=51)))
    assert said.reason == "too_long"
    assert "prompts of up to 1200, 1200 with the answer" in said.message
    assert places(placed(script.orders(arrived("r2", tokens=1_150, max_tokens=50)))) == [("a0", 0, 4)]


@pytest.mark.parametrize("admission", get_args(AdmissionName))
def test_what_finds_no_room_now_is_refused_and_told_when_to_come_back(admission: AdmissionName) -> None:
    script = cluster(attention(0, 12), admission=admission)
    placed(script.orders(arrived("r1", tokens=1_000)))
    said = refused(script.orders(arrived("r2", tokens=1_000)))
    assert (said.reason, said.retry_after_ns > 0) == ("no_room", True)


def test_an_accepted_request_waits_for_room_and_gets_it() -> None:
    script = cluster(attention(0, 12), attention(1, 12), models=2)
    first = placed(script.orders(arrived("r1", tokens=1_000)))
    second = placed(script.orders(arrived("r2", tokens=1_000)))
    assert {places(first)[0][0], places(second)[0][0]} == {"a0", "a1"}
    lost = places(first)[0][0]
    assert [one for one in script.orders(WorkerLeft(worker_id=lost)) if isinstance(one, StartDecode)] == []
    assert list(script.core.state.parked) == ["r1"]
    again = placed(script.orders(finished(second.order_id, "r2", second.worker_id)))
    assert (again.request_id, again.placement, places(again)) == ("r1", 2, places(second))


@pytest.mark.parametrize("how", ["finished", "cancelled", "failed", "place", "again"])
def test_what_is_held_ends_with_its_order_and_with_a_place(how: str) -> None:
    script = cluster(attention(0, 20, 0, 2), attention(1, 20, 2, 2), placements_max=1)
    order = placed(script.orders(arrived(tokens=1_000)))
    script(prefilled(order.order_id))
    events = {
        "finished": finished(order.order_id),
        "cancelled": RequestCancelled(request_id="r1"),
        "failed": DecodeFailed(order_id=order.order_id, request_id="r1", worker_id="d0", reason="x"),
        "place": WorkerLeft(worker_id="a1"),
        "again": attention(1, 20, 2, 2, incarnation="i2"),
    }
    told = [one.worker_id for one in script.orders(events[how]) if isinstance(one, CancelOrder)]
    assert lent(script) == {}
    assert all(each.reserved_blocks == 0 for each in script.core.state.workers.values())
    assert "a0" in told
    assert ("a1" in told) == (how not in ("place", "again"))
    assert ("d0" in told) == (how in ("cancelled", "place", "again"))


def test_a_place_that_drains_gets_nothing_new_and_keeps_what_it_has() -> None:
    script = cluster(attention(0, 20), attention(1, 30))
    first = placed(script.orders(arrived("r1", tokens=1_000)))
    assert places(first) == [("a1", 0, 4)]
    assert script.orders(WorkerDraining(worker_id="a1", incarnation="i1")) == []
    assert places(placed(script.orders(arrived("r2", tokens=1_000)))) == [("a0", 0, 4)]
    assert lent(script) == {"a0": 11, "a1": 11}


def test_a_hold_of_an_order_that_is_over_is_cancelled_once_more() -> None:
    script = cluster(attention(0, 20))
    beat = WorkerHeartbeat(worker_id="a0", incarnation="i1", orders=["9-1"], obeyed_seq=10**6)
    assert script.orders(beat) == []
    (cancel,) = script.orders(beat, after_ns=10**12)
    assert isinstance(cancel, CancelOrder)
    assert (cancel.order_id, cancel.worker_id) == ("9-1", "a0")


def test_who_keeps_its_own_kv_needs_no_attention_worker() -> None:
    script = cluster(attention(0, 20), decode(1, layout=HEADS, kv_blocks=12))
    script(WorkerLeft(worker_id="a0"))
    order = placed(script.orders(arrived(tokens=1_000)))
    assert (order.worker_id, order.cache) == ("d1", [])


def test_of_another_layout_nothing_is_held() -> None:
    script = cluster(attention(0, 20, layout=replace(HEADS, model_fingerprint="g")))
    assert refused(script.orders(arrived(tokens=1_000))).reason == "no_worker"


def test_a_restored_core_and_old_messages_agree() -> None:
    script = cluster(attention(0, 20, 0, 2), attention(1, 20, 2, 2))
    order = placed(script.orders(arrived(tokens=1_000, block_keys=keys(10))))
    copy = Core.restore(script.core.snapshot(), checked=True, examined=True)
    assert copy.digest() == script.core.digest()
    stamped = Stamped(
        seq=script.core.seq + 1, at_ns=script.now_ns, event=RequestCancelled(request_id=order.request_id)
    )
    assert copy.step(stamped) == script.core.step(stamped)
    joined = decode_message(encode(model()).replace(b',"cache_elsewhere":true', b""), WorkerJoined)
    assert (joined.cache_elsewhere, joined.kv_heads) == (False, 0)


def test_an_explanation_says_where_the_kv_lies_and_what_was_free() -> None:
    script = cluster(attention(0, 20, 0, 2), attention(1, 30, 2, 2), attention(2, 40, 2, 2))
    script.core.explain_requests = lambda _: True
    script(WorkerDraining(worker_id="a1", incarnation="i1"))
    script(arrived(tokens=1_000))
    (why,) = script.core.notes
    assert why.attention == {"a0": (20, 20), "a2": (40, 40)}
    assert why.left_out == {"a1": "draining"}
    (row,) = decode_rows(why, "d0", None)[1:]
    assert row[3] == "0 + 11 at a0, heads 0 to 1 + 11 at a2, heads 2 to 3"
    assert remarks(why, None)[1:] == [
        "a0: holds the KV, 20 of 20 blocks were free",
        "a2: holds the KV, 40 of 40 blocks were free",
    ]


def test_the_state_in_words_shows_attention_workers_and_their_heads() -> None:
    script = cluster(attention(0, 20, 0, 2), attention(1, 30, 2, 2))
    script(arrived(tokens=1_000))
    text = described(script.core)
    shown = text[text.index("attention workers: 2") :].splitlines()
    assert [" ".join(line.split()) for line in shown[2:4]] == [
        "a0 n-a0 ready 1 11 20 0 to 1",
        "a1 n-a1 ready 1 11 30 2 to 3",
    ]
    assert "attention workers" not in described(cluster().core)


# --- by sequence --------------------------------------------------------------------------------------------


def parts(order: StartDecode) -> list[tuple[str, int, int]]:
    assert all((one.first_kv_head, one.kv_heads) == (0, 4) for one in order.cache)
    return [(one.worker_id, one.first_segment, one.segments) for one in order.cache]


def splitting(*blocks: int, **policy: Any) -> Script:
    """Attention workers with so many blocks that take parts of sequences."""
    return cluster(*(attention(n, each, lends=True) for n, each in enumerate(blocks)), **policy)


def test_what_one_has_room_for_lies_there_and_what_none_has_lies_at_as_few_as_can_be() -> None:
    script = splitting(20, 13, 8)
    assert parts(placed(script.orders(arrived("r1", tokens=1_800, max_tokens=200)))) == [("a0", 0, 0)]
    script = splitting(20, 13, 8)
    assert parts(placed(script.orders(arrived("r1", tokens=3_000, max_tokens=200)))) == [
        ("a1", 0, 6),
        ("a0", 6, 0),
    ]
    assert lent(script) == {"a0": 20, "a1": 12}
    script = splitting(20, 13, 8)
    order = placed(script.orders(arrived("r1", tokens=3_800, max_tokens=200)))
    assert parts(order) == [("a1", 0, 6), ("a2", 6, 4), ("a0", 10, 0)]
    assert lent(script) == {"a0": 20, "a1": 12, "a2": 8}
    script(prefilled(order.order_id))
    told = [one.worker_id for one in script.orders(finished(order.order_id)) if isinstance(one, CancelOrder)]
    assert (sorted(told), lent(script)) == (["a0", "a1", "a2"], {})


def test_it_is_split_where_only_so_there_is_room_now() -> None:
    script = splitting(20, 20)
    for number in range(2):
        placed(script.orders(arrived(f"r{number}", tokens=900, max_tokens=100, block_keys=b"")))
    order = placed(script.orders(arrived("r2", tokens=1_200, max_tokens=100)))
    assert parts(order) == [("a1", 0, 2), ("a0", 2, 0)]
    assert lent(script) == {"a0": 19, "a1": 14}
    assert refused(script.orders(arrived("r3", tokens=900))).reason == "no_room"


def test_an_answer_and_the_rest_of_a_prompt_lie_at_one_worker() -> None:
    script = splitting(10, 9)
    assert refused(script.orders(arrived("r2", tokens=399, max_tokens=900))).reason == "too_long"
    order = placed(script.orders(arrived("r3", tokens=400, max_tokens=900)))
    assert parts(order) == [("a1", 0, 2), ("a0", 2, 0)]


def test_nearly_all_of_all_caches_is_one_context_and_more_is_too_long() -> None:
    script = splitting(10, 10, 10, 10, pools_bound=True)
    assert capacity(script.core.state) == (4_000, 4_000)
    order = placed(script.orders(arrived("r1", tokens=3_900, max_tokens=100)))
    assert parts(order) == [("a1", 0, 5), ("a2", 5, 5), ("a3", 10, 5), ("a0", 15, 0)]
    assert refused(script.orders(arrived("r2", tokens=3_950, max_tokens=100))).reason == "too_long"
    assert refused(script.orders(arrived("r3", tokens=3_900, max_tokens=100))).reason == "no_room"


def test_only_those_who_say_so_take_parts() -> None:
    script = cluster(attention(0, 10, lends=True), attention(1, 10), attention(2, 10, 0, 2, lends=True))
    assert refused(script.orders(arrived(tokens=1_500))).reason == "too_long"
    script(attention(1, 10, lends=True, incarnation="i2"))
    assert len(placed(script.orders(arrived("r2", tokens=1_500))).cache) == 2


def test_parts_go_on_under_another_decode_worker_and_are_explained() -> None:
    script = splitting(10, 10, models=2)
    script.core.explain_requests = lambda _: True
    order = placed(script.orders(arrived(tokens=1_500)))
    why = script.core.notes[-1]
    rows = [row[3] for row in decode_rows(why, order.worker_id, None)[1:]]
    assert rows == ["0 + segments 0 to 2 at a1 + the rest at a0, from segment 3 on"] * 2
    script(prefilled(order.order_id))
    script(DecodeStarted(order_id=order.order_id, request_id="r1", worker_id=order.worker_id, wait_ns=0))
    again = placed(script.orders(WorkerLeft(worker_id=order.worker_id)))
    assert (again.resumes, again.cache) == (order.order_id, order.cache)
    copy = Core.restore(script.core.snapshot(), checked=True, examined=True)
    assert copy.digest() == script.core.digest()
    lost = script.orders(WorkerLeft(worker_id="a1"))
    told = {one.worker_id for one in lost if isinstance(one, CancelOrder)}
    assert told == {again.worker_id, "a0"}
    assert lent(script) == {}


# --- a decode worker is gone --------------------------------------------------------------------------------


def decoding(**policy: Any) -> tuple[Script, StartDecode]:
    """A request that d0 decodes; its KV lies at a0 and a1. d1 keeps no KV either."""
    script = cluster(attention(0, 20, 0, 2), attention(1, 20, 2, 2), models=2, **policy)
    order = placed(script.orders(arrived(tokens=1_000)))
    script(prefilled(order.order_id))
    script(DecodeStarted(order_id=order.order_id, request_id="r1", worker_id="d0", wait_ns=0))
    assert order.worker_id == "d0"
    return script, order


def test_another_decode_worker_goes_on_without_a_prefill_where_the_kv_lies() -> None:
    script, order = decoding()
    decisions = script.orders(WorkerLeft(worker_id="d0"))
    again = placed(decisions)
    assert (again.worker_id, again.resumes, again.cache) == ("d1", order.order_id, order.cache)
    assert (again.placement, again.order_id != order.order_id) == (2, True)
    assert not any(isinstance(one, StartPrefill | CancelOrder) for one in decisions)
    assert {one.node_id for one in decisions if isinstance(one, ReleaseOrder)} == {"n-p0", "n-d0"}
    assert lent(script) == {"a0": 11, "a1": 11}
    # Late words of the old order find nobody; the new one ends as ever.
    assert script.orders(finished(order.order_id, worker_id="d0")) == []
    told = [one.worker_id for one in script.orders(finished(again.order_id, worker_id="d1"))]
    assert (sorted(told), lent(script)) == (["a0", "a1"], {})


def test_what_is_still_held_under_the_old_order_is_no_stray_until_the_new_one_is_over() -> None:
    script, order = decoding()
    again = placed(script.orders(WorkerLeft(worker_id="d0")))
    beat = WorkerHeartbeat(worker_id="a0", incarnation="i1", orders=[order.order_id], obeyed_seq=10**6)
    assert [script.orders(beat, after_ns=10**12) for _ in range(3)] == [[], [], []]
    script(RequestCancelled(request_id=again.request_id))
    assert script.orders(beat, after_ns=10**12) == []
    assert [type(one) for one in script.orders(beat, after_ns=10**12)] == [CancelOrder]


def test_the_same_worker_that_started_again_goes_on_too() -> None:
    script, order = decoding()
    script(WorkerLeft(worker_id="d1"))
    again = placed(script.orders(model(0, incarnation="i2")))
    assert (again.worker_id, again.resumes) == ("d0", order.order_id)


@pytest.mark.parametrize("why", ["prefill", "waits", "alone", "full", "often", "place", "keeps"])
def test_where_nobody_can_go_on_the_request_is_placed_anew(why: str) -> None:
    script, order = decoding(placements_max=1 if why == "often" else 5)
    match why:
        case "prefill":
            script(RequestCancelled(request_id="r1"))
            order = placed(script.orders(arrived("r2", tokens=1_000)))
            started = {"order_id": order.order_id, "request_id": "r2", "worker_id": order.worker_id}
            script(DecodeStarted(wait_ns=0, **started))  # its prefill worker has yet to say that it is done
        case "waits":
            script(RequestCancelled(request_id="r1"))
            order = placed(script.orders(arrived("r2", tokens=1_000)))
            script(prefilled(order.order_id, "r2"))
        case "alone":
            script(WorkerLeft(worker_id="d1"))
        case "full":
            script(model(1, incarnation="i2", batch_max=1))
            placed(script.orders(arrived("r2", tokens=100)))
        case "place":
            script(WorkerLeft(worker_id="a1"))
        case "keeps":
            script(decode(1, layout=HEADS, incarnation="i2"))
    found = script.orders(WorkerLeft(worker_id=order.worker_id))
    assert [one for one in found if isinstance(one, StartDecode) and one.resumes] == []
    assert lent(script).keys() <= {"a0", "a1"}


def test_a_worker_that_goes_on_and_cannot_has_the_request_placed_with_a_prefill() -> None:
    script, _ = decoding()
    again = placed(script.orders(WorkerLeft(worker_id="d0")))
    failed = DecodeFailed(order_id=again.order_id, request_id="r1", worker_id="d1", reason="gone")
    decisions = script.orders(failed)
    assert [one.placement for one in decisions if isinstance(one, StartDecode) and not one.resumes] == [3]
    assert sum(isinstance(one, StartPrefill) for one in decisions) == 1
    assert sorted(one.worker_id for one in decisions if isinstance(one, CancelOrder)) == ["a0", "a1"]


def test_the_history_of_a_request_shows_who_went_on() -> None:
    script, _ = decoding()
    again = placed(script.orders(WorkerLeft(worker_id="d0")))
    script(finished(again.order_id, worker_id="d1"))
    histories, core = RequestHistories(), Core()
    for stamped in script.log:
        decisions = core.step(stamped)
        histories.see(EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=stamped.event), decisions, core)
    attempts = histories.of["r1"].attempts
    assert [(one.order.decode_worker_id, one.lost) for one in attempts] == [
        ("d0", "d1 goes on with its KV"),
        ("d1", ""),
    ]
    assert attempts[1].finished is not None


def test_groups_and_splits_are_in_the_status_and_in_metrics() -> None:
    script = splitting(30, 20, 8)
    for name, tokens in (("r1", 1_000), ("r2", 3_000)):
        placed(script.orders(arrived(name, tokens=tokens, max_tokens=100)))
    script(WorkerHeartbeat(worker_id="d0", incarnation="i1", running=2, groups=2))
    (node,) = [one for one in node_statuses(script.core.state) if one.id == "d0"]
    assert (node.groups, node.splits) == (2, {"request": 1, "sequence": 1})
    shown = {
        "id": "d0",
        "role": "decode",
        "state": "ready",
        "queued": 0,
        "running": 2,
        "kv_used": 0,
        "kv_total": 9,
    }
    shown |= {"groups": node.groups, "splits": node.splits}
    lines = describe(
        {"model": "m", "ready": True, "nats": "-", "http": "-", "nodes": [shown], "conductors": []}
    )
    assert "KV at attention workers: d0 in 2 groups, 1 by request, 1 by sequence" in lines
    registry = CollectorRegistry()
    bus: Any = None  # which the figures of the core do not need
    registry.register(ConductorMetrics(bus, script.core, Tally()))
    assert registry.get_sample_value("halfmoon_decode_groups", {"worker": "d0"}) == 2
    found = [
        registry.get_sample_value("halfmoon_cache_splits", {"split": each}) for each in get_args(CacheSplit)
    ]
    assert found == [1, 0, 1]
    by_heads = cluster(attention(0, 20, 0, 2), attention(1, 30, 2, 2))
    by_heads(arrived(tokens=1_000))
    assert splits_of(by_heads.core.state.orders.values()) == {"heads": 1}


def test_without_who_can_hold_kv_the_cluster_is_not_ready_and_says_why() -> None:
    script = cluster(attention(0, 30, 0, 2), attention(1, 30, 2, 2), attention(2, 30, 2, 2), models=2)
    registry = CollectorRegistry()
    registry.register(ConductorMetrics(None, script.core, Tally()))  # type: ignore[arg-type]

    def found() -> tuple[str, set[str]]:
        """What keeps the cluster from serving, and the decode workers that have nowhere to keep KV."""
        status = conductor_status(script.core, conductor_id="c", caught_up=True)
        assert status.ready == (not status.lacks)
        without = {one.id for one in status.nodes if one.no_attention}
        metrics = {
            n for n in ("d0", "d1", "d9") if registry.get_sample_value("halfmoon_no_attention", {"worker": n})
        }
        assert metrics == without
        return status.lacks, without

    assert found() == ("", set())
    script(WorkerLeft(worker_id="a2"))
    assert found() == ("", set()), "each KV head has somebody still"
    script(WorkerDraining(worker_id="a1", incarnation="i1"))
    some = "decode workers keep no KV, and the attention workers that are ready have not all KV heads"
    assert found() == (some, {"d0", "d1"})
    script(WorkerLeft(worker_id="a0"))
    assert found() == ("decode workers keep no KV, and no attention worker is ready", {"d0", "d1"})
    script(model(9, cache_elsewhere=False))
    assert found() == ("", {"d0", "d1"}), "one that keeps its own decodes"
    script(WorkerLeft(worker_id="p0"))
    assert found() == ("no prefill worker is ready", {"d0", "d1"})
