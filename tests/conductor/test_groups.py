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
from msgspec import to_builtins
from prometheus_client import CollectorRegistry

from halfmoon.cli.status import describe
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live.metrics import ConductorMetrics, Tally
from halfmoon.conductor.view.status import node_statuses, request_counts
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
from halfmoon.schemas.policy import Layout

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


def cluster(count: int = 4, most: int = 4, **fields: Any) -> Script:
    members = [member(number, **fields) for number in range(count)]
    layout = {name: fields[name] for name in ("layout",) if name in fields}
    return Script(
        *members,
        decode(**layout),
        FrontendJoined(frontend_id="f1", incarnation="i1"),
        prefill_group=most,
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
    script(WorkerLeft(worker_id=again.worker_id), after_ns=S)
    assert script.core.state.counters.groups_broken == 1, "of the one that was alone nobody speaks"


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
    registry = CollectorRegistry()
    registry.register(ConductorMetrics(None, script.core, Tally()))  # type: ignore[arg-type]
    assert registry.get_sample_value("halfmoon_cluster_groups_broken_total") == 2
    counts = request_counts(script.core.state)
    line = "compute: 2 by 2, 2 of them broken off\n"
    assert line in status_lines(script, grouped_prompts=counts.grouped, groups_broken=counts.groups_broken)


def test_a_part_that_its_worker_knows_nothing_of_is_lost_with_its_order() -> None:
    script = cluster(2)
    order = start(script.orders(arrived(tokens=20_000)))
    silent = WorkerHeartbeat(worker_id="p1", incarnation="i1", orders=[], obeyed_seq=script.core.seq)
    assert script.orders(silent, after_ns=S) == []
    given = script.orders(silent, after_ns=S)
    assert start(given).order_id != order.order_id


def status_lines(script: Script, **fields: Any) -> str:
    """`halfmoon status`, of what the core knows."""
    shown = [
        {"queued": 0, "running": 0, "kv_used": 0, "kv_total": 9, "stage_first_layer": 0} | to_builtins(node)
        for node in node_statuses(script.core.state)
        if node.role == "prefill"
    ]
    status = {"model": "m", "ready": True, "nats": "-", "http": "-", "nodes": shown, "conductors": []}
    return describe(status | fields)


def test_groups_are_in_the_status_and_in_metrics() -> None:
    script = cluster(3)
    registry = CollectorRegistry()
    bus: Any = None  # which the figures of the core do not need
    registry.register(ConductorMetrics(bus, script.core, Tally()))

    def shown(name: str, label: str, values: tuple[str, ...]) -> list[float | None]:
        return [registry.get_sample_value(name, {label: value}) for value in values]

    prompts = "halfmoon_cluster_grouped_prompts_total", "workers", ("2", "3", "4")
    layers = "halfmoon_prefill_stage_layers", "worker", ("p0", "p1", "p2")
    assert (shown(*prompts), shown(*layers)) == ([0, 0, 0], [0, 0, 0])
    assert "groups" not in status_lines(script, grouped_prompts={})
    order = start(script.orders(arrived(tokens=20_000)))
    assert (shown(*prompts), shown(*layers)) == ([0, 1, 0], [3, 4, 3])
    counts = request_counts(script.core.state).grouped
    assert counts == {3: 1}
    line = "prompts that groups of prefill workers compute: 1 by 3; now "
    line += "p0 layers 7 to 9, p1 layers 0 to 3, p2 layers 4 to 6"
    assert line in status_lines(script, grouped_prompts=counts)
    script(StageFinished(order_id=order.order_id, request_id="r1", worker_id="p1"))
    assert shown(*layers) == [3, 0, 3]
    script(prefilled(order.order_id, stages=3))
    assert (shown(*prompts), shown(*layers)) == ([0, 1, 0], [0, 0, 0])
    assert "compute: 1 by 3\n" in status_lines(script, grouped_prompts=counts, groups_broken=0)
    script(RequestCancelled(request_id="r1"))
    assert registry.get_sample_value("halfmoon_cluster_groups_broken_total") == 0, "its prompt was computed"
    restored = Core.restore(script.core.snapshot(), checked=True)
    assert restored.state.counters.grouped == {3: 1}


def test_older_logs_have_no_groups() -> None:
    script = cluster(most=1)
    assert start(script.orders(arrived(tokens=20_000))).stages == []
