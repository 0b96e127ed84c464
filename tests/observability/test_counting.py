"""Counts of single parts, against what was done to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.edge.metrics_page import serve_metrics
from halfmoon.bus.telemetry.metrics import LATENCY_S, Times, histogram
from halfmoon.cli.main import main
from halfmoon.cli.metrics import Targets, address
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.live import shell
from halfmoon.conductor.live.metrics import ConductorMetrics
from halfmoon.schemas.events import (
    Endpoint,
    PrefillFinished,
    RequestFinished,
    StateDigested,
    StoreHeartbeat,
    StoreJoined,
    StoreSuspected,
)
from halfmoon.schemas.numbers import tbt_ns
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import WorkerRole
from halfmoon.store.errors import HolderUnreachable
from halfmoon.store.pool.segment import Geometry
from halfmoon.store.transports.base import Call, Peer, Slice, TransportKind
from halfmoon.store.transports.engine import TransferEngine
from halfmoon.workers.frontend.slo import ClusterSlo
from halfmoon.workers.worker_metrics import WorkerMetrics
from tests.eventually import eventually
from tests.observability.parts import SMALL, shown
from tests.ports import HeldPorts

MS = 1_000_000
EVERY = 100


class Shown:
    """A collector of one family, to see it as Prometheus does."""

    def __init__(self, family: object) -> None:
        self._family = family

    def collect(self) -> list[object]:
        return [self._family]


def test_a_histogram_puts_each_value_into_its_bucket() -> None:
    times = Times((0.001, 0.01, 1))
    for ns in (0, 1 * MS, 1 * MS + 1, 10 * MS, 11 * MS, 999 * MS, 5000 * MS):
        times.observe(ns)
    times.observe(2 * MS, 3)
    registry = CollectorRegistry()
    registry.register(Shown(histogram("x_seconds", "X.", ("way",), {("in",): times})))  # type: ignore[arg-type]
    assert shown(registry) == {
        "x_seconds_bucket{le=0.001,way=in}": 2,
        "x_seconds_bucket{le=0.01,way=in}": 7,
        "x_seconds_bucket{le=1.0,way=in}": 9,
        "x_seconds_bucket{le=+Inf,way=in}": 10,
        "x_seconds_count{way=in}": 10,
        "x_seconds_sum{way=in}": pytest.approx(6.028000001),
    }


# A prefill worker reports the end of a request of one token too, and a mixed worker that of its prompt.
@pytest.mark.pure
@pytest.mark.parametrize(
    ("role", "both"), [("prefill", True), ("prefill", False), ("mixed", True), ("decode", False)]
)
def test_an_order_is_counted_once_whoever_answers(role: WorkerRole, both: bool) -> None:
    class Worker:
        def orders_open(self) -> int:
            return 0

        def kv_blocks_used(self) -> int:
            return 0

    worker = Worker()
    worker.role = role  # type: ignore[attr-defined]
    metrics = WorkerMetrics(worker, node_id="n", model="m", kv_blocks=1)  # type: ignore[arg-type]
    of = {"order_id": "1-0", "request_id": "r", "worker_id": "w"}
    if both or role == "decode":
        metrics.saw(RequestFinished(finish_reason="length", completion_tokens=1, **of))
    if both or role == "prefill":
        metrics.saw(PrefillFinished(queue_ns=0, transfer_ns=0, compute_ns=0, **of))
    registry = CollectorRegistry()
    registry.register(metrics)
    assert shown(registry)["halfmoon_orders_total{result=finished}"] == 1


def test_a_request_holds_its_own_slo_or_else_the_clusters() -> None:
    slo = ClusterSlo()
    assert slo.judge(5, [1], ttft_slo_ns=0, tbt_slo_ns=0) == "", "nobody knows yet"
    slo.ttft_ns, slo.tbt_ns = 100, 10
    assert slo.judge(100, [10, 10], ttft_slo_ns=0, tbt_slo_ns=0) == "met"
    assert slo.judge(101, [99], ttft_slo_ns=0, tbt_slo_ns=0) == "ttft"
    assert slo.judge(100, [11], ttft_slo_ns=0, tbt_slo_ns=0) == "tbt"
    assert slo.judge(100, [11], ttft_slo_ns=0, tbt_slo_ns=11) == "met"
    assert slo.judge(60, [], ttft_slo_ns=50, tbt_slo_ns=0) == "ttft"
    assert slo.judge(60, [], ttft_slo_ns=0, tbt_slo_ns=0) == "met", "one token has no intervals"


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    assert tbt_ns([1] * 18 + [5, 7]) == 6
    assert tbt_ns([3]) == 3


class Failing:
    """A transport to one node works, to all others it does not."""

    kind = TransportKind("shm", rank=0, assumed_bytes_s=1e9)
    endpoints: Sequence[Endpoint] = ()

    def usable_endpoints(self, peer: Peer) -> list[Endpoint]:
        return list(peer.endpoints)

    async def read(self, peer: Peer, items: list[Slice], call: Call) -> None:
        if peer.node_id != "good":
            raise HolderUnreachable("no route")

    write = read

    def forget(self, node_id: str) -> None: ...

    async def close(self) -> None: ...


async def test_transfers_are_counted_by_transport_and_direction() -> None:
    geometry = Geometry(slots=8, layers=4, layer_block_bytes=1000)

    def peer(node_id: str) -> Peer:
        return Peer(node_id, "i", "h", "s", geometry, (Endpoint(transport="shm", address="s"),))

    engine = TransferEngine([Failing()], stripes=1, counters=Counter())
    call = Call("o", "p", 2**62)
    await engine.read(peer("good"), [Slice(0, 1, 0, 4), Slice(1, 2, 0, 3)], call)
    await engine.read(peer("good"), [Slice(0, 1, 0, 1)], call)
    with pytest.raises(HolderUnreachable):
        await engine.write(peer("bad"), [Slice(0, 1, 0, 4)], call)
    read, write = engine.stats["shm", "read"], engine.stats["shm", "write"]
    assert (read.bytes, read.descriptors, sum(read.times.counts), read.failures) == (8000, 3, 2, {})
    assert (write.bytes, write.descriptors, sum(write.times.counts)) == (0, 0, 0)
    assert write.failures == {"peer_unreachable": 1}


@pytest.mark.realtime
async def test_a_conductor_counts_what_it_steps_over_and_not_the_past(nats_url: str) -> None:
    bus = await Bus.connect(BusConfig(url=nats_url), name="c1")
    shells: list[shell.Shell] = []

    async def conduct() -> None:
        policy = Policy(
            digest_events=EVERY, heartbeat_ns=3600 * 1000 * MS, lost_after_ns=4 * 3600 * 1000 * MS
        )
        await shell.run(bus, conductor_id="c1", policy=policy, started=shells.append)

    task = asyncio.ensure_future(conduct())
    try:
        await eventually(lambda: shells and shells[0].caught_up.is_set(), "it has caught up")
        store = StoreJoined(node_id="n1", incarnation="i", host="h", layout=SMALL, slots=4, endpoints=[])
        await bus.append(store, source_id="n1")
        await bus.append(StoreSuspected(node_id="n1", reporter_id="n2", reason="x"), source_id="n2")
        for _ in range(EVERY):
            bus.append_soon(StoreHeartbeat(node_id="n1", incarnation="i"), source_id="n1")
        last = await other_digest(bus, shells[0])
        await eventually(lambda: shells[0].core.seq >= last, "all is read")
        metrics = ConductorMetrics(bus, shells[0].core, shells[0].tally)
        await metrics.refresh()
        registry = CollectorRegistry()
        registry.register(metrics)
        found = shown(registry)
        wanted = {
            "halfmoon_events_total{kind=StoreJoined}": 1,
            "halfmoon_events_total{kind=StoreSuspected}": 1,
            "halfmoon_events_total{kind=StoreHeartbeat}": EVERY,
            "halfmoon_events_total{kind=RequestArrived}": 0,
            "halfmoon_digest_mismatches_total{}": 1,
            "halfmoon_members{role=store,state=suspected}": 1,
            "halfmoon_members{role=store,state=ready}": 0,
            "halfmoon_store_suspected{node=n1}": 1,
            "halfmoon_log_position{}": shells[0].core.seq,
            "halfmoon_stream_messages{stream=EVENTS}": await bus.last_seq(),
        }
        assert {name: found[name] for name in wanted} == wanted
        assert found["halfmoon_step_seconds_count{}"] == sum(shells[0].tally.events.values()) > 0
        bytes_, most = (found[f"halfmoon_stream_bytes{end}{{stream=EVENTS}}"] for end in ("", "_max"))
        assert 0 < bytes_ < most
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        shells.clear()
        task = asyncio.ensure_future(conduct())
        await eventually(lambda: shells and shells[0].caught_up.is_set(), "it has caught up")
        assert shells[0].tally.events["StoreSuspected"] == 0
        assert shells[0].tally.digest_mismatches == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


async def other_digest(bus: Bus, shell: shell.Shell) -> int:
    """Another conductor says something else of a state that this one has said the digest of."""
    async for stamped in bus.events():
        event = stamped.event
        if isinstance(event, StateDigested) and event.conductor_id == "c1":
            other = StateDigested(
                conductor_id="c2",
                incarnation="j",
                code_version=event.code_version,
                at_seq=event.at_seq,
                digest="00",
            )
            return await bus.append(other, source_id="c2")
    raise AssertionError("the log ended")


@pytest.mark.realtime
async def test_metrics_are_served_until_the_end_and_a_taken_port_is_an_error() -> None:
    registry, asked = CollectorRegistry(), []

    async def refresh() -> None:
        asked.append(1)
        registry.register(Shown(histogram("x_seconds", "X.", (), {(): Times(LATENCY_S)})))  # type: ignore[arg-type]

    held = HeldPorts()
    port = held.first
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use"):
        await serve_metrics(registry, host="127.0.0.1", port=port)
    server = await serve_metrics(registry, host="127.0.0.1", port=port, refresh=refresh)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            (family,) = text_string_to_metric_families(await answer.text())
        assert (family.name, family.type, asked) == ("x_seconds", "histogram", [1])
        await server.stop()
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.realtime
def test_targets_are_one_port_after_another_and_a_taken_one_is_named(tmp_path: Path) -> None:
    held = HeldPorts(count=2)
    port = held.first
    with socket.create_server(("127.0.0.1", port + 1)):
        refusal = f"--metrics-port {port}: port {port + 1}: Address already in use"
        with pytest.raises(OptionInvalid, match=refusal):
            flags_of(Targets(port), 2)
    targets = Targets(port)
    assert flags_of(targets, 2) == [
        ["--metrics", f"127.0.0.1:{port}"],
        ["--metrics", f"127.0.0.1:{port + 1}"],
    ]
    targets.add("frontend", "127.0.0.1:8000")
    assert str(tmp_path / "t.json") in targets.write(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())[-1] == {
        "targets": ["127.0.0.1:8000"],
        "labels": {"job": "frontend"},
    }
    none = Targets(0)
    assert (flags_of(none, 1), none.write(tmp_path / "none.json")) == ([["--metrics", ""]], "")
    assert targets.flags("frontend") == ["--metrics", ""]
    assert not (tmp_path / "none.json").exists()


def flags_of(targets: Targets, count: int) -> list[list[str]]:
    return [targets.flags("store") for _ in range(count)]


@pytest.mark.parametrize("text", ["9464", "x:", "x:-1", "x:0", "x:70000", ":9464", "x:9464a"])
def test_a_wrong_address_is_named(text: str) -> None:
    with pytest.raises(OptionInvalid, match=r"--metrics: .* is not HOST:PORT"):
        address(text)
    assert (address("0.0.0.0:9464"), address("[::1]:1")) == (("0.0.0.0", 9464), ("::1", 1))


@pytest.mark.realtime
def test_a_process_whose_port_is_taken_ends_with_one_line(
    nats_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(sys, "argv", ["halfmoon"])
        with contextlib.suppress(SystemExit):
            main(["conductor", "--id", "c9", "--nats", nats_url, "--metrics", at])
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1] == f"halfmoon: --metrics {at}: Address already in use", said
