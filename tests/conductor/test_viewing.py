"""What a conductor tells the cluster's page: bounded whatever the load, from memory or out of the log."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from conductor_scripts import MS, S, decode, keys, prefill, store, stored, worker
from live_conductors import CLUSTER, POLICY, client, conductor, log_of, reach, say, status
from msgspec.structs import replace

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerError
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.step_output import explain_all, explain_none
from halfmoon.conductor.replay.explain import explained
from halfmoon.conductor.replay.histories import RequestHistories
from halfmoon.conductor.replay.logfile import EventLine
from halfmoon.conductor.view import recent_window, request_tracker, service
from halfmoon.conductor.view.service import ViewService
from halfmoon.conductor.view.status import node_statuses
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import encode
from halfmoon.schemas.events import (
    BlocksStored,
    ClusterConfigured,
    DecodeStarted,
    Event,
    FrontendJoined,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    Stamped,
    StoreHeartbeat,
    StoreSuspected,
    TimerFired,
    WorkerHeartbeat,
    WorkerLeft,
)
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.similar import SimilarReuse
from halfmoon.schemas.view import ClusterView, Explained, ExplainRequest, ViewRequest
from halfmoon.workers.frontend.intake import new_request_id
from tests.eventually import BOUND_S, eventually
from tests.nats_in_process import in_process


class Watched:
    """A core with its view, driven event by event; no bus."""

    def __init__(self, policy: Policy | None = None, *, checked: bool = True) -> None:
        self.core = Core(checked=checked)
        self.viewing = ViewService(None, self.core, conductor_id="c1")  # type: ignore[arg-type]
        self.at_ns = 1_000 * S
        cluster = [prefill(), prefill(1), store("p0"), store("p1"), decode(), store("d0")]
        self.see(ClusterConfigured(code_version="t", log_version=2, policy=policy or Policy()), *cluster)
        self.see(FrontendJoined(frontend_id="f1", incarnation="i1"))

    def see(self, *events: Event, after_ns: int = MS) -> list[Any]:
        for event in events:
            self.at_ns += after_ns
            stamped = Stamped(seq=self.core.seq + 1, at_ns=self.at_ns, event=event)
            self.viewing.before(stamped)
            decisions = self.core.step(stamped)
            self.viewing.after(stamped, decisions)
        return decisions

    def arrive(self, request_id: str, tokens: int = 1_000, **fields: Any) -> str:
        """Its order, or "" when it was refused."""
        event = RequestArrived(
            request_id=request_id,
            frontend_id="f1",
            prompt_tokens=tokens,
            max_tokens=10,
            block_keys=b"",
            **fields,
        )
        return next((getattr(each, "order_id", "") for each in self.see(event)), "")

    def serve(self, request_id: str, order_id: str) -> None:
        """All of its history, on the workers where it was attempt."""
        order = self.core.state.orders[order_id]
        about = {"order_id": order_id, "request_id": request_id}
        self.see(
            PrefillFinished(
                **about, worker_id=order.prefill_id, queue_ns=5 * MS, transfer_ns=0, compute_ns=100 * MS,
                cached_local_tokens=200, cached_fetched_tokens=100, fetch_node_id="n-d0", fetched_bytes=1_000,
                pushed_bytes=5_000, push_ns=MS,
            ),
            after_ns=120 * MS,
        )  # fmt: skip
        self.see(DecodeStarted(**about, worker_id="d0", wait_ns=MS))
        self.see(
            RequestFinished(
                **about, worker_id="d0", finish_reason="length", completion_tokens=10, ttft_ns=130 * MS, tbt_ns=20 * MS,
                decode_ns=180 * MS,
            ),
            after_ns=180 * MS,
        )  # fmt: skip

    def view(self, after_seq: int = 0) -> ClusterView:
        return self.viewing.view(ViewRequest(conductor_id="c1", after_seq=after_seq))


def test_what_a_worker_found_of_its_cpu_is_shown_and_nothing_where_it_did_not_say() -> None:
    watched = Watched()
    watched.see(decode(1, exact_numerics="not_held"), prefill(1, exact_numerics="held"))
    found = {node.id: node.exact_numerics for node in node_statuses(watched.core.state)}
    found = {name: said for name, said in found.items() if name in ("p0", "p1", "d0", "d1")}
    assert found == {"p0": "", "p1": "held", "d0": "", "d1": "not_held"}
    assert node_statuses(Core.restore(watched.core.snapshot()).state) == node_statuses(watched.core.state)


def test_a_request_at_a_mixed_worker_decodes_when_its_prompt_is_computed() -> None:
    cluster = Watched()
    cluster.view()
    gone = [WorkerLeft(worker_id=name) for name in ("p0", "p1", "d0")]
    cluster.see(*gone, worker("m0", "mixed", token_budget=200), store("m0"))
    order_id = cluster.arrive("r1")
    about = {"order_id": order_id, "request_id": "r1", "worker_id": "m0"}
    cluster.see(
        PrefillFinished(**about, queue_ns=0, transfer_ns=0, compute_ns=50 * MS, decodes=True),
        after_ns=60 * MS,
    )
    view = cluster.view()
    assert (view.requests[0].stage, view.stages["decode"]) == ("decode", 1)
    cluster.see(
        RequestFinished(
            **about, finish_reason="length", completion_tokens=10, ttft_ns=60 * MS, decode_ns=90 * MS
        ),
        after_ns=90 * MS,
    )
    (row,) = cluster.view().requests
    assert [name for name, _, _ in row.stretches][-1] == "decode"
    assert row.stretches[-1][2] - row.stretches[-1][1] == 90 * MS


def test_a_request_moves_through_its_stages() -> None:
    cluster = Watched()
    cluster.view()
    first = cluster.arrive("r1")
    second = [cluster.arrive(name) for name in ("r2", "r3")]
    assert cluster.view().stages == {
        "waiting": 0, "queued": 1, "transfer": 0, "prefill": 2, "handover": 0, "decode": 0
    }  # fmt: skip
    (row,) = cluster.view().requests  # 100 ms have not passed: the others are not followed
    assert (row.request_id, row.stage, row.prefill_id, row.decode_id) == ("r1", "prefill", "p0", "d0")
    worker_id = cluster.core.state.orders[first].prefill_id
    done = PrefillFinished(
        order_id=first,
        request_id="r1",
        worker_id=worker_id,
        queue_ns=0,
        transfer_ns=30 * MS,
        compute_ns=50 * MS,
    )
    cluster.see(done, after_ns=100 * MS)
    assert cluster.view().requests[0].stage == "handover"
    cluster.see(DecodeStarted(order_id=first, request_id="r1", worker_id="d0"))
    view = cluster.view()
    assert view.requests[0].stage == "decode"
    assert view.stages["decode"] == 1
    assert all(second)
    stretches = view.requests[0].stretches
    assert [name for name, _, _ in stretches] == ["prefill", "handover"]
    assert stretches[0][2] - stretches[0][1] == 50 * MS


def test_what_was_open_when_somebody_began_to_look_is_shown_too() -> None:
    cluster = Watched()
    orders = {name: cluster.arrive(name) for name in ("r1", "r2")}
    cluster.see(StoreSuspected(node_id="n-p0", reporter_id="n-d0", reason="some time passes"), after_ns=S)
    assert [(row.request_id, row.stage) for row in cluster.view().requests] == [
        ("r1", "prefill"),
        ("r2", "prefill"),
    ]
    cluster.serve("r1", orders["r1"])
    (stretches,) = (row.stretches for row in cluster.view().requests if row.request_id == "r1")
    assert [name for name, _, _ in stretches] == ["queued", "prefill", "handover", "decode"]
    assert all(one[2] == two[1] for one, two in pairwise(stretches))
    assert [(row.request_id, row.stage) for row in cluster.view().requests] == [
        ("r2", "prefill"),
        ("r1", "ended"),
    ]


def test_what_finished_is_held_against_the_slo_and_hits_are_told_by_source() -> None:
    cluster = Watched(Policy(tbt_slo_ns=200 * MS, ttft_slo_ns=10 * S))
    cluster.serve("r1", cluster.arrive("r1"))
    cluster.serve("r2", cluster.arrive("r2", tbt_slo_ns=15 * MS, tokens=500))
    view = cluster.view()  # nobody had looked before
    assert (view.ttft.finished, view.ttft.met, view.ttft.p99_us) == (2, 2, 130_000)
    assert (view.tbt.finished, view.tbt.met, view.tbt.p50_us) == (2, 1, 20_000)
    recent = view.recent
    assert (recent.arrived, recent.finished) == (2, 2)
    assert (recent.prompt_tokens, recent.cached_local_tokens, recent.cached_fetched_tokens) == (
        1_500,
        400,
        200,
    )
    assert sum(view.series.finished) == 2
    assert {(link.source, link.destination, link.moved_bytes) for link in view.links} == {
        ("n-d0", "n-p0", 1_000), ("n-p0", "n-d0", 5_000), ("n-d0", "n-p1", 1_000), ("n-p1", "n-d0", 5_000),
    }  # fmt: skip
    cluster.see(WorkerHeartbeat(worker_id="d0", incarnation="i1"), after_ns=70 * S)
    later = cluster.view()
    assert (later.recent.finished, later.ttft.finished, later.links) == (0, 0, [])
    assert later.counts.finished == 2


def test_what_stood_in_of_a_similar_prompt_is_told() -> None:
    cluster = Watched()
    order_id = cluster.arrive("r1")
    cluster.view()
    reuse = SimilarReuse(tokens=800, computed_tokens=300, resemblance=70)
    cluster.see(
        PrefillFinished(
            order_id=order_id,
            request_id="r1",
            worker_id=cluster.core.state.orders[order_id].prefill_id,
            queue_ns=0,
            transfer_ns=0,
            compute_ns=MS,
            prompt_tokens=1_000,
            similar=reuse,
        )
    )
    view = cluster.view()
    assert [request.similar_tokens for request in view.requests] == [800]
    assert (view.recent.similar_requests, view.recent.similar_tokens) == (1, 800)


def test_rejections_come_with_reason_and_prediction_and_losses_with_words() -> None:
    cluster = Watched()
    assert cluster.arrive("r1", ttft_slo_ns=1) == ""
    cluster.see(StoreSuspected(node_id="n-p0", reporter_id="n-d0", reason="no answer"))
    cluster.see(WorkerLeft(worker_id="p1", reason="it was killed"))
    view = cluster.view()
    assert view.recent.rejected == {"ttft_slo": 1}
    (refused,) = view.refused
    assert (refused.request_id, refused.reason) == ("r1", "ttft_slo")
    assert refused.ttft_ns > 100 * MS
    assert [(one.kind, one.words) for one in view.happened[-2:]] == [
        ("suspected", "store agent n-p0: no answer"),
        ("lost", "worker p1 left: it was killed"),
    ]
    assert {node.id: node.state for node in view.nodes if node.role == "store"}["n-p0"] == "suspected"


def test_a_worker_that_is_silent_is_told_as_lost_though_the_store_of_its_node_has_its_name_and_lives() -> (
    None
):
    cluster = Watched()
    cluster.see(worker("a0", "attention", node_id="a0"), replace(store("a0"), node_id="a0"))
    beat = StoreHeartbeat(node_id="a0", incarnation="i1")
    key = "lost:attention:a0:i1"
    while "a0" in cluster.core.state.workers:
        cluster.see(beat, after_ns=S)
        due_ns = cluster.core.state.timers[key]
        if cluster.at_ns >= due_ns:
            cluster.see(TimerFired(key=key, at_ns=due_ns))
    assert "a0" in cluster.core.state.stores
    told = [one.words for one in cluster.view().happened if one.kind == "lost"]
    assert told == ["attention a0 was not heard of any more"]


def test_tiers_are_counted_node_by_node() -> None:
    cluster = Watched()
    cluster.see(stored("p0", keys(3)), StoreHeartbeat(node_id="n-p0", incarnation="i1", slots_used=3))
    cluster.see(BlocksStored(node_id="n-p0", incarnation="i1", block_keys=keys(2), tier="ssd"))
    cluster.see(BlocksStored(node_id="n-d0", incarnation="i1", block_keys=keys(1), tier="ssd"))
    tiers = {(use.node_id, use.tier): (use.used, use.total) for use in cluster.view().tiers}
    assert tiers == {
        ("n-p0", "dram"): (3, 1_000), ("n-p1", "dram"): (0, 1_000), ("n-d0", "dram"): (0, 1_000),
        ("n-p0", "ssd"): (2, 0), ("n-d0", "ssd"): (1, 0),
    }  # fmt: skip


@pytest.mark.slow
def test_the_view_is_bounded_whatever_the_load() -> None:
    """Thousands of requests, in one second of the log and over minutes, of which some are open and many
    refused.
    """
    cluster = Watched(Policy(admission="none"), checked=False)
    cluster.view()
    for number in range(2_000):
        order_id = cluster.arrive(f"r{number}", tokens=300 + number % 7)
        if number % 2 and order_id:
            cluster.serve(f"r{number}", order_id)
        if number % 50 == 0:
            cluster.view()  # somebody looks all the while
    view = cluster.view()
    assert sum(view.stages.values()) == len(cluster.core.state.requests) > 500
    assert view.counts.rejected
    assert len(view.requests) == request_tracker.PLACES
    inside = cluster.viewing._tracker
    assert inside is not None
    assert len(inside.histories.of) <= request_tracker.HISTORIES_KEPT + 1
    assert len(inside.histories._orders) <= 2 * request_tracker.HISTORIES_KEPT
    assert len(cluster.viewing._held) == service.HELD_MAX
    assert len(view.events) <= service.TOLD_MAX
    seconds = cluster.viewing._recent._seconds
    assert len(seconds) == recent_window.SECONDS
    assert max(len(second.ttfts_ns) for second in seconds) <= recent_window.SAMPLES_MAX
    assert len(encode(view)) < 64 << 10


def test_a_rare_event_is_not_lost_among_many() -> None:
    cluster = Watched()
    cluster.view()
    since = cluster.core.seq
    cluster.see(StoreSuspected(node_id="n-p0", reporter_id="n-d0", reason="no answer"))
    cluster.see(*(WorkerHeartbeat(worker_id="d0", incarnation="i1") for _ in range(200)))
    view = cluster.view(since)
    assert "StoreSuspected" in [event.kind for event in view.events]
    assert len(view.events) + view.events_left_out == 201
    assert [event.seq for event in view.events] == sorted({event.seq for event in view.events})
    assert cluster.view(cluster.core.seq).events == []


def test_nothing_is_followed_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEASE_S", 0.0)
    cluster = Watched()
    cluster.arrive("r1")
    assert cluster.viewing._tracker is None
    cluster.view()
    assert cluster.viewing._tracker is not None
    cluster.arrive("r2")
    assert cluster.viewing._tracker is None
    assert cluster.core.explain_requests is explain_none
    assert not cluster.viewing._held


def test_a_fault_of_the_view_does_not_stop_a_conductor(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Watched()
    cluster.view()
    cluster.viewing._tracker.histories = None  # type: ignore[union-attr, assignment]
    assert cluster.arrive("r1")
    assert "the page's view of event" in caplog.text
    cluster.serve("r1", next(iter(cluster.core.state.orders)))
    assert cluster.view().recent.finished == 1


async def ask(bus: Bus, request_id: str, conductor_id: str = "c1") -> Explained:
    return await bus.request(
        subjects.explain(conductor_id), ExplainRequest(request_id=request_id), Explained, timeout_s=BOUND_S
    )


@pytest.mark.pure
@in_process
async def test_any_request_of_the_log_is_explained_as_replay_does(url: str) -> None:
    """Two conductors; nobody looks at the page; some noise before and behind."""
    ids = [new_request_id() for _ in range(4)]
    # However slow this machine is, no process is lost between what is told and what is replayed.
    patient = Policy(lost_after_ns=100 * S)
    async with conductor(url, policy=patient), conductor(url, "c2"), client(url) as bus:
        await say(bus, *CLUSTER)
        for number, request_id in enumerate(ids):
            slo = 1 if number == 3 else 0
            arrived = RequestArrived(
                request_id=request_id, frontend_id="f1", prompt_tokens=300 + number, max_tokens=5, block_keys=b"",
                ttft_slo_ns=slo,
            )  # fmt: skip
            seq = await say(bus, arrived)
        await reach(bus, seq)
        told = [await ask(bus, request_id, name) for request_id in ids for name in ("c1", "c2")]
        replayed = Core()
        histories = RequestHistories()
        replayed.explain_requests = explain_all
        for stamped in await log_of(bus):
            decisions = replayed.step(stamped)
            histories.see(
                EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=stamped.event), decisions, replayed
            )
        for one, request_id in zip(told[::2], ids, strict=True):
            assert one.request.request_id == request_id
            assert one.text == explained(histories.of[request_id])
            assert [row[1][0] for row in one.grounds[0].prefill] == ["p0"]
        assert [one.text for one in told[::2]] == [one.text for one in told[1::2]]
        assert told[0].grounds[0].prefill[0][0] == "won"
        assert told[-1].grounds[0].refused
        assert told[-1].request.ending == "rejected"
        for wrong, code in ((new_request_id(), "not_found"), ("r1", "not_found")):
            with pytest.raises(PeerError) as refused:
                await ask(bus, wrong)
            assert refused.value.code == code


@pytest.mark.pure
@in_process
async def test_a_conductor_answers_in_full_only_when_it_is_named(url: str) -> None:
    async with conductor(url, policy=POLICY), conductor(url, "c2"), client(url) as bus:
        await say(bus, *CLUSTER)
        found: list[ClusterView] = []
        inbox = bus.nc.new_inbox()
        await bus.subscribe(inbox, ClusterView, found.append)
        bus.nc.send(subjects.view(subjects.CONDUCTORS), encode(ViewRequest(conductor_id="c2")), reply=inbox)
        await eventually(lambda: len(found) == 2, "both answer")
        assert {view.conductor_id: view.full for view in found} == {"c1": False, "c2": True}
        assert (await status(bus)).conductor_id == "c1"
