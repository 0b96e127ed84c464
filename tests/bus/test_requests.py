"""Requests and orders whose messages are lost with a connection: found again, and obeyed once. Real
nats-server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from halfmoon.bus import connection
from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerUnreachable
from halfmoon.bus.serving import ANSWERS_BYTES_MAX, ANSWERS_MAX, ReplyCache
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import CancelOrder, Ordered
from halfmoon.schemas.tokens import ResendReply, ResendRequest
from halfmoon.workers.frontend.edges.nats_service import settled
from tests.bus.proxy import Proxy
from tests.eventually import BOUND_S, eventually
from tests.nats_in_process import in_process

SUBJECT = "halfmoon.resend.w"


async def connected(url: str, name: str) -> Bus:
    return await Bus.connect(BusConfig(url=url), name=name)


class Pair:
    """One asks through a hop that can be cut, or the other serves through it."""

    def __init__(self, asker: Bus, server: Bus, proxy: Proxy) -> None:
        self.asker, self.server, self.proxy = asker, server, proxy
        self.asked: list[int] = []
        self.answered = 0
        self.go_on = asyncio.Event()

    async def serve(self) -> None:
        async def answer(request: ResendRequest) -> ResendReply:
            self.asked.append(request.index)
            await self.go_on.wait()
            self.answered += 1
            return ResendReply(known=bool(request.index % 2))

        await self.server.serve(SUBJECT, ResendRequest, answer)
        await settled(self.server.nc)

    def ask(self, index: int, timeout_s: float = BOUND_S) -> asyncio.Task[ResendReply]:
        question = ResendRequest(frontend_id="f", request_id="r", order_id="1-0", index=index)
        return asyncio.create_task(self.asker.request(SUBJECT, question, ResendReply, timeout_s=timeout_s))

    async def heard(self, count: int) -> None:
        await eventually(lambda: len(self.asked) >= count, "the questions are heard")

    async def cut(self) -> None:
        self.proxy.drop()
        ends = (self.asker.nc, self.server.nc)
        await eventually(lambda: not all(end.is_connected for end in ends), "the connection is lost")

    async def back(self) -> None:
        self.proxy.cut = False
        ends = (self.asker.nc, self.server.nc)
        await eventually(lambda: all(end.is_connected for end in ends), "both are connected")


@pytest.fixture(params=["asker", "server"])
async def pair(nats_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    proxy = Proxy(nats_url)
    through = await proxy.start()
    urls = {"asker": nats_url, "server": nats_url, request.param: through}
    asker = await connected(urls["asker"], "a")
    server = await connected(urls["server"], "s")
    yield Pair(asker, server, proxy)
    proxy.cut = False
    await asker.close()
    await server.close()
    proxy.server.close()


async def test_an_answer_that_is_lost_with_the_connection_comes_all_the_same(pair: Pair) -> None:
    await pair.serve()
    asking = [pair.ask(index) for index in range(4)]
    await pair.heard(4)
    await pair.cut()
    pair.go_on.set()
    await eventually(lambda: pair.answered == 4, "all are answered, to nobody")
    if pair.server.nc.is_connected:
        await settled(pair.server.nc)
    await pair.back()
    async with asyncio.timeout(BOUND_S):
        replies = await asyncio.gather(*asking)
    assert [reply.known for reply in replies] == [False, True, False, True]
    assert sorted(pair.asked) == [0, 1, 2, 3], "each was obeyed once"


async def test_a_question_that_takes_long_is_not_obeyed_again(pair: Pair, nats_url: str) -> None:
    repeats: list[ResendRequest] = []
    beside = await connected(nats_url, "b")
    await beside.subscribe(SUBJECT, ResendRequest, repeats.append)
    await settled(beside.nc)
    await pair.serve()
    asking = pair.ask(1)
    await eventually(lambda: len(repeats) == 3, "it is repeated twice")
    await settled(pair.server.nc)
    assert pair.asked == [1]
    assert not asking.done()
    pair.go_on.set()
    async with asyncio.timeout(BOUND_S):
        assert (await asking).known
    await beside.close()


async def test_asking_ends_in_time_all_the_same(pair: Pair) -> None:
    await pair.serve()
    with pytest.raises(PeerUnreachable, match=r"no answer on .* within 1\.5 s"):
        await pair.ask(1, timeout_s=1.5)
    await pair.heard(1)
    assert pair.asked == [1]


async def test_who_is_patient_waits_for_somebody_to_serve(nats_url: str) -> None:
    asker, server = await connected(nats_url, "a"), await connected(nats_url, "s")
    question = ResendRequest(frontend_id="f", request_id="r", order_id="1-0", index=1)
    with pytest.raises(PeerUnreachable, match="nobody serves"):
        await asker.request(SUBJECT, question, ResendReply, timeout_s=BOUND_S)
    asking = asyncio.create_task(
        asker.request(SUBJECT, question, ResendReply, timeout_s=BOUND_S, await_responder=True)
    )
    questions = asker._requests._waiting
    await eventually(
        lambda: any(not one.asked_at for one in questions.values()), "it hears that nobody is there"
    )
    assert not asking.done()
    await server.serve(SUBJECT, ResendRequest, lambda _: ResendReply(known=True))
    async with asyncio.timeout(BOUND_S):
        assert (await asking).known
    with pytest.raises(PeerUnreachable, match="no answer"):
        await asker.request(
            "halfmoon.resend.other", question, ResendReply, timeout_s=0.5, await_responder=True
        )
    await asker.close()
    await server.close()


@pytest.mark.pure
def test_what_was_answered_is_forgotten_at_some_time() -> None:
    repeats = ReplyCache()
    for number in range(ANSWERS_MAX + 10):
        assert repeats.begin(f"inbox.{number}")
        assert repeats.answer(f"inbox.{number}") is None
        assert not repeats.begin(f"inbox.{number}"), "under way"
        repeats.end(f"inbox.{number}", b"%d" % number)
    assert [repeats.answer(f"inbox.{number}") for number in (9, 10)] == [None, b"10"]
    repeats.end("large", b"x" * ANSWERS_BYTES_MAX)
    assert repeats.answer(f"inbox.{ANSWERS_MAX}") is None
    assert repeats.answer("large") is not None
    repeats.end("larger", b"x" * (ANSWERS_BYTES_MAX + 1))
    assert repeats.answer("larger") is None


@pytest.mark.pure
@in_process
async def test_a_decision_that_comes_after_a_newer_one_is_obeyed_and_copies_are_not(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is lost with a route between servers, and the next decision's is not; then another conductor's
    comes.
    """
    monkeypatch.setattr(connection, "SEEN_MAX", 4)
    conductor = await connected(url, "c")
    worker = await connected(url, "w")
    tail, copies = await worker.open_decisions("w1"), itertools.count()
    for seq in (1, 3, 2, 3, 1, 2, 4, 5, 6, 7, 1, 2, 3, 5, 8):
        order = CancelOrder(order_id=f"{seq}-0", request_id="r", worker_id="w1")
        for position in range(1 + (seq == 8)):
            conductor.publish_soon(
                subjects.decision("w1", "CancelOrder"),
                Ordered(cause_seq=seq, position=position, decision=order),
                message_id=f"copy{next(copies)}",
            )
    got: list[tuple[int, int]] = []
    async with asyncio.timeout(BOUND_S):
        async for ordered in worker.follow_decisions(tail):
            got.append((ordered.cause_seq, ordered.position))
            if got[-1] == (8, 1):
                break
    assert got == [(1, 0), (3, 0), (2, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (8, 1)]
    await conductor.close()
    await worker.close()
