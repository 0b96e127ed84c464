"""The bus against a real nats-server: order, identity, reconnects, errors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.errors import BusUnreachable, LogMoved, PeerError, PeerUnreachable, StreamRecreated
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import CancelOrder, Ordered
from halfmoon.schemas.events import FrontendHeartbeat, RequestCancelled, Stamped
from halfmoon.schemas.kv import KvReady
from halfmoon.schemas.tokens import ResendReply, ResendRequest
from halfmoon.workers.frontend.edges.nats_service import settled
from tests.bus.proxy import Proxy
from tests.eventually import BOUND_S, eventually
from tests.nats_in_process import in_process


def cancelled(number: int) -> RequestCancelled:
    return RequestCancelled(request_id=f"r{number}")


async def connect(url: str, name: str = "test") -> Bus:
    return await Bus.connect(BusConfig(url=url), name=name)


async def take(source: AsyncIterator[Stamped], count: int) -> list[Stamped]:
    taken: list[Stamped] = []
    async for stamped in source:
        taken.append(stamped)
        if len(taken) == count:
            break
    return taken


async def test_events_come_back_in_the_order_in_which_they_were_appended(nats_url: str) -> None:
    bus = await connect(nats_url)
    for number in range(2000):
        bus.append_soon(cancelled(number), source_id="f")
    last = await bus.append(cancelled(2000), source_id="f")
    assert last == 2001
    stamped = await asyncio.wait_for(take(bus.events(), 2001), BOUND_S)
    assert [s.event for s in stamped] == [cancelled(n) for n in range(2001)]
    assert [s.seq for s in stamped] == list(range(1, 2002))
    assert all(a.at_ns <= b.at_ns for a, b in itertools.pairwise(stamped))
    tail = await asyncio.wait_for(take(bus.events(after=1990), 11), BOUND_S)
    assert tail == stamped[1990:]
    await bus.close()


async def test_a_log_that_was_made_anew_is_not_read_on_as_if_it_were_the_old_one(nats_url: str) -> None:
    bus = await connect(nats_url)
    for number in range(5):
        await bus.append(cancelled(number), source_id="f")
    log = bus.events()
    assert len([await anext(log) for _ in range(5)]) == 5
    await bus.jetstream.ask(f"STREAM.DELETE.{subjects.EVENTS_STREAM}")
    again = await connect(nats_url)  # makes it
    await again.append(cancelled(9), source_id="f")
    with pytest.raises(StreamRecreated, match=r"EVENTS was made anew.*up to 5"):
        async with asyncio.timeout(BOUND_S):
            await anext(log)
    assert [s.event for s in await take(again.events(), 1)] == [cancelled(9)]
    await bus.close()
    await again.close()


async def test_a_message_id_is_stored_once(nats_url: str) -> None:
    bus = await connect(nats_url)
    first = await bus.append(cancelled(1), source_id="f", message_id="one")
    again = await bus.append(cancelled(1), source_id="f", message_id="one")
    assert (first, again, await bus.last_seq()) == (1, 1, 1)
    await bus.close()


async def test_a_conditional_append_succeeds_for_one_of_many(nats_url: str) -> None:
    buses = [await connect(nats_url, f"c{n}") for n in range(3)]
    answers = await asyncio.gather(
        *(bus.append(cancelled(n), source_id=f"c{n}", expected_last_seq=0) for n, bus in enumerate(buses)),
        return_exceptions=True,
    )
    assert sorted(type(a).__name__ for a in answers) == ["LogMoved", "LogMoved", "int"]
    with pytest.raises(LogMoved):
        await buses[0].append(cancelled(9), source_id="c0", expected_last_seq=7)
    for bus in buses:
        await bus.close()


async def test_the_log_survives_a_killed_server_without_loss_repeat_or_swap(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path / "nats")
    port = int(server.url.rsplit(":", 1)[1])
    bus = await connect(server.url)
    seen: list[Stamped] = []

    async def follow() -> None:
        async for stamped in bus.events():
            seen.append(stamped)

    follower = asyncio.create_task(follow())
    sent = 0
    for _round in range(3):
        for _ in range(300):
            bus.append_soon(cancelled(sent), source_id="f")
            sent += 1
        await eventually(lambda: bus.unacknowledged < 300, "the burst is being stored", every_s=0)
        server.process.kill()  # in the middle of the burst
        server.process.wait()
        for _ in range(50):
            bus.append_soon(cancelled(sent), source_id="f")
            sent += 1
        server = EmbeddedServer.start(tmp_path / "nats", port=port)
        assert await bus.flush(BOUND_S)
    await eventually(lambda: len(seen) >= sent, "all are read")
    assert [s.event for s in seen] == [cancelled(n) for n in range(sent)]
    follower.cancel()
    await bus.close()
    server.stop()


async def test_decisions_reach_their_target_once_though_two_conductors_give_them(nats_url: str) -> None:
    one, two, worker = (
        await connect(nats_url, "c1"),
        await connect(nats_url, "c2"),
        await connect(nats_url, "w"),
    )
    reader = await worker.open_decisions("w1")
    for seq in range(1, 101):
        order = Ordered(
            cause_seq=seq,
            position=0,
            decision=CancelOrder(order_id=f"{seq}-0", request_id="r", worker_id="w1"),
        )
        for bus in (one, two):
            bus.order_soon(order, target_id="w1")
            bus.order_soon(order, target_id="other")
    got: list[int] = []
    async with asyncio.timeout(BOUND_S):
        async for ordered in worker.follow_decisions(reader):
            got.append(ordered.cause_seq)
            if len(got) == 100:
                break
    assert got == list(range(1, 101))
    assert await one.flush(BOUND_S)  # heard sooner than stored
    assert await two.flush(BOUND_S)
    last = await one.last_decision()
    assert last is not None
    assert last.cause_seq == 100
    await two.nc.jetstream().publish(subjects.decision("w1", "CancelOrder"), b"no decision")
    assert await one.last_decision() == last
    for bus in (one, two, worker):
        await bus.close()


@pytest.mark.pure
@in_process
async def test_kv_messages_follow_their_worker(url: str) -> None:
    bus = await connect(url)
    ready = [KvReady(order_id="1-0", request_id="r", layer=n, first_block=0, blocks=1) for n in range(30)]
    source = bus.follow_kv(await bus.open_kv("d0"))
    for message in ready:
        await bus.publish(subjects.kv("d0", "KvReady", "n1"), message)
        await bus.publish(subjects.kv("d1", "KvReady", "n1"), message)
    got = [await anext(source) for _ in range(30)]
    assert got == [("n1", message) for message in ready]
    await bus.close()


@pytest.mark.pure
@in_process
async def test_kv_progress_of_another_kind_than_its_subject_says_is_dropped(url: str) -> None:
    """A store agent may tell of blocks, and of no first token."""
    bus = await connect(url)
    ready = KvReady(order_id="1-0", request_id="r", layer=0, first_block=0, blocks=1)
    source = bus.follow_kv(await bus.open_kv("d0"))
    for subject in (
        subjects.kv("d0", "PrefillResult", "n1"),
        "halfmoon.kv.d0.KvReady",
        "halfmoon.kv.d0.x.KvReady.n1",
    ):
        await bus.publish(subject, ready)
    await bus.publish(subjects.kv("d0", "KvReady", "n2"), ready)
    async with asyncio.timeout(BOUND_S):
        assert await anext(source) == ("n2", ready)
    assert bus.invalid == 3
    await bus.close()


async def test_what_was_not_yet_in_the_stream_after_a_reconnect_is_read_later(nats_url: str) -> None:
    proxy = Proxy(nats_url)
    worker, conductor = await connect(await proxy.start(), "w"), await connect(nats_url, "c")
    tail = await worker.open_kv("w1")
    answer, asked = tail._last_seq, 0

    async def late() -> int:
        """The first answer is as if the stream had stored nothing since the connection was cut."""
        nonlocal asked
        asked += 1
        last = await answer()
        return before if asked == 1 else last

    before = await answer()
    tail._last_seq = late  # type: ignore[method-assign]
    proxy.drop()
    await eventually(lambda: not worker.nc.is_connected, "the connection is lost")
    ready = KvReady(order_id="1-0", request_id="r", layer=3, first_block=0, blocks=1)
    await conductor.publish(subjects.kv("w1", "KvReady", "n1"), ready)
    await conductor.nc.flush()
    proxy.cut = False
    async with asyncio.timeout(BOUND_S):
        assert await anext(worker.follow_kv(tail)) == ("n1", ready)
    assert asked > 1
    await worker.close()
    await conductor.close()
    proxy.server.close()


@pytest.mark.pure
@in_process
async def test_requests_tell_a_missing_peer_from_a_refusing_one(url: str) -> None:
    asker, server = await connect(url, "a"), await connect(url, "b")
    question = ResendRequest(frontend_id="f", request_id="r", order_id="1-0", index=0)

    def answer(request: ResendRequest) -> ResendReply:
        if request.index:
            raise PeerError("no_such_index", "there is no such token")
        return ResendReply(known=False)

    await server.serve("halfmoon.resend.w", ResendRequest, answer)
    await settled(server.nc)
    assert await asker.request("halfmoon.resend.w", question, ResendReply, timeout_s=BOUND_S) == ResendReply(
        known=False
    )
    with pytest.raises(PeerError, match="no_such_index"):
        await asker.request(
            "halfmoon.resend.w",
            ResendRequest(frontend_id="f", request_id="r", order_id="1-0", index=1),
            ResendReply,
            timeout_s=BOUND_S,
        )
    with pytest.raises(PeerUnreachable, match="nobody"):
        await asker.request("halfmoon.resend.nobody", question, ResendReply, timeout_s=BOUND_S)
    reply = await asker.nc.request(
        "halfmoon.resend.w", b'{"type":"ResendRequest","frontend_id":"f","request_id":"r"}', timeout=BOUND_S
    )
    assert b"invalid_request" in reply.data
    assert b"order_id" in reply.data
    await asker.close()
    await server.close()


@pytest.mark.pure
@in_process
async def test_what_does_not_decode_is_dropped_and_counted(url: str) -> None:
    bus = await connect(url)
    js = bus.nc.jetstream()
    await js.publish(subjects.event("x", "Nonsense"), b"{")
    await bus.append(FrontendHeartbeat(frontend_id="f", incarnation="i"), source_id="f")
    stamped = await asyncio.wait_for(take(bus.events(), 1), BOUND_S)
    assert stamped[0].seq == 2
    assert bus.invalid == 1
    await bus.close()


@pytest.mark.pure
@in_process
async def test_an_event_heard_on_its_way_is_its_authors_word(url: str) -> None:
    """A store agent hears of others by such a subscription, before any reader of the log."""
    liar, listener = await connect(url, "liar"), await connect(url, "listener")
    heard: list[FrontendHeartbeat] = []
    await listener.subscribe(subjects.events_of_kind("FrontendHeartbeat"), FrontendHeartbeat, heard.append)
    await settled(listener.nc)
    subject = subjects.event("f1", "FrontendHeartbeat")
    for frontend_id in ("f2", "f1"):
        await liar.publish(subject, FrontendHeartbeat(frontend_id=frontend_id, incarnation="i"))
    await eventually(lambda: heard, "a heartbeat is heard")
    assert [beat.frontend_id for beat in heard] == ["f1"]
    assert listener.invalid == 1
    await liar.close()
    await listener.close()


async def test_an_unreachable_server_is_an_error_that_names_it() -> None:
    with pytest.raises(BusUnreachable, match=r"127\.0\.0\.1:1"):
        await Bus.connect(BusConfig(url="nats://127.0.0.1:1", connect_timeout_s=0.5), name="x")


async def test_wrong_credentials_are_refused_and_right_ones_taken(tmp_path: Path) -> None:
    server = EmbeddedServer.start(
        tmp_path / "nats2", extra_config="authorization { user: moon, password: light }"
    )
    with pytest.raises(BusUnreachable):
        await Bus.connect(BusConfig(url=server.url, connect_timeout_s=1), name="x")
    bus = await Bus.connect(BusConfig(url=server.url, user="moon", password="light"), name="x")
    assert await bus.append(cancelled(1), source_id="f") == 1
    await bus.close()
    server.stop()


async def test_decisions_survive_a_killed_server_without_loss_or_swap(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path / "nats")
    port = int(server.url.rsplit(":", 1)[1])
    conductor, worker = await connect(server.url, "c"), await connect(server.url, "w")
    tail = await worker.open_decisions("w1")
    got: list[int] = []

    async def follow() -> None:
        async for ordered in worker.follow_decisions(tail):
            got.append(ordered.cause_seq)

    follower = asyncio.create_task(follow())
    sent = 0
    for _round in range(3):
        for number in range(400):
            sent += 1
            order = CancelOrder(order_id=f"{sent}-0", request_id="r", worker_id="w1")
            conductor.order_soon(Ordered(cause_seq=sent, position=0, decision=order), target_id="w1")
            conductor.order_soon(Ordered(cause_seq=sent, position=1, decision=order), target_id="other")
            if number == 200:
                await eventually(lambda: conductor.unacknowledged < 402, "they are being stored", every_s=0)
                server.process.kill()
                server.process.wait()
                server = EmbeddedServer.start(tmp_path / "nats", port=port)
        assert await conductor.flush(BOUND_S)
    await eventually(lambda: len(got) >= sent, "all are heard")
    assert got == list(range(1, sent + 1))
    follower.cancel()
    await conductor.close()
    await worker.close()
    server.stop()


@pytest.mark.parametrize(
    "told_late", [pytest.param(False, id=""), pytest.param(True, id="told late", marks=pytest.mark.slow)]
)
async def test_what_a_cut_connection_missed_is_read_from_the_stream_in_order(
    nats_url: str, told_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where messages come by the new connection before the library tells of it."""
    if told_late:
        tell = Bus._after_reconnect
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(Bus, "_after_reconnect", lambda bus: loop.call_later(0.1, tell, bus))
    proxy = Proxy(nats_url)
    worker, conductor = await connect(await proxy.start(), "w"), await connect(nats_url, "c")
    tail = await worker.open_decisions("w1")
    kv = await worker.open_kv("w1")
    got: list[int] = []
    layers: list[int] = []

    async def follow() -> None:
        async for ordered in worker.follow_decisions(tail):
            got.append(ordered.cause_seq)

    async def follow_kv() -> None:
        async for _, message in worker.follow_kv(kv):
            assert isinstance(message, KvReady)
            layers.append(message.layer)

    followers = [asyncio.create_task(follow()), asyncio.create_task(follow_kv())]
    sent = 0
    for _round in range(3):
        for number in range(100):
            if number == 30:
                proxy.drop()
            if number == 70:
                proxy.cut = False
                await eventually(lambda: worker.nc.is_connected, "it is connected again")
            sent += 1
            order = CancelOrder(order_id=f"{sent}-0", request_id="r", worker_id="w1")
            await conductor.order(Ordered(cause_seq=sent, position=0, decision=order), target_id="w1")
            ready = KvReady(order_id="1-0", request_id="r", layer=sent, first_block=0, blocks=1)
            await conductor.publish(subjects.kv("w1", "KvReady", "n1"), ready)
    await eventually(lambda: len(got) >= sent and len(set(layers)) >= sent, "all are heard")
    assert got == list(range(1, sent + 1))
    assert set(layers) == set(range(1, sent + 1))
    for follower in followers:
        follower.cancel()
    await worker.close()
    await conductor.close()
    proxy.server.close()


@pytest.mark.pure
@in_process
async def test_only_the_stream_says_that_a_fact_is_stored(url: str) -> None:
    """Whoever learns the name of an inbox may have any answer sent there."""
    bus, other = await connect(url, "a"), await connect(url, "b")
    prefix, at = bus._publisher._prefix, bus._publisher._next
    forged = (b"{}", b'{"seq":7}', b'{"id":"x","cancelled":true}', b"[]", b"\xff", b'{"stream":5}')
    bus._publisher.submit("nobody.stores.this", b"x", message_id="m")
    for answer in forged:
        other.nc.send(f"{prefix}.{at}", answer)
        other.nc.send(f"{prefix}.nonsense", answer)
    await settled(other.nc)
    await settled(bus.nc)
    assert bus.unacknowledged == 1
    assert bus.nc.dropped == 0
    await bus.close(flush_s=0.1)
    await other.close()
