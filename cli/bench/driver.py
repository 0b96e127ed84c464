"""Sends planned requests at their times, or as places get free, and keeps a record of each.

A request's latency counts from the moment when it was due: one that waits here because the generator is late, or
because `concurrency` requests are in flight, waits at the cluster's expense, not outside the measurement (no
coordinated omission). In a closed loop a request is due when a place gets free, so there the cluster sets the pace. A
turn of a session that waits for the answer before it is due when its pause after that answer is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from halfmoon.bus.tasks import end_tasks
from halfmoon.cli.bench.clients import Record, Target
from halfmoon.cli.bench.workload import Planned, Texts

#: From the beginning to the first request.
LEAD_NS = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When it ends. 0: no such limit."""

    #: Requests in flight at once.
    concurrency: int = 0
    #: Counted requests; the first `warmup` of all are sent and not counted.
    requests: int = 0
    warmup: int = 0
    #: Time from the first counted request on, after which nothing is sent.
    duration_s: float = 0.0
    #: An answer that is not whole by then has failed.
    timeout_s: float = 300.0
    #: Some wait for others' answers; then the plan has an end.
    sessions: bool = False


class Driver:
    """One run. `records` are of all requests in the order in which they were sent, warm-up included: that of the plan,
    where nobody waits for another's answer.
    """

    def __init__(self, target: Target, texts: Texts, plan: Iterator[Planned], limits: Limits) -> None:
        self.records: list[Record] = []
        #: Nothing more is sent, and requests in flight are left as they are.
        self.stopped = asyncio.Event()
        self._target = target
        self._texts = texts
        self._plan = plan
        self._limits = limits
        self._places = asyncio.Semaphore(limits.concurrency) if limits.concurrency else None
        self._tasks: set[asyncio.Task[object]] = set()
        #: By the number of the request whose end they wait for.
        self._followers: dict[int, list[Planned]] = {}
        #: Nothing is sent from then on, by the monotonic clock; 0: not known yet, or no such time.
        self._until_ns = 0

    @property
    def counted(self) -> list[Record]:
        return self.records[self._limits.warmup :]

    async def run(self) -> bool:
        """False when `stopped` was set before all had ended."""
        stopped = asyncio.create_task(self.stopped.wait())
        running = asyncio.create_task(self._run())
        await asyncio.wait({stopped, running}, return_when=asyncio.FIRST_COMPLETED)
        whole = running.done()
        await end_tasks([stopped, *([] if whole else [running, *self._tasks])])
        if whole:
            running.result()
        return whole

    async def _run(self) -> None:
        began_ns = time.monotonic_ns() + LEAD_NS
        for planned in self._in_time():
            due_ns = began_ns + planned.at_ns if planned.at_ns >= 0 else 0
            if not await self._send(planned, due_ns):
                break
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _in_time(self) -> Iterator[Planned]:
        """Requests of the plan that wait for no other. With sessions the plan is read to its end first: a follower may
        be due before requests that stand earlier in it.
        """
        if not self._limits.sessions:
            return self._plan
        first: list[Planned] = []
        for planned in self._plan:
            if planned.follows < 0:
                first.append(planned)
            else:
                self._followers.setdefault(planned.follows, []).append(planned)
        return iter(first)

    async def _send(self, planned: Planned, due_ns: int) -> bool:
        """At its time, and when there is a place for it. `due_ns` of 0: as soon as there is one. False: nothing more is
        to be sent then.
        """
        if self._all_sent() or (self._until_ns and due_ns >= self._until_ns):
            return False
        body = self._body(planned)  # before its time has come: making it must not make it late
        await _sleep_until(due_ns)
        if self._places is not None and not await self._place():
            return False
        if self._all_sent():  # others were sent while it waited
            if self._places is not None:
                self._places.release()
            return False
        due_ns = due_ns or time.monotonic_ns()
        if self._limits.duration_s and len(self.records) == self._limits.warmup:
            self._until_ns = due_ns + int(self._limits.duration_s * 1e9)
        record = Record(planned=planned, due_ns=due_ns)
        self.records.append(record)
        self._start(self._one(record, body))
        return True

    def _all_sent(self) -> bool:
        limits = self._limits
        return bool(limits.requests) and len(self.records) >= limits.warmup + limits.requests

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _place(self) -> bool:
        """Wait for a free place; False when time is over first."""
        assert self._places is not None
        left_s = (self._until_ns - time.monotonic_ns()) / 1e9 if self._until_ns else None
        try:
            async with asyncio.timeout(left_s):
                await self._places.acquire()
        except TimeoutError:
            return False
        return True

    async def _one(self, record: Record, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._target.ask(record, body)
        except TimeoutError:
            record.end("failed", f"no whole answer within {self._limits.timeout_s:g} s")
        finally:
            if self._places is not None:
                self._places.release()
        for planned in self._followers.pop(record.planned.number, ()):
            self._start(self._send(planned, record.ended_ns + planned.think_ns))

    def _body(self, planned: Planned) -> dict[str, Any]:
        """Answers are as long as planned, and the likeliest tokens."""
        return {
            "prompt": self._texts.prompt(planned),
            "max_tokens": planned.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            # In a trace a larger one is earlier.
            "priority": -planned.priority,
        }


async def _sleep_until(at_ns: int) -> None:
    """At the end of the loop's turn at least, so that answers are heard however late we are."""
    await asyncio.sleep(0)
    # uvloop counts in whole milliseconds and rounds: a sleep may end before its time.
    while (left_ns := at_ns - time.monotonic_ns()) > 0:
        await asyncio.sleep(left_ns / 1e9)
