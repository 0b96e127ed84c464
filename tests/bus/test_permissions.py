"""Three real nats-servers with the credentials of `halfmoon secrets`: who gets a connection, what is believed of whom,
and a server that ends. Which subjects each may use is in `test_permission_table.py`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import os
import secrets
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import nkeys
import orjson
import pytest

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusUnreachable
from halfmoon.bus.permissions import RIGHTS, cluster_identities
from halfmoon.bus.streams import StreamLimits
from halfmoon.bus.tasks import end_tasks
from halfmoon.conductor.live import shell
from halfmoon.schemas import subjects
from halfmoon.schemas.contract.rights import (
    ASKED_BY_OPERATORS,
    ASKED_BY_PAIR,
    ASKED_BY_PROGRAMS,
    ASKED_BY_STORES,
)
from halfmoon.schemas.events import (
    EVENT_TYPES,
    PrefillFailed,
    RequestArrived,
    RequestCancelled,
    StoreLeft,
    TimerFired,
    WorkerLeft,
)
from halfmoon.schemas.policy import Policy
from halfmoon.store.agent.serving.serve import VERBS
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.intake import new_request_id
from halfmoon.workers.frontend.log_health import LogHealth
from halfmoon.workers.frontend.page.feed import PageFeed
from tests.bus.proxy import Proxy
from tests.bus.server_cluster import NAMES, ServerCluster
from tests.eventually import BOUND_S, within

EVENTS = 300
#: Of them, on their way when a server is told to end.
UNDER_WAY = 20


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerCluster]:
    cluster = ServerCluster.start(tmp_path_factory.mktemp("servers"))
    yield cluster
    cluster.stop()


@pytest.fixture
async def conductor(servers: ServerCluster) -> AsyncIterator[Bus]:
    """Makes the streams."""
    bus = await servers.connect("conductor-0")
    yield bus
    await bus.close()


@pytest.mark.pure
def test_every_event_and_every_call_of_a_store_is_somebodys() -> None:
    """A message that is added must be allowed to somebody."""
    said = {kind for rights in RIGHTS.values() for kind in rights.events}
    assert said == {kind.__name__ for kind in EVENT_TYPES}
    assert set(VERBS) == {
        *ASKED_BY_PAIR,
        *ASKED_BY_STORES,
        *ASKED_BY_PROGRAMS,
        *ASKED_BY_OPERATORS,
    }


@pytest.mark.pure
def test_what_a_store_asks_of_others_it_may_ask() -> None:
    asked = set()
    for path in (Path(__file__).parents[2] / "store" / "agent").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("peers.ask", "self.ask")):
                asked |= {word.value for word in call.args if isinstance(word, ast.Constant)}
    assert {"hello", "lease", "replicate"} < asked <= set(ASKED_BY_STORES)


async def test_a_payload_that_speaks_for_another_is_dropped(servers: ServerCluster, conductor: Bus) -> None:
    """NATS lets it through: its subject is the sender's own."""
    worker = await servers.connect("prefill-0")
    start = await conductor.last_seq()
    lies = [
        ("WorkerLeft", WorkerLeft(worker_id="decode-0", reason="a lie")),
        ("WorkerLeft", StoreLeft(node_id="prefill-0", incarnation="i", reason="of another role")),
        ("WorkerLeft", TimerFired(key="k", at_ns=1)),
        ("PrefillFailed", PrefillFailed(order_id="o", request_id="r", worker_id="prefill-1", reason="a lie")),
    ]
    for kind, event in lies:
        worker.publish_soon(
            subjects.event("prefill-0", kind), event, message_id=f"lie-{kind}-{type(event).__name__}"
        )
    truth = WorkerLeft(worker_id="prefill-0", reason="the truth")
    last = await worker.append(truth, source_id="prefill-0")
    assert last == start + len(lies) + 1, "all are in the stream"
    async with asyncio.timeout(BOUND_S):
        async for stamped in conductor.events(after=start):
            assert (stamped.seq, stamped.event) == (last, truth)
            break
    assert conductor.invalid == len(lies)
    await worker.close()


async def test_who_has_no_credentials_gets_no_connection(servers: ServerCluster, tmp_path: Path) -> None:
    config = replace(servers.config("prefill-0"), connect_timeout_s=BOUND_S)
    unknown = tmp_path / "unknown.nk"
    unknown.write_bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))
    for wrong in (
        replace(config, nkey_seed_file=str(unknown)),
        replace(config, nkey_seed_file=""),
        replace(config, nkey_seed_file="", user="operator", password="operator"),
    ):
        with pytest.raises(BusUnreachable, match="Authorization Violation"):
            await Bus.connect(wrong, name="prefill-0")
    with pytest.raises(BusUnreachable, match="certificate verify failed"):
        await Bus.connect(
            replace(config, tls_ca_file=ssl.get_default_verify_paths().openssl_cafile), name="prefill-0"
        )


async def test_three_copies_of_every_stream(servers: ServerCluster, conductor: Bus) -> None:
    for stream in subjects.STREAMS:
        answer = await conductor.jetstream.ask(f"STREAM.INFO.{stream}")
        assert answer["config"]["num_replicas"] == 3, stream
        assert {
            answer["cluster"]["leader"],
            *(each["name"] for each in answer["cluster"]["replicas"]),
        } == set(NAMES)


@pytest.mark.slow
async def test_a_server_ends_and_no_event_is_lost_or_stored_twice(
    servers: ServerCluster, conductor: Bus
) -> None:
    """The one that leads the log, while events are appended and read. Those under way when it ends may be swapped with
    later ones (`bus/publisher.py` says why); those before and after have their order.
    """
    frontend = await servers.connect("frontend-0")
    start = await conductor.last_seq()
    leader = await servers.leader(conductor, subjects.EVENTS_STREAM)
    ends_at = EVENTS // 3

    async def say(numbers: range) -> None:
        for number in numbers:
            if number == ends_at:
                assert await frontend.flush(BOUND_S)
            frontend.append_soon(RequestCancelled(request_id=f"r{number}"), source_id="frontend-0")
            await asyncio.sleep(0)
            if number == ends_at + UNDER_WAY:
                servers.processes[leader].terminate()

    async def hear(count: int) -> list[str]:
        heard: list[str] = []
        async for stamped in conductor.events(after=start):
            assert isinstance(stamped.event, RequestCancelled)
            heard.append(stamped.event.request_id)
            if len(heard) == count:
                break
        return heard

    try:
        async with asyncio.timeout(BOUND_S):
            _, heard = await asyncio.gather(say(range(EVENTS)), hear(EVENTS))
        everything = [f"r{number}" for number in range(EVENTS)]
        assert sorted(heard) == sorted(everything)
        assert heard[:ends_at] == everything[:ends_at]
        assert await servers.leader(conductor, subjects.EVENTS_STREAM) != leader
        async with asyncio.timeout(BOUND_S):
            await say(range(EVENTS, EVENTS + 50))
            later = await hear(EVENTS + 50)
        assert later == [*heard, *(f"r{number}" for number in range(EVENTS, EVENTS + 50))]
    finally:
        await frontend.close()
        servers.processes[leader].wait()
        servers.launch(leader)
        servers.wait()


async def test_what_three_conductors_say_at_once_is_stored_once(
    servers: ServerCluster, conductor: Bus
) -> None:
    """Three copies of a message that is just being stored are no error of anybody."""
    buses = [conductor, await servers.connect("conductor-1"), await servers.connect("conductor-2")]
    start = await conductor.last_seq()

    async def fire(number: int) -> list[int]:
        return [
            await buses[number].append(
                TimerFired(key=f"k{n}", at_ns=1), source_id=f"conductor-{number}", message_id=f"once-{n}"
            )
            for n in range(100)
        ]

    async with asyncio.timeout(BOUND_S):
        told = await asyncio.gather(*(fire(number) for number in range(3)))
    assert told == [list(range(start + 1, start + 101))] * 3
    for bus in buses[1:]:
        await bus.close()


async def test_a_frontend_is_told_what_its_page_shows(servers: ServerCluster, conductor: Bus) -> None:
    """By a conductor: the view, and a request looked up in the log."""
    frontend = await servers.connect("frontend-0")
    config = FrontendConfig(frontend_id="frontend-0", model="m")
    feed = PageFeed(frontend, config, LogHealth(frontend, config))
    task = asyncio.create_task(shell.run(conductor, conductor_id="conductor-0", policy=Policy()))
    request_id = new_request_id()
    arrived = RequestArrived(
        request_id=request_id, frontend_id="frontend-0", prompt_tokens=3, max_tokens=1, block_keys=b""
    )
    try:
        async with asyncio.timeout(BOUND_S), contextlib.aclosing(feed.watch()) as views:
            async for view in views:
                if b'"state":"live"' in view:
                    break  # what comes before the policy is in the log counts for nothing
            await frontend.append(arrived, source_id="frontend-0")
            async for view in views:
                if b'"no_worker":' in view:
                    break
        told = orjson.loads(await feed.explain(request_id))
        assert told["request"]["request_id"] == request_id
        assert told["request"]["ending"] == "rejected"
    finally:
        await feed.close()
        await end_tasks([task])
        await frontend.close()


@pytest.mark.slow
async def test_who_is_cut_off_from_a_server_goes_to_another(
    servers: ServerCluster, conductor: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes from it, not even an end of the connection; over TLS its leave-taking is not waited for."""
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", 10 * BOUND_S)
    proxy = Proxy(f"tls://{NAMES[0]}:{servers.ports[NAMES[0]][0]}")
    config = dataclasses.replace(
        servers.config("prefill-0"), url=(await proxy.start()).replace("nats:", "tls:")
    )
    worker = await Bus.connect(config, name="prefill-0", limits=StreamLimits(replicas=0))
    assert len(worker.nc.servers) == 1 + len(NAMES), "it was told of the others"
    proxy.silent = proxy.cut = True
    left = WorkerLeft(worker_id="prefill-0", incarnation="i1")
    await within(worker.append(left, source_id="prefill-0"), "it is stored by way of another")
    assert worker.nc.connected_url is not None
    assert worker.nc.connected_url.port != int(config.url.rpartition(":")[2])
    await worker.close()
    proxy.drop()
    proxy.server.close()


async def test_the_operator_saves_the_log(servers: ServerCluster, conductor: Bus, tmp_path: Path) -> None:
    await conductor.append(TimerFired(key="k", at_ns=1), source_id="conductor-0")
    config = servers.config("operator")
    environment = {
        **os.environ,
        "HALFMOON_NATS": servers.url,
        "HALFMOON_NATS_CA": config.tls_ca_file,
        "HALFMOON_NATS_NKEY_FILE": config.nkey_seed_file,
        "HALFMOON_NATS_REPLICAS": "0",
    }
    file = tmp_path / "run.jsonl"
    words = [sys.executable, "-m", "halfmoon.cli.main", "events", "save", str(file), "--json"]
    done = await asyncio.to_thread(
        subprocess.run, words, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["events"] >= 1
    assert '"TimerFired"' in file.read_text()


@pytest.mark.pure
def test_a_worker_that_may_change_its_role_may_what_both_may() -> None:
    """Under its own name and beside its own node, as ever; attention workers keep their role."""
    workers = {"prefill": 1, "decode": 1, "attention": 1}
    plain, elastic = (
        {
            each.name: each
            for each in cluster_identities(conductors=1, frontends=1, workers=workers, elastic=may)
        }
        for may in (False, True)
    )
    changed = {name for name in plain if plain[name].publish != elastic[name].publish}
    assert changed == {"prefill-0", "decode-0"}
    prefill = elastic["prefill-0"]
    assert {*plain["prefill-0"].publish, "halfmoon.events.prefill-0.RequestFinished"} <= {*prefill.publish}
    assert {*plain["prefill-0"].subscribe, "halfmoon.resend.prefill-0.*"} <= {*prefill.subscribe}
    as_decode = replace(plain["prefill-0"], role="decode")
    assert {*prefill.publish} == {*plain["prefill-0"].publish, *as_decode.publish}
    assert {*prefill.subscribe} == {*plain["prefill-0"].subscribe, *as_decode.subscribe}
    assert not any("decode-0" in subject for subject in prefill.publish + prefill.subscribe)
