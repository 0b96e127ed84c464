"""Lending in the core: who holds parts of a request that no decode worker's own cache holds, and the ledger of it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from conductor_scripts import (
    LAYOUT,
    Script,
    arrived,
    decode,
    finished,
    prefill,
    prefilled,
)
from msgspec.structs import replace

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.capacity import capacity
from halfmoon.schemas.codec import decode as decode_message
from halfmoon.schemas.codec import encode
from halfmoon.schemas.decisions import CancelOrder, Decision, RejectRequest, StartDecode
from halfmoon.schemas.events import (
    DecodeFailed,
    FrontendJoined,
    RequestCancelled,
    Stamped,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import AdmissionName

#: Segments of two blocks of 100 tokens.
SEGMENTS = replace(LAYOUT, segment_tokens=200)


def lender(number: int, blocks: int, **fields: Any) -> WorkerJoined:
    return decode(number, **{"layout": SEGMENTS, "kv_blocks": blocks, "lends": True, **fields})


def cluster(*blocks: int, lends: bool = True, **policy: Any) -> Script:
    """Decode workers with caches of so many blocks."""
    workers = [lender(number, count, lends=lends) for number, count in enumerate(blocks)]
    first = prefill(layout=SEGMENTS)
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    return Script(first, *workers, joined, heartbeat_ns=10**12, **policy)


def placed(decisions: list[Decision]) -> StartDecode:
    (order,) = [one for one in decisions if isinstance(one, StartDecode)]
    return order


def loans(order: StartDecode) -> list[tuple[str, int]]:
    return [(loan.worker_id, loan.segments) for loan in order.loans]


def lent(script: Script) -> dict[str, int]:
    workers = script.core.state.workers.values()
    return {worker.worker_id: sum(worker.lent.values()) for worker in workers if worker.lent}


def test_what_fits_one_cache_is_not_spread() -> None:
    order = placed(cluster(12, 12).orders(arrived(tokens=1_000, max_tokens=100)))
    assert order.loans == []


def test_the_first_segments_go_to_the_emptiest_lenders_and_no_more_than_must() -> None:
    script = cluster(8, 20, 13)
    # 30 blocks: d1 keeps 20, and of the other ten d2 takes them all.
    order = placed(script.orders(arrived(tokens=2_900, max_tokens=100)))
    assert (order.worker_id, loans(order)) == ("d0", [("d1", 10), ("d2", 1)])
    state = script.core.state
    assert lent(script) == {"d1": 20, "d2": 2}
    assert state.workers["d0"].reserved_blocks == 8
    assert [state.workers[each].reserved_blocks for each in ("d1", "d2")] == [20, 2]


def test_a_cluster_without_lending_says_what_it_holds() -> None:
    (refused,) = cluster(12, 12, lends=False, pools_bound=True).orders(arrived(tokens=1_500))
    assert isinstance(refused, RejectRequest)
    assert refused.reason == "too_long"
    assert "prompts of up to 1200, 1200 with the answer" in refused.message


@pytest.mark.parametrize(
    ("blocks", "tokens"), [((8, 8), 1_600), ((7, 9), 1_500), ((7, 7), 1_300), ((8,), 800)]
)
def test_the_longest_request_is_the_sum_of_whole_segments_and_one_remainder(
    blocks: tuple[int, ...], tokens: int
) -> None:
    script = cluster(*blocks)
    assert capacity(script.core.state)[1] == tokens
    order = placed(script.orders(arrived("r1", tokens=tokens - 1, max_tokens=1, block_keys=b"")))
    script(RequestCancelled(request_id="r1"))
    assert bool(order.loans) == (len(blocks) > 1)
    (refused,) = script.orders(arrived("r2", tokens=tokens, max_tokens=1, block_keys=b""))
    assert isinstance(refused, RejectRequest)
    assert refused.reason == "too_long"


def test_an_answer_of_which_too_much_is_still_to_come_fits_nobody() -> None:
    """Only segments of the prompt are lent: what is generated stays where it is decoded."""
    (refused,) = cluster(8, 8).orders(arrived(tokens=100, max_tokens=900))
    assert isinstance(refused, RejectRequest)


@pytest.mark.parametrize("how", ["finished", "cancelled", "failed", "borrower", "lender", "again"])
def test_a_loan_ends_with_its_order_and_with_either_worker(how: str) -> None:
    script = cluster(8, 8, placements_max=1)
    order = placed(script.orders(arrived(tokens=1_000)))
    assert (order.worker_id, loans(order)) == ("d0", [("d1", 2)])
    script(prefilled(order.order_id))
    events = {
        "finished": finished(order.order_id),
        "cancelled": RequestCancelled(request_id="r1"),
        "failed": DecodeFailed(order_id=order.order_id, request_id="r1", worker_id="d0", reason="x"),
        "borrower": WorkerLeft(worker_id="d0"),
        "lender": WorkerLeft(worker_id="d1"),
        "again": lender(1, 8, incarnation="i2"),
    }
    told = [one.worker_id for one in script.orders(events[how]) if isinstance(one, CancelOrder)]
    assert lent(script) == {}
    assert all(worker.reserved_blocks == 0 for worker in script.core.state.workers.values())
    assert ("d1" in told) == (how not in ("lender", "again"))
    assert ("d0" in told) == (how in ("cancelled", "lender", "again"))


@pytest.mark.parametrize("admission", get_args(AdmissionName))
def test_what_must_borrow_is_not_queued(admission: AdmissionName) -> None:
    """Two that hold parts of each other would wait for each other for ever."""
    script = cluster(8, 8, admission=admission)
    placed(script.orders(arrived("r1", tokens=1_000)))
    (refused,) = script.orders(arrived("r2", tokens=1_000))
    assert isinstance(refused, RejectRequest)
    assert (refused.reason, refused.retry_after_ns > 0) == ("no_room", True)


def test_an_accepted_request_waits_for_room_at_lenders_and_gets_it() -> None:
    script = cluster(8, 8, 8)
    first = placed(script.orders(arrived("r1", tokens=1_000)))
    assert (first.worker_id, loans(first)) == ("d0", [("d1", 2)])
    second = placed(script.orders(arrived("r2", tokens=600, max_tokens=100)))
    assert (second.worker_id, second.loans) == ("d2", [])
    assert [one for one in script.orders(WorkerLeft(worker_id="d1")) if isinstance(one, StartDecode)] == []
    state = script.core.state
    assert list(state.parked) == ["r1"]  # what d2 has free is less than is missing
    again = placed(script.orders(finished(second.order_id, "r2", "d2")))
    assert (again.request_id, again.placement, state.parked) == ("r1", 2, {})
    assert {again.worker_id, again.loans[0].worker_id} == {"d0", "d2"}


def test_who_failed_a_request_still_helps_where_nobody_else_can() -> None:
    script = cluster(8, 8)
    first = placed(script.orders(arrived(tokens=1_000)))
    failed = DecodeFailed(order_id=first.order_id, request_id="r1", worker_id="d0", reason="x")
    again = placed(script.orders(failed))
    assert (again.worker_id, loans(again)) == ("d1", [("d0", 2)])


def test_a_restored_core_and_an_old_log_agree_on_loans() -> None:
    script = cluster(8, 8)
    placed(script.orders(arrived(tokens=1_000)))
    copy = Core.restore(script.core.snapshot(), checked=True, examined=True)
    assert copy.digest() == script.core.digest()
    event = RequestCancelled(request_id="r1")
    stamped = Stamped(seq=script.core.seq + 1, at_ns=script.now_ns, event=event)
    assert copy.step(stamped) == script.core.step(stamped)
    old = encode(lender(0, 8))
    joined = decode_message(old.replace(b',"lends":true', b""), WorkerJoined)
    assert not joined.lends


def test_draining_workers_lend_nothing_new() -> None:
    script = cluster(8, 8)
    script(WorkerDraining(worker_id="d1", incarnation="i1"))
    (refused,) = script.orders(arrived(tokens=1_000))
    assert isinstance(refused, RejectRequest)
