"""The life of a request: every way that an order can end, and what the core learns from it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from conductor_scripts import (
    MS,
    S,
    Script,
    arrived,
    decode,
    finished,
    keys,
    pair,
    prefill,
    prefilled,
    stored,
)

from halfmoon.conductor.core.state.core_state import FINISHED_MAX
from halfmoon.conductor.core.state.cost import Answers, Link
from halfmoon.schemas.codec import decode as decode_message
from halfmoon.schemas.codec import encode
from halfmoon.schemas.decisions import (
    CancelOrder,
    Decision,
    EngineRefusal,
    FailRequest,
    Fetch,
    Prediction,
    RejectRequest,
    ReleaseOrder,
    StartDecode,
    StartPrefill,
)
from halfmoon.schemas.events import (
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    Event,
    PrefillFailed,
    RequestCancelled,
    StoreLeft,
)

EXPECTED = Prediction(prefill_ns=110 * MS, ttft_ns=110 * MS, tbt_ns=12_100_000)


def crowd(**policy: Any) -> Script:
    """Two of each worker, with stores."""
    script = Script(heartbeat_ns=100 * S, **policy)
    for number in (0, 1):
        script(prefill(number))
        script(decode(number))
    return script


def failed(half: str, order_id: str, worker_id: str, retryable: bool = True) -> Event:
    kind = PrefillFailed if half == "prefill" else DecodeFailed
    return kind(order_id=order_id, request_id="r1", worker_id=worker_id, reason="broke", retryable=retryable)


def test_a_request_gets_both_halves_of_one_order_and_leaves_no_load_behind() -> None:
    script = pair()
    assert script(arrived(ttft_slo_ns=1 * S, tbt_slo_ns=50 * MS)) == [
        StartPrefill(
            order_id="7-1",
            request_id="r1",
            frontend_id="f1",
            worker_id="p0",
            decode_worker_id="d0",
            decode_node_id="n-d0",
            prompt_tokens=1_000,
            predicted=EXPECTED,
        ),
        StartDecode(
            order_id="7-1",
            request_id="r1",
            frontend_id="f1",
            worker_id="d0",
            prefill_worker_id="p0",
            prompt_tokens=1_000,
            max_tokens=100,
            tbt_slo_ns=50 * MS,
            predicted=EXPECTED,
        ),
    ]
    p0, d0 = script.core.state.workers["p0"], script.core.state.workers["d0"]
    assert (p0.orders, p0.prompts.reserved_ns, p0.prompts.pending_blocks, p0.prompts.prompt_blocks) == (
        {"7-1": 110 * MS},
        110 * MS,
        10,
        10,
    )
    assert (d0.orders, d0.reserved_blocks, d0.context_tokens) == ({"7-1": 11}, 11, 1_100)
    assert script(prefilled("7-1"), after_ns=100 * MS) == []
    assert (p0.orders, p0.prompts.reserved_ns, p0.prompts.pending_blocks, p0.prompts.prompt_blocks) == (
        {},
        0,
        0,
        0,
    )
    assert script(DecodeStarted(order_id="7-1", request_id="r1", worker_id="d0")) == []
    assert script(finished("7-1"), after_ns=1 * S) == []
    assert (d0.orders, d0.reserved_blocks, d0.context_tokens) == ({}, 0, 0)
    assert (script.core.state.requests, script.core.state.orders) == ({}, {})


def test_a_request_is_decided_once_however_often_it_arrives() -> None:
    script = pair()
    assert len(script(arrived())) == 2
    assert script(arrived()) == []
    script(prefilled("7-1"))
    assert script(arrived()) == []
    script(finished("7-1"))
    assert script(arrived()) == []
    refused = arrived("r2", ttft_slo_ns=1)
    assert [type(d) for d in script(refused)] == [RejectRequest]
    assert script(refused) == []


def test_ended_requests_are_remembered_up_to_a_bound_oldest_forgotten_first() -> None:
    script = pair()
    state = script.core.state
    state.finished = {f"x{n}": True for n in range(FINISHED_MAX)}
    script(arrived("r1", ttft_slo_ns=1))
    assert len(state.finished) == FINISHED_MAX
    assert (next(iter(state.finished)), "x0" in state.finished, "r1" in state.finished) == ("x1", False, True)


def test_late_repeated_and_unknown_answers_change_nothing() -> None:
    script = pair()
    script(arrived())
    script(prefilled("7-1"), after_ns=100 * MS)
    script(finished("7-1"), after_ns=100 * MS)
    before = script.core.snapshot()[12:]
    answers: list[Event] = [
        prefilled("7-1"),
        finished("7-1"),
        failed("prefill", "7-1", "p0"),
        failed("decode", "7-1", "d0"),
        DecodeRefused(order_id="7-1", request_id="r1", worker_id="d0", reason="x"),
        prefilled("99-1"),
        RequestCancelled(request_id="r1"),
        RequestCancelled(request_id="who"),
    ]
    for answer in answers:
        assert script(answer) == []
    assert script.core.state.counters.finished == 1
    assert len(script.core.snapshot()[12:]) == len(before)


def test_a_prefill_that_finished_cannot_finish_or_fail_once_more() -> None:
    script = pair()
    script(arrived())
    script(prefilled("7-1"))
    assert script(prefilled("7-1")) == []
    assert script(failed("prefill", "7-1", "p0")) == []
    assert script.core.state.counters.prompt_tokens == 1_000
    assert script.core.state.orders["7-1"].phase == "decode"


def test_an_answer_must_come_from_the_worker_that_has_the_order() -> None:
    script = crowd()
    script(arrived())
    assert script(prefilled("10-1", worker_id="p1")) == []
    assert script(finished("10-1", worker_id="d1")) == []
    assert script(prefilled("10-1", request_id="r2")) == []
    assert script.core.state.orders["10-1"].phase == "prefill"


def test_an_answer_may_overtake_the_other_half() -> None:
    script = pair()
    script(arrived())
    assert script(finished("7-1")) == []
    assert script(prefilled("7-1")) == []
    assert script.core.state.workers["p0"].orders == {}


def test_a_failed_prefill_is_placed_again_elsewhere() -> None:
    script = crowd()
    script(arrived())
    decisions = script(failed("prefill", "10-1", "p0"))
    assert decisions[:3] == [
        CancelOrder(order_id="10-1", request_id="r1", worker_id="d0"),
        ReleaseOrder(order_id="10-1", node_id="n-p0"),
        ReleaseOrder(order_id="10-1", node_id="n-d0"),
    ]
    start, then = decisions[3:]
    assert isinstance(start, StartPrefill)
    assert isinstance(then, StartDecode)
    assert (start.worker_id, start.order_id, then.placement) == ("p1", "11-1", 2)
    # When all have failed it, any is good again.
    again = script(failed("prefill", "11-1", "p1"))[3]
    assert isinstance(again, StartPrefill)
    assert again.worker_id == "p0"


@pytest.mark.parametrize(
    ("reason", "said"), [("broke", "broke"), ("", "no reason was given"), ("x" * 512, "x" * 470)]
)
def test_a_request_that_was_placed_too_often_fails_with_the_last_reason(reason: str, said: str) -> None:
    script = crowd(placements_max=2)
    script(arrived())
    script(failed("decode", "10-1", "d0"))
    refusal = EngineRefusal(status=503, retry_after_ns=7 * S)
    last = PrefillFailed(order_id="11-1", request_id="r1", worker_id="p0", reason=reason, refusal=refusal)
    failure = script(last)[-1]
    assert failure == FailRequest(
        request_id="r1",
        frontend_id="f1",
        message=f"placed 2 times, and each time lost; last: {said}",
        refusal=refusal,
    )
    assert decode_message(encode(failure), Decision) == failure  # of no more than 512 characters


def test_a_failed_decode_stops_its_prefill_and_is_placed_again() -> None:
    script = crowd()
    script(arrived())
    decisions = script(failed("decode", "10-1", "d0"))
    assert decisions[0] == CancelOrder(order_id="10-1", request_id="r1", worker_id="p0")
    assert isinstance(decisions[4], StartDecode)
    assert decisions[4].worker_id == "d1"
    script(prefilled("11-1", worker_id="p0"))
    later = script(failed("decode", "11-1", "d1"))
    assert [type(d).__name__ for d in later] == [
        "ReleaseOrder",
        "ReleaseOrder",
        "StartPrefill",
        "StartDecode",
    ]


@pytest.mark.parametrize("refusal", [None, EngineRefusal(status=400, param="top_k")])
@pytest.mark.parametrize(("half", "worker_id", "other"), [("prefill", "p0", "d0"), ("decode", "d0", "p0")])
def test_what_cannot_be_retried_fails_with_its_reason(
    half: str, worker_id: str, other: str, refusal: EngineRefusal | None
) -> None:
    script = pair()
    script(arrived())
    broke = msgspec.structs.replace(failed(half, "7-1", worker_id, retryable=False), refusal=refusal)
    assert script(broke) == [
        CancelOrder(order_id="7-1", request_id="r1", worker_id=other),
        ReleaseOrder(order_id="7-1", node_id="n-p0"),
        ReleaseOrder(order_id="7-1", node_id="n-d0"),
        FailRequest(request_id="r1", frontend_id="f1", message="broke", refusal=refusal),
    ]
    assert script(arrived()) == []


def test_a_refusal_by_decode_is_a_wasted_prefill() -> None:
    script = pair()
    script(arrived())
    script(prefilled("7-1"))
    refused = DecodeRefused(
        order_id="7-1", request_id="r1", worker_id="d0", reason="too slow now", predicted_tbt_ns=2 * S
    )
    assert script(refused) == [
        ReleaseOrder(order_id="7-1", node_id="n-p0"),
        ReleaseOrder(order_id="7-1", node_id="n-d0"),
        RejectRequest(
            request_id="r1",
            frontend_id="f1",
            reason="decode_refused",
            message="too slow now",
            predicted=Prediction(tbt_ns=2 * S),
            ttft_slo_ns=30 * S,
            tbt_slo_ns=1 * S,
        ),
    ]
    assert script.core.state.counters.wasted_prefills == 1
    assert script.core.state.counters.rejected == {"decode_refused": 1}


def test_a_refusal_while_prefill_still_runs_stops_it() -> None:
    script = pair()
    script(arrived())
    decisions = script(DecodeRefused(order_id="7-1", request_id="r1", worker_id="d0", reason="no"))
    assert decisions[0] == CancelOrder(order_id="7-1", request_id="r1", worker_id="p0")


def test_a_request_whose_client_may_have_tokens_is_placed_again_when_decode_refuses() -> None:
    script = crowd()
    script(arrived())
    script(failed("prefill", "10-1", "p0"))
    again = script(DecodeRefused(order_id="11-1", request_id="r1", worker_id="d0", reason="no"))
    assert [type(d).__name__ for d in again][-2:] == ["StartPrefill", "StartDecode"]


def test_a_cancelled_request_is_stopped_wherever_it_is() -> None:
    script = crowd()
    script(stored("p1", keys(9)))
    script(prefill(1, profile=prefill().profile, node_id="n-p0"))  # so p1 must fetch what is on n-p1
    first = script(arrived())[0]
    assert isinstance(first, StartPrefill)
    assert first.fetches == [Fetch(node_id="n-p1", first_block=0, blocks=9)]
    assert script(RequestCancelled(request_id="r1")) == [
        CancelOrder(order_id="12-1", request_id="r1", worker_id="p0"),
        CancelOrder(order_id="12-1", request_id="r1", worker_id="d0"),
        ReleaseOrder(order_id="12-1", node_id="n-p0"),
        ReleaseOrder(order_id="12-1", node_id="n-d0"),
        ReleaseOrder(order_id="12-1", node_id="n-p1"),
    ]
    assert script.core.state.leaving == {}
    script(arrived("r2"))
    script(prefilled("14-1", "r2", "p0"))
    assert script(RequestCancelled(request_id="r2"))[0] == CancelOrder(
        order_id="14-1", request_id="r2", worker_id="d0"
    )
    assert script.core.state.counters.cancelled == 2


def test_prefill_costs_and_bandwidths_are_learned_from_answers() -> None:
    script = crowd()
    script(stored("p0", keys(9)))
    state = script.core.state
    script(arrived("r0"))
    script(arrived("r1"))
    assert state.leaving == {"n-p0": {"12-1": script.now_ns + 950_000}}
    script(
        prefilled(
            "12-1",
            "r1",
            "p1",
            compute_ns=60 * MS,
            cached_fetched_tokens=900,
            fetched_bytes=900_000,
            fetch_node_id="n-p0",
            fetch_ns=1 * MS,
            pushed_bytes=1_000_000,
            push_ns=2 * MS,
        ),
        after_ns=60 * MS,
    )
    assert state.leaving == {}
    assert state.links == {
        "n-p1": {"n-p0": Link(bytes_s=900_000_000, measured_ns=script.now_ns)},
        "n-d1": {"n-p1": Link(bytes_s=500_000_000, measured_ns=script.now_ns)},
    }
    assert state.workers["p0"].cost == state.workers["p0"].learning.profile
    cost = state.workers["p1"].cost
    assert cost.prefill_base_ns > 10 * MS
    assert (state.counters.prompt_tokens, state.counters.cached_fetched_tokens) == (1_000, 900)


def test_a_tier_has_the_speed_at_which_it_was_read() -> None:
    """`Policy.ssd_bytes_s` is what is expected where a node has read nothing from it."""
    script = Script(prefill(), decode())
    script(stored("p0", keys(9), tier="ssd"))
    first = script(arrived("r0"))
    (order,) = [message for message in first if isinstance(message, StartPrefill)]
    assert (order.worker_id, [fetch.node_id for fetch in order.fetches]) == ("p0", ["n-p0"])
    read = {"fetched_bytes": 900_000, "fetch_node_id": "n-p0", "fetch_ns": 10_000 * MS}
    script(prefilled(order.order_id, "r0", "p0", cached_fetched_tokens=900, **read), after_ns=60 * MS)
    state = script.core.state
    assert state.ssd_links["n-p0"]["n-p0"].bytes_s == 90_000
    (order,) = [message for message in script(arrived("r1")) if isinstance(message, StartPrefill)]
    assert order.fetches == [], "110 ms of computing, 10 s of reading"
    script(StoreLeft(node_id="n-p0", incarnation="i1"))
    assert "n-p0" not in state.ssd_links


@pytest.mark.parametrize(
    ("pushed_bytes", "fields", "learned"),
    [
        (99_999, {}, True),
        (99_999, {"links_by_blocks": True}, False),
        (100_000, {"links_by_blocks": True}, True),
    ],
)
def test_a_push_of_less_than_a_block_says_nothing_of_its_link(
    pushed_bytes: int, fields: dict[str, Any], learned: bool
) -> None:
    script = crowd(**fields)
    placed = script(arrived())[0]
    assert isinstance(placed, StartPrefill)
    script(prefilled(placed.order_id, "r1", placed.worker_id, pushed_bytes=pushed_bytes, push_ns=2 * MS))
    assert bool(script.core.state.links) == learned


def test_a_prompt_that_was_placed_before_teaches_nothing_about_cost() -> None:
    script = crowd()
    script(arrived())
    script(failed("prefill", "10-1", "p0"))
    script(prefilled("11-1", "r1", "p1", compute_ns=9 * S))
    assert script.core.state.workers["p1"].cost == script.core.state.workers["p1"].learning.profile


def test_answers_teach_how_long_answers_are() -> None:
    script = Script(prefill(), decode(), heartbeat_ns=100 * S)
    for number in range(3):
        script(arrived(f"r{number}", max_tokens=120))
        script(
            finished(script.core.state.requests[f"r{number}"].order_id, f"r{number}", completion_tokens=10)
        )
    assert script.core.state.answers == {7: Answers(count=3, millitokens=10_000, decode_ns=1 * S)}
    script(arrived("next", max_tokens=100))
    script(arrived("other", max_tokens=1_000))
    blocks = script.core.state.workers["d0"].orders
    # 1,000 tokens and 10; 1,000 and the 256 that are thought at first.
    assert list(blocks.values()) == [11, 13]
    script(RequestCancelled(request_id="next"))
    script(arrived("aborted", max_tokens=100))
    aborted = script.core.state.requests["aborted"].order_id
    script(finished(aborted, "aborted", completion_tokens=1, finish_reason="abort"))
    assert script.core.state.answers[7].count == 3
