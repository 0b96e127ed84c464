"""Groups of prefill workers in the core: when one is formed and of whom, what is booked, and what becomes of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from conductor_scripts import (
    LAYOUT,
    MS,
    S,
    Script,
    arrived,
    decode,
    finished,
    keys,
    prefill,
    prefilled,
    stored,
)

from halfmoon.conductor.core.state.overload import OFFERED_WINDOW
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import CancelOrder, Decision, StartPrefill, StartStage
from halfmoon.schemas.events import (
    FrontendJoined,
    PrefillFailed,
    RequestCancelled,
    StageFinished,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import GroupFrom, Layout

#: 0.1 ms a token, and 5 ns for each pair of tokens.
PROFILE = CostProfile(
    prefill_base_ns=10 * MS,
    prefill_per_token_ps=100_000_000,
    prefill_per_token2_fs=5_000_000,
    decode_base_ns=10 * MS,
)
FAST = Layout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {"numerics": "fast"})


def member(number: int, **fields: Any) -> WorkerJoined:
    place = {"stage_addresses": [f"unix:p{number}"], "activation_bytes": 100, "profile": PROFILE}
    return prefill(number, **{**place, **fields})


def cluster(count: int = 4, most: int = 4, group_from: GroupFrom = "idle", **fields: Any) -> Script:
    members = [member(number, **fields) for number in range(count)]
    layout = {name: fields[name] for name in ("layout",) if name in fields}
    return Script(
        *members,
        decode(**layout),
        FrontendJoined(frontend_id="f1", incarnation="i1"),
        prefill_group=most,
        group_from=group_from,
        ttft_slo_ns=1_000 * S,
        tbt_slo_ns=1_000 * S,
    )


def start(decisions: list[Decision]) -> StartPrefill:
    return next(one for one in decisions if isinstance(one, StartPrefill))


def parts(decisions: list[Decision]) -> list[StartStage]:
    return [one for one in decisions if isinstance(one, StartStage)]


def busy(script: Script) -> list[str]:
    return [name for name, worker in script.core.state.workers.items() if worker.orders and name[0] == "p"]


def test_a_long_prompt_is_computed_by_all_who_are_idle() -> None:
    script = cluster()
    given = script.orders(arrived(tokens=20_000))
    order = start(given)
    assert [(one.worker_id, one.first_layer, one.layers) for one in order.stages] == [
        ("p1", 0, 3),
        ("p2", 3, 3),
        ("p3", 6, 2),
        ("p0", 8, 2),
    ]
    assert order.worker_id == "p0"
    assert [(one.worker_id, one.stage) for one in parts(given)] == [
        (stage.worker_id, stage) for stage in order.stages[:-1]
    ]
    assert busy(script) == ["p0", "p1", "p2", "p3"]
    # On one worker: 10 ms + 2 s + 2 s. Three of ten layers are the widest stage's.
    assert 0.3 * 4_010 * MS < order.predicted.prefill_ns < 0.35 * 4_010 * MS


def looked(script: Script, busy_permille: int) -> Script:
    """So many thousandths of a worker were busy when prompts came, as far as anybody remembers."""
    offered = script.core.state.offered
    offered.looks, offered.busy_permille = OFFERED_WINDOW, busy_permille
    return script


@pytest.mark.parametrize(
    ("found_busy", "size"), [(0, 4), (400, 4), (700, 3), (1_500, 3), (2_000, 2), (2_700, 1), (4_000, 1)]
)
def test_a_group_leaves_as_many_as_are_busy_on_average(found_busy: int, size: int) -> None:
    script = looked(cluster(group_from="spare"), found_busy)
    assert max(1, len(start(script.orders(arrived(tokens=20_000))).stages)) == size
    everybody = looked(cluster(), found_busy)
    assert len(start(everybody.orders(arrived(tokens=20_000))).stages) == 4


def test_what_arrivals_find_busy_is_a_running_mean() -> None:
    script, found = cluster(most=1, group_from="spare"), []
    for number in range(4):
        script(arrived(f"r{number}", 1_000, block_keys=keys(10, seed=number + 2)))
        found.append(script.core.state.offered.busy_permille)
    # The first found nobody, the next one, two and three of the four.
    assert found == [0, 500, 1_000, 1_500]
    for name, order in list(script.core.state.orders.items()):
        script(prefilled(name, order.request_id, order.prefill_id), after_ns=1 * S)
    script(arrived("later", 1_000, block_keys=keys(10, seed=9)))
    assert script.core.state.offered.busy_permille == 1_200


def test_a_short_prompt_stays_on_one_worker_and_the_group_grows_with_the_prompt() -> None:
    sizes = []
    for tokens in (100, 200, 400, 1_000, 4_000, 20_000):
        sizes.append(max(1, len(start(cluster().orders(arrived(tokens=tokens))).stages)))
    assert sizes[0] == 1
    assert sizes[-1] == 4
    assert all(shorter <= longer for shorter, longer in pairwise(sizes)), sizes


def test_a_cached_prefix_counts_as_what_it_saves() -> None:
    script = cluster()
    script(stored("p0", keys(199)))
    given = script.orders(arrived(tokens=20_000))
    assert start(given).stages == []


@pytest.mark.parametrize(
    "fields",
    [
        {"stage_addresses": []},
        {"kv_blocks": 100},
        {"layout": FAST},
        {"context_tokens_max": 10_000},
    ],
)
def test_who_cannot_hold_a_part_does_not_join(fields: dict[str, Any]) -> None:
    script = cluster(1)
    script(member(1, **fields))
    order = start(script.orders(arrived(tokens=20_000)))
    assert (order.worker_id, order.stages) == ("p0", [])


def test_who_has_an_order_or_drains_does_not_join_and_nobody_joins_one_who_has() -> None:
    script = cluster(3)
    first = start(script.orders(arrived("r1", 100)))
    second = start(script.orders(arrived("r2", 20_000, block_keys=keys(200, 2))))
    assert first.worker_id not in [one.worker_id for one in second.stages]
    assert len(second.stages) == 2
    third = start(script.orders(arrived("r3", 20_000, block_keys=keys(200, 3))))
    assert third.stages == []
    other = cluster(2)
    other(WorkerDraining(worker_id="p1", incarnation="i1"))
    assert start(other.orders(arrived(tokens=20_000))).stages == []


def test_fast_numerics_choose_their_chunks() -> None:
    order = start(cluster(layout=FAST).orders(arrived(tokens=20_000)))
    # A chunk costs 10 ms beside its tokens; the last one is computed by one stage after the other.
    assert 200 <= order.chunk_tokens <= 3_200
    assert start(cluster().orders(arrived(tokens=20_000))).chunk_tokens == 100


def test_a_part_that_is_over_leaves_its_worker_free() -> None:
    script = cluster(2)
    order = start(script.orders(arrived(tokens=20_000)))
    over = StageFinished(order_id=order.order_id, request_id="r1", worker_id="p1")
    script(StageFinished(order_id=order.order_id, request_id="r1", worker_id="p0"))  # has no part to end
    assert busy(script) == ["p0", "p1"]
    script(over, after_ns=S)
    assert busy(script) == ["p0"]
    script(over)
    cost = script.core.state.workers["p0"].cost
    script(prefilled(order.order_id, prompt_tokens=20_000, compute_ns=900 * MS, stages=2), after_ns=S)
    assert busy(script) == []
    assert script.core.state.workers["p0"].cost == cost, "what two took says nothing of one"
    script(finished(order.order_id))
    assert script.core.state.orders == {}


def test_the_prefills_end_frees_all_parts() -> None:
    script = cluster(3)
    order = start(script.orders(arrived(tokens=20_000)))
    script(prefilled(order.order_id, stages=3))
    assert busy(script) == []
    script(StageFinished(order_id=order.order_id, request_id="r1", worker_id="p1"))


@pytest.mark.parametrize("lost", ["p0", "p1", "p2", "d0"])
def test_whoever_dies_the_request_is_placed_again_on_one_worker(lost: str) -> None:
    script = cluster(3)
    script(decode(1))
    order = start(script.orders(arrived(tokens=20_000)))
    lost = order.decode_worker_id if lost == "d0" else lost
    given = script.orders(WorkerLeft(worker_id=lost), after_ns=S)
    again = start(given)
    assert again.stages == []
    assert lost not in (again.worker_id, again.decode_worker_id)
    told = {one.worker_id for one in given if isinstance(one, CancelOrder) and one.order_id == order.order_id}
    assert told == {"p0", "p1", "p2", order.decode_worker_id} - {lost}
    assert busy(script) == [again.worker_id]


def test_a_failed_prefill_and_a_cancelled_request_end_all_parts() -> None:
    script = cluster(2)
    order = start(script.orders(arrived(tokens=20_000)))
    failed = PrefillFailed(
        order_id=order.order_id, request_id="r1", worker_id="p0", reason="stage p1: hung up", stage_id="p1"
    )
    given = script.orders(failed)
    assert "p1" in [one.worker_id for one in given if isinstance(one, CancelOrder)]
    assert (start(given).stages, start(given).worker_id) == ([], "p0"), "it is p1 that is to blame"
    given = script.orders(RequestCancelled(request_id="r1"))
    assert busy(script) == []
    order = start(script.orders(arrived("r2", 20_000)))
    given = script.orders(RequestCancelled(request_id="r2"))
    assert {one.worker_id for one in given if isinstance(one, CancelOrder)} == {"p0", "p1", "d0"}
    assert busy(script) == []


def test_a_part_that_its_worker_knows_nothing_of_is_lost_with_its_order() -> None:
    script = cluster(2)
    order = start(script.orders(arrived(tokens=20_000)))
    silent = WorkerHeartbeat(worker_id="p1", incarnation="i1", orders=[], obeyed_seq=script.core.seq)
    assert script.orders(silent, after_ns=S) == []
    given = script.orders(silent, after_ns=S)
    assert start(given).order_id != order.order_id


def test_older_logs_have_no_groups() -> None:
    script = cluster(most=1)
    assert start(script.orders(arrived(tokens=20_000))).stages == []
