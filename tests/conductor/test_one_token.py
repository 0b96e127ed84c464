"""Requests of one token: the prefill worker answers them, and no decode worker is needed or loaded."""

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
    nothing_reserved,
    prefill,
    prefilled,
    worker,
)

from halfmoon.conductor.core.explanation import Explanation
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import answer_times, remarks, verdict_text
from halfmoon.schemas.decisions import CancelOrder, RejectRequest, StartDecode, StartMixed, StartPrefill
from halfmoon.schemas.events import Event, FrontendJoined, RequestCancelled, WorkerHeartbeat, WorkerLeft


def cluster(*events: Event, **policy: Any) -> Script:
    return Script(
        FrontendJoined(frontend_id="f1", incarnation="i1"), *events, **{"one_token_prefills": True, **policy}
    )


def able(number: int = 0, **fields: Any) -> Event:
    return prefill(number, answers=True, **fields)


def one(request_id: str = "r1", **fields: Any) -> Event:
    return arrived(request_id, **{"max_tokens": 1, **fields})


def alone(script: Script, event: Event) -> StartPrefill:
    (order,) = script.orders(event)
    assert isinstance(order, StartPrefill), order
    assert order.answers
    return order


def test_its_prefill_worker_gets_the_whole_order() -> None:
    script = cluster(able(), decode())
    order = alone(script, one())
    assert (order.worker_id, order.decode_worker_id, order.decode_node_id) == ("p0", "p0", "n-p0")
    assert nothing_reserved(script.core.state.workers["d0"])
    assert order.predicted.tbt_ns == 0


@pytest.mark.parametrize(
    ("events", "policy", "request_fields"),
    [
        ([able(), decode()], {"one_token_prefills": False}, {}),
        ([able(), prefill(1), decode()], {}, {}),
        ([able(), decode()], {}, {"max_tokens": 2}),
    ],
    ids=["the policy of an older log", "a prefill worker that cannot", "two tokens"],
)
def test_a_decode_worker_answers_otherwise(
    events: list[Event], policy: dict[str, Any], request_fields: dict[str, Any]
) -> None:
    script = cluster(*events, **policy)
    orders = script.orders(one(**request_fields))
    assert [type(order) for order in orders] == [StartPrefill, StartDecode]
    assert not orders[0].answers  # type: ignore[union-attr]


def test_neither_a_full_nor_a_missing_decode_worker_keeps_it_waiting() -> None:
    full = decode(kv_blocks=1, batch_max=1)
    for script in (cluster(able()), cluster(able(), full), cluster(able(), decode(context_tokens_max=100))):
        alone(script, one())


def test_its_end_frees_all_and_the_report_of_its_prefill_teaches() -> None:
    script = cluster(able(), decode())
    order = alone(script, one())
    script(finished(order.order_id, worker_id="p0", completion_tokens=1, decode_ns=0), after_ns=200 * MS)
    state = script.core.state
    assert (state.orders, state.requests, state.counters.finished) == ({}, {}, 1)
    assert nothing_reserved(state.workers["p0"])
    before = state.workers["p0"].cost
    script(prefilled(order.order_id, compute_ns=1 * S, prompt_tokens=1_000))
    assert state.counters.prompt_tokens == 1_000
    assert state.workers["p0"].cost.prefill_ns(1_000, 0) > before.prefill_ns(1_000, 0)


def test_the_end_of_the_prefill_alone_ends_nothing() -> None:
    """The answer's report was lost on the way: the order stays with the worker until that is seen not to have it."""
    script = cluster(able(), decode(), heartbeat_ns=1 * S)
    order = alone(script, one())
    script(prefilled(order.order_id))
    assert list(script.core.state.workers["p0"].orders) == [order.order_id]
    again: list[Any] = []
    for _ in range(2):
        beat = WorkerHeartbeat(worker_id="p0", incarnation="i1", orders=[], obeyed_seq=script.core.seq)
        again += script.orders(beat, after_ns=1 * S)
    placed = [one for one in again if isinstance(one, StartPrefill)]
    assert len(placed) == 1
    assert placed[0].answers


@pytest.mark.parametrize("end", ["decode", "another"])
def test_only_its_own_worker_ends_it(end: str) -> None:
    script = cluster(able(), decode())
    order = alone(script, one())
    worker_id = {"decode": "d0", "another": "p1"}[end]
    assert script.orders(finished(order.order_id, worker_id=worker_id)) == []
    assert list(script.core.state.orders) == [order.order_id]


def test_a_worker_that_is_gone_loses_it_and_a_cancelled_one_is_taken_back() -> None:
    script = cluster(able(), able(1), decode())
    first = alone(script, one())
    other = "p1" if first.worker_id == "p0" else "p0"
    (again,) = [
        each
        for each in script.orders(WorkerLeft(worker_id=first.worker_id, incarnation="i1"))
        if isinstance(each, StartPrefill)
    ]
    assert (again.worker_id, again.answers) == (other, True)
    orders = script.orders(RequestCancelled(request_id="r1"))
    assert [each for each in orders if isinstance(each, CancelOrder)] == [
        CancelOrder(order_id=again.order_id, request_id="r1", worker_id=other)
    ]
    assert nothing_reserved(script.core.state.workers[other])


def test_a_first_token_that_would_be_late_is_refused() -> None:
    script = cluster(able(), decode(), ttft_slo_ns=50 * MS)
    (refused,) = script.orders(one())
    assert isinstance(refused, RejectRequest)
    assert refused.reason == "ttft_slo"


def test_a_mixed_worker_takes_it_where_its_first_token_is_sooner() -> None:
    script = cluster(able(), worker("m0", "mixed", token_budget=10_000))
    alone(script, one("r1"))
    (order,) = script.orders(one("r2", block_keys=keys(10, seed=2)))
    assert isinstance(order, StartMixed)


def test_its_explanation_speaks_of_no_decode_worker() -> None:
    script = cluster(able(), able(1), decode())
    script.core.explain_requests = explain_all
    script(one())
    (why,) = script.core.notes
    assert isinstance(why, Explanation)
    assert verdict_text(why) == "placed on p0, whose first token is the whole answer"
    assert not [line for line in remarks(why, None) if "d0" in line]
    corrected = msgspec.structs.replace(why, corrections={"p0": ("prefill", 1_500, 0)})
    (predicted,) = [line for line in remarks(corrected, None) if line.startswith("predicted")]
    assert predicted.startswith("predicted: first token ")
    assert ";" not in predicted
    done = finished("1-0", worker_id="p0", completion_tokens=1, ttft_ns=5 * MS, decode_ns=0)
    assert answer_times(done) == "first token 5.0 ms"
