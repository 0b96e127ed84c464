"""Places that answer far more slowly than was measured: marked by heartbeats, avoided, and well again."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import MS, S, Script, arrived, finished, prefilled
from test_cache_places import attention, cluster, placed, places
from test_lending import cluster as lenders
from test_lending import loans
from test_moves import skewed, tick

from halfmoon.cli.status import describe
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import remarks
from halfmoon.conductor.view.status import node_statuses
from halfmoon.schemas.codec import decode as decode_message
from halfmoon.schemas.codec import encode
from halfmoon.schemas.events import WorkerHeartbeat
from halfmoon.schemas.lending import PlaceWait
from halfmoon.schemas.policy import Policy

#: Ten times what was measured, for 30 seconds.
POLICY: dict[str, Any] = {"slow_place_percent": 1_000}


def seen(place: str, percent: int, owner: str = "d0") -> WorkerHeartbeat:
    wait = PlaceWait(worker_id=place, waited_ns=percent * MS, expected_ns=100 * MS)
    return WorkerHeartbeat(worker_id=owner, incarnation="i1", places=[wait])


def slow(script: Script) -> list[str]:
    state = script.core.state
    return [one.worker_id for one in state.workers.values() if slow_mark(state, one) is not None]


def lies_at(script: Script, request_id: str) -> list[str]:
    order = placed(script.orders(arrived(request_id, tokens=1_000, max_tokens=100, block_keys=b"")))
    script(prefilled(order.order_id, request_id))
    script(finished(order.order_id, request_id))
    return [at for at, *_ in places(order)]


def test_a_slow_attention_worker_is_avoided_until_it_is_well_again() -> None:
    script = cluster(attention(0, 60), attention(1, 40), **POLICY)
    assert lies_at(script, "r1") == ["a0"]
    script(seen("a0", 999))
    assert lies_at(script, "r2") == ["a0"]
    script(seen("a0", 1_000))
    assert (slow(script), lies_at(script, "r3")) == (["a0"], ["a1"])
    # What is better, and not good, changes nothing.
    script(seen("a0", 500))
    assert (slow(script), lies_at(script, "r4")) == (["a0"], ["a1"])
    script(seen("a0", 499))
    assert (slow(script), lies_at(script, "r5")) == ([], ["a0"])


def test_a_mark_that_nothing_renews_ends() -> None:
    script = cluster(attention(0, 60), attention(1, 40), **POLICY)
    script(seen("a0", 2_000))
    script(seen("a0", 2_000), after_ns=20 * S)
    script(WorkerHeartbeat(worker_id="d0", incarnation="i1"), after_ns=29 * S)
    assert (slow(script), lies_at(script, "r1")) == (["a0"], ["a1"])
    script(WorkerHeartbeat(worker_id="d0", incarnation="i1"), after_ns=1 * S)
    assert (slow(script), lies_at(script, "r2")) == ([], ["a0"])


def test_where_only_a_slow_one_has_room_it_is_taken() -> None:
    script = cluster(attention(0, 60), attention(1, 10), **POLICY)
    script(seen("a0", 2_000))
    assert lies_at(script, "r1") == ["a0"]
    script(seen("a1", 2_000))
    assert slow(script) == ["a0", "a1"]
    assert lies_at(script, "r2") == ["a0"]


def test_one_owner_that_finds_it_well_does_not_speak_for_another() -> None:
    script = cluster(attention(0, 60), attention(1, 40), models=2, **POLICY)
    script(seen("a0", 2_000))
    script(seen("a0", 3_000, "d1"))
    script(seen("a0", 100, "d1"))
    assert slow(script) == ["a0"]
    script(seen("a0", 100))
    assert slow(script) == []


def test_a_place_that_starts_again_is_not_the_one_that_was_slow() -> None:
    script = cluster(attention(0, 60), attention(1, 40), **POLICY)
    script(seen("a0", 2_000))
    script(attention(0, 60))
    assert slow(script) == ["a0"]  # the same process joins once more
    script(attention(0, 60, incarnation="i2"))
    assert slow(script) == []


def test_a_slow_lender_gets_no_new_part_while_others_have_room() -> None:
    def lent_to(*slow_ones: str) -> dict[str, int]:
        script = lenders(8, 20, 18, **POLICY, name="least_loaded")
        for place in slow_ones:
            script(seen(place, 2_000, "d0" if place != "d0" else "d1"))
        order = placed(script.orders(arrived(tokens=2_300)))
        return {at: segments for at, segments in loans(order) if at != order.worker_id}

    usual = lent_to()
    (lender,) = usual
    assert lender not in lent_to(lender)
    # All of them are slow: as if none was.
    assert lent_to("d0", "d1", "d2") == usual


def test_nothing_moves_to_a_slow_one() -> None:
    script, *_ = skewed(**POLICY)
    script(seen("d1", 2_000))
    assert tick(script) == []
    script(seen("d1", 100))
    assert len(tick(script)) == 1


@pytest.mark.parametrize("percent", [0, 1_000])
def test_older_logs_know_no_slow_places(percent: int) -> None:
    old = encode(Policy())
    assert decode_message(old, Policy).slow_place_percent == 0
    script = cluster(attention(0, 60), attention(1, 40), slow_place_percent=percent)
    script(seen("a0", 10_000))
    script(seen("a9", 10_000))
    assert slow(script) == (["a0"] if percent else [])


def test_status_and_explanations_say_so_and_a_snapshot_keeps_it() -> None:
    script = cluster(attention(0, 60), attention(1, 40), **POLICY)
    script.core.explain_requests = explain_all
    script(seen("a0", 2_000))
    script(arrived("r1", tokens=1_000))
    said = "a0: slow, and avoided for new KV: 2.000 s of a step, where 100.0 ms were measured"
    assert said in remarks(script.core.notes[0], None)
    (node,) = [one for one in node_statuses(script.core.state) if one.id == "a0"]
    assert (node.slow_wait_ns, node.slow_expected_ns) == (2_000 * MS, 100 * MS)
    assert slow_mark(
        Core.restore(script.core.snapshot(), checked=True).state, script.core.state.workers["a0"]
    )
    shown = {
        "id": "a0", "role": "attention", "state": "ready", "queued": 0, "running": 0, "kv_used": 0, "kv_total": 9,
        "slow_wait_ms": 2000.0, "slow_expected_ms": 100.0,
    }  # fmt: skip
    status = {"model": "m", "ready": True, "nats": "-", "http": "-", "nodes": [shown], "conductors": []}
    lines = describe(status)
    assert "slow, and avoided for new KV: a0 (2000.0 ms of a step, where 100.0 were measured)" in lines
