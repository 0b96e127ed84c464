"""`halfmoon bench --sessions`: turns that wait for answers, against a target within the process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import orjson
import pytest

from benchmarks.workloads import KINDS, rows
from halfmoon.cli.bench.clients import Model, Record, Target
from halfmoon.cli.bench.driver import Driver, Limits
from halfmoon.cli.bench.workload import Planned, Texts, traced
from halfmoon.conductor.simulation.trace import Arrival, first_sessions, parse
from halfmoon.schemas.numbers import MS_NS

LONG = 10**9


class Held(Target):
    """Answers when the test says so."""

    where = "here"

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._answers: dict[int, asyncio.Event] = {}
        self._more = asyncio.Event()

    async def open(self) -> Model:
        raise NotImplementedError

    async def close(self) -> None:
        pass

    async def ask(self, record: Record, body: dict[str, Any]) -> None:
        number = record.planned.number
        self.asked.append(number)
        self._more.set()
        await self._answers.setdefault(number, asyncio.Event()).wait()
        record.end("finished")

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self._answers.setdefault(number, asyncio.Event()).set()

    async def has(self, count: int) -> list[int]:
        while len(self.asked) < count:
            self._more.clear()
            await self._more.wait()
        return self.asked


def turn(number: int, at_ns: int = 0, *, follows: int = -1, think_ns: int = 0) -> Planned:
    return Planned(
        number=number, at_ns=at_ns, parts=((b"x", 3),), max_tokens=1, follows=follows, think_ns=think_ns
    )


def driver_of(target: Target, plan: Iterable[Planned], **limits: Any) -> Driver:
    return Driver(target, Texts(1_000, 1), iter(plan), Limits(sessions=True, **limits))


async def test_a_turn_is_sent_after_the_answer_before_it() -> None:
    target = Held()
    # The third one's own time comes last; nobody who waits for an answer waits for it.
    driver = driver_of(
        target, [turn(0), turn(1), turn(2, LONG * 3_600), turn(3, 1, follows=0), turn(4, 1, follows=3)]
    )
    running = asyncio.create_task(driver.run())
    assert set(await target.has(2)) == {0, 1}
    target.answer(0)
    assert (await target.has(3))[2:] == [3]
    target.answer(3)
    assert (await target.has(4))[3:] == [4]
    assert [record.planned.number for record in driver.records] == [0, 1, 3, 4]
    assert driver.records[2].due_ns == driver.records[0].ended_ns
    driver.stopped.set()
    assert not await running


async def test_the_pause_is_counted_from_the_answer() -> None:
    target = Held()
    driver = driver_of(target, [turn(0), turn(1, follows=0, think_ns=1_000_000)])
    target.answer(0, 1)
    assert await driver.run()
    first, second = driver.records
    assert second.due_ns == first.ended_ns + 1_000_000


async def test_what_is_not_counted_any_more_is_not_sent() -> None:
    target = Held()
    target.answer(*range(9))
    driver = driver_of(
        target, [turn(0), *(turn(n, follows=n - 1) for n in range(1, 9))], requests=3, warmup=1
    )
    assert await driver.run()
    assert target.asked == [0, 1, 2, 3]
    assert len(driver.counted) == 3


async def test_who_waited_for_a_place_while_the_last_one_was_sent_is_not_sent() -> None:
    target = Held()
    # One place and two to be sent: when the first answer comes, two followers wait for the same place.
    plan = [turn(0), turn(1, follows=0), turn(2, follows=0)]
    driver = driver_of(target, plan, requests=2, concurrency=1)
    target.answer(0, 1, 2)
    assert await driver.run()
    assert len(target.asked) == len(driver.records) == 2


async def test_followers_wait_for_a_place_too() -> None:
    target = Held()
    driver = driver_of(target, [turn(0), turn(1), turn(2, follows=0)], concurrency=1)
    running = asyncio.create_task(driver.run())
    assert await target.has(1) == [0]
    target.answer(0)
    # One place: whoever of the two gets it, the other comes after its answer.
    (_, second) = await target.has(2)
    target.answer(second)
    await target.has(3)
    target.answer(1, 2)
    assert await running
    assert sorted(target.asked) == [0, 1, 2]


def sessions() -> list[Arrival]:
    """Three: of three turns, of one, and of two."""
    places = ((0, -1), (1, -1), (2, 0), (3, -1), (4, 2), (5, 3))
    return [
        Arrival(at_ns=at, prompt_tokens=600 + at, output_tokens=2, follows=follows, think_ns=at)
        for at, follows in places
    ]


@pytest.mark.parametrize(
    ("count", "turns", "times", "follows"),
    [
        (1, 0, [0, 2, 4], [-1, 0, 1]),
        (2, 2, [0, 1, 2], [-1, -1, 0]),
        (3, 1, [0, 1, 3], [-1, -1, -1]),
        (9, 0, [0, 1, 2, 3, 4, 5], [-1, -1, 0, -1, 2, 3]),
    ],
)
def test_the_first_sessions_of_a_trace(count: int, turns: int, times: list[int], follows: list[int]) -> None:
    found = first_sessions(sessions(), count, turns)
    assert [one.at_ns for one in found] == times
    assert [one.follows for one in found] == follows


def test_a_plan_waits_where_it_is_asked_to() -> None:
    arrivals = first_sessions(sessions(), 1)
    closed = list(traced(arrivals, scale=2, speed=2.0, context=8_192, closed_loop=True))
    assert [(one.number, one.follows, one.think_ns) for one in closed] == [(0, -1, 0), (1, 0, 1), (2, 1, 2)]
    assert [one.follows for one in traced(arrivals, scale=2, speed=1.0, context=8_192)] == [-1, -1, -1]


def test_drawn_sessions_are_the_same_when_written_and_read() -> None:
    made = [
        msgspec.structs.replace(one, at_ns=one.at_ns // MS_NS * MS_NS, think_ns=one.think_ns // MS_NS * MS_NS)
        for one in KINDS["agents"](1)[:300]
    ]
    assert sum(one.follows >= 0 for one in made) > 100
    lines = [orjson.dumps(row) + b"\n" for row in rows(made)]
    assert list(parse(lines, "t", 512)) == made
