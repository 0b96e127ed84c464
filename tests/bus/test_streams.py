"""Streams that are lost, emptied or take nothing, on a real server."""

from __future__ import annotations

import pytest
from nats.aio.msg import Msg

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import NotStored, StreamRefused
from halfmoon.bus.jetstream import StreamInfo
from halfmoon.bus.streams import LOG_GAP, StreamLimits
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import CancelOrder, Ordered
from halfmoon.schemas.events import RequestCancelled
from tests.eventually import BOUND_S, eventually

EVENT = RequestCancelled(request_id="r")
ORDER = CancelOrder(worker_id="w", order_id="o", request_id="r")


async def connect(url: str, name: str = "c1", *, replicas: int = 1) -> Bus:
    bus = await Bus.connect(BusConfig(url=url), name=name, limits=StreamLimits(replicas=replicas))
    bus.keep_streams()
    return bus


async def until_there(bus: Bus, *streams: str) -> None:
    async def there() -> bool:
        try:
            for stream in streams:
                await bus.jetstream.info(stream)
        except StreamRefused:
            return False
        return True

    await eventually(there, f"there are {streams}")


async def test_deleted_streams_are_made_anew_and_the_log_counts_on(nats_url: str) -> None:
    """Whoever remembers decisions of the old log would take those of one that begins at 1 for repeats."""
    bus = await connect(nats_url)
    for _ in range(3):
        await bus.append(EVENT, source_id="f")
    for stream in subjects.STREAMS:
        await bus.jetstream.ask(f"STREAM.DELETE.{stream}")
    assert await bus.append(EVENT, source_id="f", within_s=BOUND_S) >= LOG_GAP
    await until_there(bus, *subjects.STREAMS)
    await bus.close()


async def test_each_stream_is_looked_at_every_second_time_by_those_that_keep_them(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked costs the server as much as it costs us."""
    monkeypatch.setattr("halfmoon.bus.streams.KEEP_S", 0.05)
    asked: dict[str, list[str]] = {"keeps": [], "other": []}

    def counted(bus: Bus) -> None:
        info = bus._keeper._jetstream.info

        async def count(stream: str) -> StreamInfo:
            asked[bus.name].append(stream)
            return await info(stream)

        monkeypatch.setattr(bus._keeper._jetstream, "info", count)

    other = await Bus.connect(BusConfig(url=nats_url), name="other")
    counted(other)
    bus = await connect(nats_url, "keeps")
    counted(bus)
    found = asked["keeps"]
    await eventually(lambda: len(found) >= 8, "each is looked at twice")
    assert sorted(found[:4]) == sorted(found[4:8]) == sorted(subjects.STREAMS)
    assert not asked["other"]
    await bus.close()
    await other.close()


async def test_who_comes_new_knows_from_the_decisions_how_far_the_log_was(nats_url: str) -> None:
    first = await connect(nats_url)
    await first.order(Ordered(cause_seq=4711, position=0, decision=ORDER), target_id="w")
    await first.jetstream.ask(f"STREAM.DELETE.{subjects.EVENTS_STREAM}")
    await first.close()
    later = await connect(nats_url, "c2")
    assert await later.append(EVENT, source_id="f") == 4711 + LOG_GAP
    await later.close()


async def test_what_is_in_a_stream_is_neither_deleted_nor_purged(nats_url: str) -> None:
    bus = await connect(nats_url)
    await bus.append(EVENT, source_id="f")
    for verb, question in (("MSG.DELETE", {"seq": 1}), ("PURGE", {"seq": 2})):
        with pytest.raises(StreamRefused, match="not permitted"):
            await bus.jetstream.ask(f"STREAM.{verb}.{subjects.EVENTS_STREAM}", question)
    await bus.jetstream.ask(f"STREAM.PURGE.{subjects.SNAPSHOTS_STREAM}", {"filter": subjects.snapshot_of(1)})
    assert await bus.held(subjects.EVENTS_STREAM) == (1, 1)
    await bus.close()


@pytest.mark.parametrize("answered", [True, False], ids=["refused", "in silence"])
async def test_what_is_not_stored_is_told_and_stored_later(nats_url: str, answered: bool) -> None:
    """A server whose disk is full answers nothing at all; one without the stream that nobody listens."""
    bus = await connect(nats_url)

    async def deaf(_: Msg) -> None:
        return

    if not answered:
        await bus.nc.subscribe(subjects.EVENTS_ALL, cb=deaf)
    config = (await bus.jetstream.ask(f"STREAM.INFO.{subjects.EVENTS_STREAM}"))["config"]
    elsewhere = {**config, "subjects": ["halfmoon.nowhere"]}
    await bus.jetstream.ask(f"STREAM.UPDATE.{subjects.EVENTS_STREAM}", elsewhere)
    assert bus.unstored_s == 0
    with pytest.raises(NotStored, match=r"did not take RequestCancelled within 0\.6 s"):
        await bus.append(EVENT, source_id="f", within_s=0.6)
    assert bus.unstored_s >= 0.6
    await bus.jetstream.ask(f"STREAM.UPDATE.{subjects.EVENTS_STREAM}", config)
    assert await bus.flush(BOUND_S)
    assert bus.unstored_s == 0
    assert await bus.last_seq() == 1, "once"
    await bus.close()
