"""From the streams of a real nats-server to a file, live and stopped."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from conductor_scripts import MS, arrived, decode, finished, keys, prefill, prefilled, store, stored

from halfmoon.bus import snapshots
from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.conductor.code_version import LOG_VERSION, code_version
from halfmoon.conductor.core.machine import SNAPSHOT_VERSION
from halfmoon.conductor.live import shell
from halfmoon.conductor.replay.logfile import (
    DecisionLine,
    EventLine,
    InvalidLine,
    Line,
    LogFile,
    LogWriter,
    ProgressLine,
    SnapshotLine,
)
from halfmoon.conductor.replay.offline_log import NoLog, served
from halfmoon.conductor.replay.save import LogEmpty, follow, save
from halfmoon.conductor.replay.verify import Replay, verify
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import ClusterConfigured, FrontendJoined
from halfmoon.schemas.kv import KvReady, PrefillResult
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.sampling import SampledToken
from tests.bus.expiry import expire
from tests.eventually import eventually

pytestmark = pytest.mark.timeout(60)

FRONTEND = FrontendJoined(frontend_id="f1", incarnation="i1")
EVENTS = [prefill(), store("p0"), decode(), store("d0"), FRONTEND, arrived("r1", tokens=300)]
#: Not to be met in a time or a digest by chance.
FIRST_TOKEN = 4_711_471_147_114_711
ORDER = "7-1"
ANSWERS = [prefilled(ORDER), stored("p0", keys(3)), finished(ORDER)]
READY = KvReady(order_id=ORDER, request_id="r1", layer=1, first_block=0, blocks=3, moved_bytes=5)


async def connect(at: str | BusConfig) -> Bus:
    return await Bus.connect(BusConfig(url=at) if isinstance(at, str) else at, name="test")


async def holds(bus: Bus, stream: str, count: int) -> None:
    """Waits until the stream has `count` messages."""

    async def enough() -> bool:
        return await bus.last_seq(stream) >= count

    await eventually(enough, f"{stream} has {count} messages", every_s=0.01)


async def conducted(url: str) -> None:
    """A conductor decides on a request, whose workers answer; in between there is a message that is no event."""
    bus = await connect(url)
    conductor = asyncio.create_task(shell.run(bus, conductor_id="c1", policy=Policy(heartbeat_ns=100 * MS)))
    await holds(bus, subjects.EVENTS_STREAM, 1)
    for event in EVENTS:
        await bus.append(event, source_id="up")
    await holds(bus, subjects.DECISIONS_STREAM, 2)
    await bus.nc.jetstream().publish(
        subjects.event("x", "Nonsense"), b'{"type":"Nonsense","text":"a secret"}'
    )
    first = PrefillResult(
        order_id=ORDER,
        request_id="r1",
        first=SampledToken(token_id=FIRST_TOKEN),
        queue_ns=0,
        transfer_ns=0,
        compute_ns=1,
        cached_tokens=0,
        finished_at_ns=1,
    )
    for message in (READY, first):
        await bus.publish(subjects.kv("d0", type(message).__name__, "p0"), message)
    await holds(bus, subjects.KV_STREAM, 2)
    for event in ANSWERS:
        await bus.append(event, source_id="up")
    conductor.cancel()
    await asyncio.wait([conductor])
    await bus.close()


async def save_from(url: str | BusConfig, path: Path) -> tuple[int, int]:
    bus = await connect(url)
    try:
        return await save(bus, path, cluster="c")
    finally:
        await bus.close()


def events_in(lines: list[Line]) -> list[object]:
    return [line.event for line in lines if isinstance(line, EventLine)]


async def test_events_decisions_and_kv_progress_are_saved_in_the_order_of_the_log(
    nats_url: str, tmp_path: Path
) -> None:
    await conducted(nats_url)
    path = tmp_path / "log.jsonl"
    assert await save_from(nats_url, path) == (11, 2)
    log = LogFile(path)
    lines = list(log.lines())
    assert (log.header.cluster, log.header.first_seq, log.header.last_seq) == ("c", 1, 11)
    assert (log.header.log_version, log.header.code_version) == (LOG_VERSION, code_version())
    first, *rest = events_in(lines)
    assert isinstance(first, ClusterConfigured)
    assert rest == [*EVENTS, *ANSWERS]
    assert [type(line) for line in lines[6:]] == [
        EventLine,
        DecisionLine,
        DecisionLine,
        InvalidLine,
        ProgressLine,
        EventLine,
        EventLine,
        EventLine,
    ]
    decisions = [line for line in lines if isinstance(line, DecisionLine)]
    assert [(line.cause_seq, line.position, type(line.decision)) for line in decisions] == [
        (7, 0, StartPrefill),
        (7, 1, StartDecode),
    ]
    assert [line.progress for line in lines if isinstance(line, ProgressLine)] == [READY]
    assert str(FIRST_TOKEN).encode() not in path.read_bytes()
    assert b"secret" not in path.read_bytes()
    verdict = verify(log, checked=True)
    assert (verdict.identical, verdict.events, verdict.decisions) == (True, 11, 2)


async def test_a_stopped_server_is_started_on_its_streams_and_gives_the_same_file(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path / "nats")
    await conducted(server.url)
    await save_from(server.url, tmp_path / "live.jsonl")
    server.stop()
    configuration = (tmp_path / "nats" / "nats.conf").read_text()
    for directory in (tmp_path, tmp_path / "nats", tmp_path / "nats" / "jetstream"):
        with served(directory) as config:
            await save_from(config, tmp_path / "stopped.jsonl")
        live_lines = list(LogFile(tmp_path / "live.jsonl").lines())
        stopped = list(LogFile(tmp_path / "stopped.jsonl").lines())
        # KV progress is kept in memory.
        assert stopped == [line for line in live_lines if not isinstance(line, ProgressLine)]
    assert (tmp_path / "nats" / "nats.conf").read_text() == configuration


async def test_where_the_head_has_expired_a_snapshot_begins_the_file(nats_url: str, tmp_path: Path) -> None:
    await conducted(nats_url)
    await save_from(nats_url, tmp_path / "whole.jsonl")
    whole = LogFile(tmp_path / "whole.jsonl")
    bus = await connect(nats_url)
    # After event 5, and after event 7 with its two decisions, which are then of no use.
    for seq, left in ((5, (6, 2)), (7, (4, 0))):
        replay = Replay(whole, until=seq)
        assert list(replay)
        await snapshots.save(bus, seq, replay.core.snapshot(), version=SNAPSHOT_VERSION, code_version="t")
        await expire(bus, subjects.EVENTS_STREAM, before=seq)
        assert await save_from(nats_url, tmp_path / "rest.jsonl") == left
        rest = LogFile(tmp_path / "rest.jsonl")
        assert isinstance(next(rest.lines()), SnapshotLine)
        verdict = verify(rest)
        assert (verdict.identical, verdict.events, verdict.decisions, verdict.passed_over) == (True, *left, 0)
        assert verdict.state_digest == verify(whole).state_digest
    await bus.close()


async def test_decisions_that_have_expired_are_counted_and_no_others_may_be_missing(
    nats_url: str, tmp_path: Path
) -> None:
    await conducted(nats_url)
    bus = await connect(nats_url)
    await expire(bus, subjects.DECISIONS_STREAM, before=2)
    await bus.close()
    assert await save_from(nats_url, tmp_path / "log.jsonl") == (11, 1)
    log = LogFile(tmp_path / "log.jsonl")
    assert log.header.first_decision == (7, 1)
    verdict = verify(log)
    assert (verdict.identical, verdict.decisions, verdict.expired) == (True, 1, 1)
    with LogWriter(tmp_path / "less.jsonl", msgspec.structs.replace(log.header, first_decision=None)) as out:
        for line in log.lines():
            out.write(line)
    assert not verify(LogFile(tmp_path / "less.jsonl")).identical


@pytest.mark.pure
def test_a_directory_without_a_log_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(NoLog, match="there is no event log in it"), served(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


async def test_an_empty_log_is_said_to_be_empty(nats_url: str, tmp_path: Path) -> None:
    with pytest.raises(LogEmpty, match="the event log is empty"):
        await save_from(nats_url, tmp_path / "log.jsonl")
    assert os.listdir(tmp_path) == ["nats"]


async def test_a_tail_shows_what_is_new(nats_url: str) -> None:
    bus = await connect(nats_url)
    await bus.append(EVENTS[0], source_id="up")
    tail = follow(bus)
    first = asyncio.ensure_future(anext(tail))
    for stream in (subjects.EVENTS_STREAM, subjects.DECISIONS_STREAM):

        async def is_read(stream: str = stream) -> bool:
            return bool((await bus.jetstream.ask(f"STREAM.INFO.{stream}"))["state"]["consumer_count"])

        await eventually(is_read, f"{stream} has a reader")
    await bus.append(EVENTS[1], source_id="up")
    await eventually(first.done, "a line is shown")
    line = first.result()
    assert isinstance(line, EventLine)
    assert (line.seq, line.event) == (2, EVENTS[1])
    await tail.aclose()
    await bus.close()
