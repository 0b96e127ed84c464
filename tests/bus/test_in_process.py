"""The server within the process answers as the real one does, in whatever a frontend and its double ask of it."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from nats.errors import MaxPayloadError, NoRespondersError

from halfmoon.bus import snapshots
from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import LogMoved
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import FailRequest, Ordered
from halfmoon.schemas.events import RequestCancelled
from halfmoon.workers.frontend.edges.nats_service import settled
from tests import nats_in_process
from tests.eventually import BOUND_S, eventually
from tests.in_process import InProcessLoop


@pytest.mark.pure
def test_the_server_within_the_process() -> None:
    async def main() -> None:
        await nats_in_process.listen()
        await conversation(nats_in_process.URL)
        with pytest.raises(OSError, match="is taken"):
            await nats_in_process.listen()

    with asyncio.Runner(loop_factory=InProcessLoop) as runner:
        runner.run(main())


def test_the_real_server(nats_url: str) -> None:
    asyncio.run(conversation(nats_url))


async def conversation(url: str) -> None:
    one, other = [await Bus.connect(BusConfig(url=url), name=name) for name in ("one", "other")]
    try:
        for part in (
            subjects_are_heard,
            groups_take_turns,
            requests_are_answered,
            streams_are_kept,
            messages_are_asked_for_and_purged,
        ):
            await part(one, other)
    finally:
        for bus in (one, other):
            await bus.close()


async def subjects_are_heard(one: Bus, other: Bus) -> None:
    heard: dict[str, list[Any]] = {pattern: [] for pattern in ("a.b", "a.*", "a.>", "*.b", "b")}
    for pattern, messages in heard.items():

        async def note(message: Any, messages: list[Any] = messages) -> None:
            messages.append((message.subject, message.reply, message.data, dict(message.headers or {})))

        await other.nc.subscribe(pattern, cb=note)
    await settled(other.nc)
    await one.nc.publish("a", b"nobody")
    await one.nc.publish("a.b", b"1", headers={"h": "x"})
    await one.nc.publish("a.b.c", b"2", reply="a.c")
    await one.nc.publish("b", b"last")
    await eventually(lambda: heard["b"], "the last is heard, and all before it")
    first, second = ("a.b", "", b"1", {"h": "x"}), ("a.b.c", "a.c", b"2", {})
    assert heard == {
        "a.b": [first],
        "a.*": [first],
        "a.>": [first, second],
        "*.b": [first],
        "b": [("b", "", b"last", {})],
    }
    with pytest.raises(MaxPayloadError):
        await one.nc.publish("a", b"x" * (one.nc.max_payload + 1))


async def groups_take_turns(one: Bus, other: Bus) -> None:
    heard: list[tuple[str, bytes]] = []

    def noting(name: str) -> Any:
        async def note(message: Any) -> None:
            heard.append((name, message.data))

        return note

    members = [await other.nc.subscribe("g", queue="q", cb=noting(name)) for name in ("m1", "m2")]
    alone = await other.nc.subscribe("g", cb=noting("alone"))
    await alone.unsubscribe(limit=100)
    await settled(other.nc)
    for number in range(100):
        await one.nc.publish("g", b"%d" % number)
    await eventually(lambda: len(heard) == 200, "each was heard by who is alone and by one of the group")
    names = [name for name, _ in heard]
    assert names.count("alone") == 100
    assert {"m1", "m2"} < set(names)
    assert sorted(data for name, data in heard if name != "alone") == sorted(b"%d" % n for n in range(100))
    await members[0].unsubscribe()
    await settled(other.nc)
    heard.clear()
    for _ in range(20):
        await one.nc.publish("g", b"")
    await eventually(lambda: len(heard) == 20, "who is left hears them")
    assert {name for name, _ in heard} == {"m2"}


async def requests_are_answered(one: Bus, other: Bus) -> None:
    async def answer(message: Any) -> None:
        await other.nc.publish(message.reply, message.data + b"!")

    subscription = await other.nc.subscribe("asked", cb=answer)
    await settled(other.nc)
    assert (await one.nc.request("asked", b"so", timeout=BOUND_S)).data == b"so!"
    await subscription.unsubscribe()
    await settled(other.nc)
    with pytest.raises(NoRespondersError):
        await one.nc.request("asked", b"so", timeout=BOUND_S)


async def streams_are_kept(one: Bus, other: Bus) -> None:
    events = [RequestCancelled(request_id=f"r{number}") for number in range(4)]
    assert await one.last_seq() == 0
    assert await one.append(events[0], source_id="f", message_id="first") == 1
    assert await other.append(events[0], source_id="f", message_id="first") == 1, "a copy"
    with pytest.raises(LogMoved):
        await one.append(events[3], source_id="f", expected_last_seq=0)
    assert await one.append(events[1], source_id="f", expected_last_seq=1) == 2

    async def read(after: int) -> list[Any]:
        return [stamped async for stamped in other.events(after=after, last=4)]

    reading = [asyncio.create_task(read(after)) for after in (0, 1)]
    for number in (2, 3):
        assert await one.append(events[number], source_id="f") == number + 1
    whole, rest = await asyncio.wait_for(asyncio.gather(*reading), BOUND_S)
    assert [(stamped.seq, stamped.event) for stamped in whole] == list(enumerate(events, 1))
    assert rest == whole[1:]
    assert await other.last_seq() == 4
    tail = await other.open_decisions("f1")
    for number, target in enumerate(("f2", "f1")):
        decision = FailRequest(request_id="r", frontend_id=target, message="no")
        ordered = Ordered(cause_seq=1, position=number, decision=decision)
        assert await one.order(ordered, target_id=target) == number + 1
    async for ordered in other.follow_decisions(tail):
        assert ordered.decision == decision, "another's is not heard"
        break
    assert await other.last_seq(subjects.DECISIONS_STREAM) == 2
    stored = await one.last_decision()
    assert stored is not None
    assert stored.position == 1


async def messages_are_asked_for_and_purged(one: Bus, other: Bus) -> None:
    stream = subjects.SNAPSHOTS_STREAM
    for seq, name in ((1, "a"), (2, "a"), (2, "b")):
        await snapshots.save(one, seq, name.encode() * 3, version=1, code_version="7")
    found = await snapshots.heads(other)
    assert [head.seq for head in found] == [2, 2, 1]
    assert {await snapshots.read(other, head) for head in found} == {b"aaa", b"bbb"}
    assert await other.held(stream) == (1, 6)
    await snapshots.prune(one, 1)
    assert [head.seq for head in await snapshots.heads(other)] == [2, 2]
    assert await other.held(stream) == (3, 6)
    first = await other.jetstream.message(stream, seq=1, next_by_subj=subjects.SNAPSHOTS_ALL)
    assert first is not None
    assert (first.seq, first.payload) == (3, b"aaa")
    assert first.subject in {subjects.snapshot(2, head.digest, 0) for head in found}
    again = await other.jetstream.message(stream, seq=3)
    assert again == first
    assert await other.jetstream.message(stream, seq=1) is None
    assert datetime.fromisoformat(first.time).tzinfo is not None
