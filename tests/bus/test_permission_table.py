"""Every role's credentials on every subject of docs/asyncapi.json, on JetStream's whole API and on what belongs to
others: taken or refused by a real server as `permission_table` says.

The server is configured as `halfmoon secrets` configures those of the containers, and as `halfmoon up` does its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfmoon.bus.config import BusConfig
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.cli.local.credentials import credentials_of, make_credentials
from halfmoon.schemas import subjects
from tests.bus.permission_table import HEARS, SAYS, Process
from tests.bus.refusals import Attacker
from tests.bus.server_cluster import ServerCluster

ASYNCAPI = json.loads((Path(__file__).parents[2] / "docs" / "asyncapi.json").read_text())
#: With credentials in `halfmoon secrets`; of each role but two there is another, whose subjects are tried too.
PROCESSES = [
    Process("conductor-0", "conductor"),
    Process("frontend-0", "frontend"),
    Process("prefill-0", "prefill", node="prefill-0"),
    Process("decode-0", "decode", node="decode-0"),
    Process("attention-0", "attention", node="attention-0"),
    Process("mixed-0", "mixed", node="mixed-0"),
    Process("store-prefill-0", "store", node="prefill-0"),
    Process("store-decode-0", "store", node="decode-0"),
    Process("vllm-0", "adapt", node="vllm-0"),
    Process("engine-0", "engine", node="engine-0"),
    Process("store-engine-0", "store", node="engine-0"),
    Process("operator", "operator"),
    Process("client", "client"),
    Process("tenant-acme", "tenant", tenant="acme"),
    Process("up", "supervisor"),
]
IDS = [
    *(
        f"{role}-{n}"
        for role in ("conductor", "frontend", "prefill", "decode", "attention", "mixed")
        for n in (0, 1)
    ),
    *(f"store-{role}-{n}" for role in ("prefill", "decode", "attention", "mixed") for n in (0, 1)),
    *(
        "vllm-0",
        "vllm-1",
        "engine-0",
        "engine-1",
        "store-engine-0",
        "operator",
        "client",
        "conductors",
        "up",
        "nobody",
    ),
]
#: Verbs of JetStream's API that speak of one stream, and of one consumer of a stream.
STREAM_VERBS = (
    *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.INFO"),
    *("STREAM.MSG.GET", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE"),
    *("STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "DIRECT.GET"),
    *("CONSUMER.CREATE", "CONSUMER.LIST", "CONSUMER.NAMES"),
)
CONSUMER_VERBS = (
    *("CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE", "CONSUMER.INFO", "CONSUMER.PAUSE"),
    *("CONSUMER.MSG.NEXT", "CONSUMER.LEADER.STEPDOWN", "CONSUMER.RESET", "CONSUMER.UNPIN", "DIRECT.GET"),
)
ELSEWHERE = (
    # A part too few or too many, or of other words than the document's.
    *("halfmoon.decisions.prefill-0.StartPrefill", "halfmoon.decisions.decode-0.StartDecode.x"),
    *("halfmoon.kv.decode-0.PrefillResult", "halfmoon.snapshots.1.x.head"),
    *("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.STREAM.TEMPLATE.CREATE.x"),
    *("$JS.API.SERVER.REMOVE", "$JS.API.META.LEADER.STEPDOWN", "$JS.API.ACCOUNT.PURGE.$G"),
    *("$JS.API.ACCOUNT.STREAM.MOVE.$G.EVENTS", "$JS.API.ACCOUNT.STREAM.CANCEL_MOVE.$G.EVENTS"),
    *("$JS.API.CONSUMER.CREATE.EVENTS.c.halfmoon.events.up.WorkerLeft", "$JS.SNAPSHOT.RESTORE.EVENTS.x"),
    *("$JS.ACK.EVENTS.c.1.1.1.1.0", "$JS.FC.EVENTS.c.x", "$JS.EVENT.ADVISORY.API", "$JS.EVENT.METRIC.x"),
    *("$JS.hub.API.STREAM.PURGE.EVENTS", "$JSC.R.x", "$NRG.V.EVENTS", "$GNR.x", "$LDS.x.y"),
    *("$KV.bucket.key", "$O.bucket.C.x", "$MQTT.sub.x", "$SRV.PING", "$SRV.INFO.halfmoon", "$SRV.STATS"),
    *("$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.PING.CONNZ", "$SYS.REQ.USER.INFO", "$SYS.REQ.CLAIMS.UPDATE"),
    *("$SYS.REQ.ACCOUNT.$G.CONNZ", "$SYS.REQ.SERVER.x.RELOAD", "$SYS.ACCOUNT.$G.CONNECT"),
    *("_INBOX.others.x", "_R_.x.y", "halfmoon.cancel", "halfmoon.other", "halfmoon", "other", "events"),
    *("_INBOX.acme.x", "_INBOX.globex.x", "_INBOX.acme", "halfmoon.v1.generate.acme.x", "halfmoon.v1.acme"),
    *(
        f"halfmoon.v1.{name}.{tenant}"
        for name in ("generate", "cancel", "other")
        for tenant in ("acme", "globex")
    ),
    *("halfmoon.v1", "halfmoon.v1.generate.x", "halfmoon.v1.other", "halfmoon.v2.generate"),
    *(f"halfmoon.inbox.{name}.x" for name in IDS),
)
#: Subscribed to: what would hear many at once.
WIDE = (
    *(">", "*", "*.>", "*.*", "*.*.*", "*.*.*.*", "halfmoon.>", "halfmoon.*", "halfmoon.*.>", "halfmoon.*.*"),
    *(
        "_INBOX.>",
        "_INBOX.*",
        "_INBOX.*.*",
        "$JS.>",
        "$JS.API.>",
        "$SYS.>",
        "$SRV.>",
        "$KV.>",
        "halfmoon.v1.>",
    ),
    *("halfmoon.v1.*.*", "halfmoon.v1.*.acme", "halfmoon.v1.generate.*", "_INBOX.acme.>", "_INBOX.globex.>"),
    *("halfmoon.v1.*", "halfmoon.inbox.>", "halfmoon.inbox.*.>", "halfmoon.events.*.*", "halfmoon.cancel.>"),
    *(f"halfmoon.{plane}.>" for plane in ("events", "decisions", "kv", "snapshots", "store", "status")),
    *(f"halfmoon.{plane}.*" for plane in ("give", "view", "explain", "status")),
    *(f"halfmoon.{plane}.*.>" for plane in ("events", "decisions", "kv", "store", "inbox")),
    *(
        f"halfmoon.{plane}.{name}.*"
        for plane in ("take", "tokens", "resend", "hold", "give")
        for name in ("*", *IDS)
    ),
    *(f"halfmoon.give.*.{name}" for name in IDS),
    *(f"halfmoon.{plane}.*.x" for plane in ("events", "decisions", "kv", "store", "inbox", "give", "take")),
    *(
        f"halfmoon.{plane}.{name}.>"
        for plane in ("events", "decisions", "kv", "store", "inbox")
        for name in IDS
    ),
    *(f"halfmoon.{plane}.{name}.*" for plane in ("events", "decisions", "kv", "store") for name in IDS),
    *(f"halfmoon.decisions.*.StartPrefill.{name}" for name in IDS),
)


def named_in_the_document() -> Iterator[str]:
    """Every subject of docs/asyncapi.json, for every process that a parameter may name."""
    for channel in ASYNCAPI["channels"].values():
        address = channel["address"] or ""
        kinds = list(channel.get("messages", {})) or ["x"]
        names = re.findall(r"\{(\w+)\}", address)
        values = [
            kinds if name == "type" else ["7"] if name in ("seq", "part", "digest") else IDS for name in names
        ]
        for chosen in itertools.product(*values):
            yield address.format(**dict(zip(names, chosen, strict=True)))


def jetstream() -> Iterator[str]:
    for stream in (*subjects.STREAMS, "OTHER", "*"):
        yield from (f"$JS.API.{verb}.{stream}" for verb in STREAM_VERBS)
        yield from (f"$JS.API.{verb}.{stream}.{of}" for verb in CONSUMER_VERBS for of in ("c", "c.x"))


LITERAL = sorted({each for each in (*named_in_the_document(), *jetstream(), *ELSEWHERE) if each})


Configured = Callable[[str], BusConfig]


@pytest.fixture(scope="module", params=["containers", pytest.param("up", marks=pytest.mark.slow)])
def credentials(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Configured]:
    """A server's, by the name of a process: as `halfmoon secrets` makes them, and as `halfmoon up` does."""
    place = tmp_path_factory.mktemp("server")
    if request.param == "containers":
        cluster = ServerCluster.start(place, ["127.0.0.1"])
        yield cluster.config
        cluster.stop()
        return
    many = argparse.Namespace(
        conductors=2,
        prefill=2,
        decode=2,
        attention=2,
        mixed=2,
        elastic="off",
        adapt_vllm=["a"],
        adapt_vllm_prefill=["b"],
        adapt_vllm_decode=["c"],
        adapt_sglang=["d"],
        adapt_sglang_prefill=[],
        adapt_sglang_decode=[],
    )
    server = EmbeddedServer.start(place / "nats", extra_config=make_credentials(many, place))
    yield lambda name: BusConfig(url=server.url, nkey_seed_file=str(credentials_of(place) / f"{name}.nk"))
    server.stop()


async def connected(credentials: Configured, process: Process) -> Attacker:
    config = credentials(process.name)
    if process.role == "supervisor" and config.tls_ca_file:
        pytest.skip("a cluster of containers has no supervisor of ours")
    if process.role == "tenant" and not config.tls_ca_file:
        pytest.skip("who starts a cluster on this machine is its one user")
    if process.node == "engine-0" and not config.tls_ca_file:
        pytest.skip("`halfmoon up` has no engines that use a store")
    return await Attacker.connect(config)


def differences(process: Process, table: str, tried: list[str], taken: set[str]) -> list[str]:
    allowed = {each for each in tried if process.may(table, each)}
    return [
        *(f"{process.name}: {each} is refused" for each in sorted(allowed - taken)),
        *(f"{process.name}: {each} is taken" for each in sorted(taken - allowed)),
    ]


@pytest.mark.realtime
@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
async def test_credentials_publish_what_the_table_says(credentials: Configured, process: Process) -> None:
    tried = [each for each in LITERAL if "*" not in each]
    attacker = await connected(credentials, process)
    try:
        found = differences(process, SAYS, tried, await attacker.may_publish(tried))
    finally:
        await attacker.close()
    assert found == []


@pytest.mark.realtime
@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
async def test_credentials_hear_what_the_table_says(credentials: Configured, process: Process) -> None:
    tried = [*LITERAL, *WIDE]
    attacker = await connected(credentials, process)
    try:
        found = differences(process, HEARS, tried, await attacker.may_hear(tried))
    finally:
        await attacker.close()
    assert found == []


def test_the_subjects_of_the_document_are_tried() -> None:
    """With those of the same role's other processes: what the table is for."""
    assert len(LITERAL) > 1000
    assert {
        "halfmoon.events.prefill-1.WorkerLeft",
        "halfmoon.decisions.decode-1.StartDecode",
        "halfmoon.decisions.prefill-0.StartPrefill.frontend-1",
        "halfmoon.store.decode-1.open_put",
        "halfmoon.snapshots.7.7.7",
        "$JS.API.STREAM.MSG.DELETE.EVENTS",
    } <= set(LITERAL)


def test_a_row_of_the_table_means_what_nats_means() -> None:
    me = Process("prefill-0", "prefill", node="prefill-0")
    table = (
        "halfmoon.take.*  prefill\nhalfmoon.kv.<me>.>  prefill\nhalfmoon.give.<me> decode\n$SRV.>  prefill"
    )
    heard = [
        "halfmoon.take.x",
        "halfmoon.take.*",
        "halfmoon.take.>",
        "halfmoon.kv.prefill-0.a.b",
        "halfmoon.kv.prefill-0.>",
    ]
    assert all(me.may(table, each) for each in [*heard, "$SRV.PING"])
    others = [
        "halfmoon.take",
        "halfmoon.take.x.y",
        "halfmoon.kv.*.>",
        "halfmoon.kv.prefill-0",
    ]
    assert not any(me.may(table, each) for each in [*others, "halfmoon.give.prefill-0", ">", "$SRV"])
