"""Time, the server and the links of a make-believe cluster: everything that can delay, lose, repeat or reorder.

What is promised, and nothing more: one order of the log, in which an event stands once within the window for
repeats; decisions to a process in their order, and again after its link was cut; messages to a process in their
order, each at most once unless it says that it may be repeated, or not at all.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from halfmoon.conductor.live.shell import target
from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import Event, FrontendJoined, Stamped, StoreJoined, WorkerJoined
from tests.conductor.conductor_scripts import MS, S

Identity = tuple[int, int]


CALM_LAG_NS_MAX = 2 * MS
CALM_LAG_BITS = CALM_LAG_NS_MAX.bit_length()


class Living(Protocol):
    """A process or a conductor; `life` changes when one of its lives begins or ends."""

    life: int


@dataclass
class Link:
    """A process's connection to the server: in order, with a delay; what is sent while it is down is lost."""

    up: bool = True
    #: Nothing overtakes what is on its way.
    busy_until_ns: int = 0
    #: All of the decisions stream before this place has come.
    mark: int = 0


class Process(ABC):
    """A worker, a store agent or a frontend, through all its lives."""

    role = ""

    def __init__(self, net: Network, process_id: str) -> None:
        self.net = net
        self.process_id = process_id
        self.alive = False
        self.life = 0
        self.link = Link()
        self.said_until_ns = 0
        #: The newest decision that was obeyed.
        self.done: Identity = (0, -1)

    @property
    def incarnation(self) -> str:
        return f"i{self.life}"

    def start(self) -> None:
        self.alive, self.life = True, self.life + 1
        self.link = Link(mark=len(self.net.stream))
        self.done = (0, -1)
        self.reset()

    def die(self) -> None:
        self.alive = False
        self.life += 1

    def later(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Unless this life is over by then."""
        self.net.at(self.net.now_ns + delay_ns, call, self)

    def say(self, event: Event) -> None:
        self.net.say(self, event)

    @abstractmethod
    def reset(self) -> None:
        """A new life begins, with nothing in memory."""

    @abstractmethod
    def announce(self) -> None:
        """Tell the log that it is here, and what it has."""

    @abstractmethod
    def obey(self, decision: Decision) -> None:
        """Do what a conductor decided."""

    @abstractmethod
    def left(self, incarnation: str) -> Event:
        """What is said of it when its end was noticed."""

    @abstractmethod
    def under_way(self) -> str:
        """What it has not finished; "" when it is at rest."""


@dataclass
class Network:
    """See the module. Everything is drawn from `draw`; time is its own."""

    draw: random.Random
    faults: bool = True
    log: list[Stamped] = field(default_factory=list)
    #: The decisions stream, and when each decision was stored last.
    stream: list[tuple[Identity, Decision]] = field(default_factory=list)
    stored_ns: dict[Identity, int] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    server_up: bool = True
    #: What the server's clock shows more than the time that really passed.
    server_clock_ns: int = 0
    server_back_ns: int = 0
    #: Called when the log has grown.
    grown: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = self.draw
        self.now_ns = draw.randrange(10**18)
        self.window_ns = draw.choice([1 * S, 120 * S])
        self.in_order = draw.random() < 0.6
        self.lag_ns_max = draw.choice([1 * MS, 20 * MS, 300 * MS])
        self.loss = draw.choice([0.0, 0.01, 0.1])
        self._appended_ns: dict[str, int] = {}
        self._waiting: list[tuple[int, int, Callable[[], None], Living | None, int]] = []
        self._lag_bits = self.lag_ns_max.bit_length()
        self._count = 0

    # --- time -----------------------------------------------------------------------------------------------

    def at(self, at_ns: int, call: Callable[[], None], of: Living | None = None) -> None:
        """`of`: only while its present life lasts."""
        self._count += 1
        life = of.life if of is not None else 0
        heapq.heappush(
            self._waiting, (at_ns if at_ns > self.now_ns else self.now_ns, self._count, call, of, life)
        )

    def later(self, delay_ns: int, call: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, call)

    def lag_ns(self) -> int:
        # As `randrange` draws;.
        limit, bits = (self.lag_ns_max, self._lag_bits) if self.faults else (CALM_LAG_NS_MAX, CALM_LAG_BITS)
        drawn = self.draw.getrandbits(bits)
        while drawn >= limit:
            drawn = self.draw.getrandbits(bits)
        return drawn

    def chance(self, probability: float) -> bool:
        """Of a fault."""
        return self.faults and self.draw.random() < probability

    def advance(self, until_ns: int) -> None:
        waiting, pop = self._waiting, heapq.heappop
        while waiting and waiting[0][0] <= until_ns:
            self.now_ns, _, call, of, life = pop(waiting)
            if of is None or of.life == life:
                call()
        self.now_ns = max(self.now_ns, until_ns)

    # --- the log --------------------------------------------------------------------------------------------

    def append(self, event: Event, message_id: str = "") -> None:
        """Into the log, unless it was there within the window."""
        if not message_id:
            self._count += 1
            message_id = f"{self._count}"
        if not self.server_up:
            self.at(self.server_back_ns + 1, lambda: self.append(event, message_id))
            return
        before_ns = self._appended_ns.get(message_id)
        if before_ns is not None and self.now_ns - before_ns <= self.window_ns:
            return
        self._appended_ns[message_id] = self.now_ns
        last = self.log[-1].seq if self.log else 0
        # Some messages are no event.
        seq, at_ns = last + (2 if self.chance(0.01) else 1), self.now_ns + self.server_clock_ns
        self.log.append(Stamped(seq=seq, at_ns=max(0, at_ns), event=event))
        self.counts[type(event).__name__] += 1
        for grown in self.grown:
            grown()

    def say(self, process: Process, event: Event) -> None:
        """A process's fact on its way to the log: lost with the process, repeated, delayed, overtaken by others.

        Only its joining is overtaken by nothing of its own, and comes while it lives: that much order is promised.
        """
        self._count += 1
        life, message_id = process.life, f"{process.process_id}-{self._count}"
        leaves_ns = max(self.now_ns + self.lag_ns(), process.said_until_ns + 1)
        joins = isinstance(event, WorkerJoined | StoreJoined | FrontendJoined)
        if self.in_order or joins:
            process.said_until_ns = leaves_ns
        lost_with_it = joins or self.draw.random() < 0.5

        def leave() -> None:
            if process.life == life or not lost_with_it:
                self.append(event, message_id)

        self.at(leaves_ns, leave)
        if self.chance(0.05):
            self.at(leaves_ns + self.draw.randrange(3 * S), leave)

    # --- decisions ------------------------------------------------------------------------------------------

    def publish(self, identity: Identity, decision: Decision) -> None:
        """Stored unless it is a repeat, and heard by its receiver in any case."""
        stored_ns = self.stored_ns.get(identity)
        if stored_ns is None or self.now_ns - stored_ns > self.window_ns:
            self.stored_ns[identity] = self.now_ns
            self.stream.append((identity, decision))
            self.counts["second copies stored"] += stored_ns is not None
        process = self.processes[target(decision)]
        if not process.link.up:
            self.counts["decisions missed"] += 1
            return
        life = process.life
        self.at(self._arrival_ns(process), lambda: self._hear(process, life, identity, decision))

    def _arrival_ns(self, process: Process) -> int:
        link = process.link
        link.busy_until_ns = max(link.busy_until_ns + 1, self.now_ns + self.lag_ns())
        return link.busy_until_ns

    def _hear(self, process: Process, life: int, identity: Identity, decision: Decision) -> None:
        if process.life == life and process.link.up and identity > process.done:
            process.done = identity
            process.obey(decision)

    def remember_mark(self, process: Process) -> None:
        """What is stored now has come once everything on its way has."""
        link, life, place = process.link, process.life, len(self.stream)

        def set_mark() -> None:
            if link.up and process.life == life:
                link.mark = max(link.mark, place)

        if link.up:
            self.at(max(link.busy_until_ns, self.now_ns + self.lag_ns_max) + 1, set_mark)

    # --- links ----------------------------------------------------------------------------------------------

    def send(self, to: Process, call: Callable[[], None], *, repeats: bool = False) -> None:
        """A message to a process: in order, lost with its link; `repeats`: it may come again, at any time."""
        if not to.alive or not to.link.up or not self.server_up or self.chance(self.loss):
            self.counts["messages lost"] += 1
            return
        life = to.life

        def arrive() -> None:
            if to.life == life and to.link.up:
                call()

        arrival_ns = self._arrival_ns(to)
        self.at(arrival_ns, arrive)
        if repeats and self.chance(0.05):
            self.counts["messages repeated"] += 1
            self.at(arrival_ns + self.draw.randrange(3 * S), arrive)

    def send_surely(self, sender: Process, to: Process, call: Callable[[], None]) -> None:
        """A message that its sender repeats until it is answered, in order: late, but once; lost with either."""
        life = to.life

        def arrive() -> None:
            if to.life != life:
                return
            if to.link.up and sender.link.up and self.server_up:
                call()
            else:
                sender.later(300 * MS, arrive)

        at_ns = self._arrival_ns(to)
        sender.later(at_ns - self.now_ns, arrive)

    def reachable(self, process: Process) -> bool:
        return process.alive and process.link.up and self.server_up and not self.chance(self.loss)

    def cut(self, process: Process, for_ns: int) -> None:
        """Its link is down for a while; then it reads what the stream has for it since its last mark."""
        link, life = process.link, process.life
        if not link.up:
            return
        link.up = False

        def back() -> None:
            link.up = True
            if process.life == life and process.alive:
                for identity, decision in self.stream[link.mark :]:
                    if target(decision) == process.process_id:
                        self._hear(process, life, identity, decision)

        self.later(for_ns, back)

    def server_away(self, for_ns: int) -> None:
        """Everybody is cut off; what is said meanwhile comes later."""
        self.server_up, self.server_back_ns = False, self.now_ns + for_ns
        self.counts["server away"] += 1
        for process in self.processes.values():
            self.cut(process, for_ns)

        def back() -> None:
            self.server_up = True
            for grown in self.grown:
                grown()

        self.later(for_ns, back)
