"""Conductors of a make-believe cluster: a real core each, and what a live shell does around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.decisions import Decision, SetTimer
from halfmoon.schemas.events import TimerFired
from tests.conductor.conductor_scripts import MS

if TYPE_CHECKING:
    from tests.chaos.world import World

DIGEST_EVENTS = 100
Identity = tuple[int, int]


def published(decisions: Mapping[int, Sequence[Decision]], seqs: Iterable[int]) -> list[Identity]:
    """Identities of the decisions on these events that are published at all."""
    return [
        (seq, position)
        for seq in seqs
        if (some := decisions.get(seq))
        for position, decision in enumerate(some)
        if not isinstance(decision, SetTimer)
    ]


class Conductor:
    """See the module. It is silent about whatever was decided before it came."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.net, self.name = world, world.net, name
        self.alive, self.life, self.paused_until_ns = False, 0, 0
        self.core = Core()
        self.position = self.goal = 0
        self.floor: Identity = (0, -1)
        self.out_until_ns = 0
        #: Time of the log, and when it was that.
        self.heard = (0, 0)
        self.net.grown.append(self.soon)

    def start(self) -> None:
        """From a snapshot or from the start of the log; silent up to the newest decision that is stored."""
        world, net = self.world, self.net
        self.alive, self.life = True, self.life + 1
        checked = net.draw.random() < 0.1
        if world.snapshots and net.draw.random() < 0.7:
            self.core = Core.restore(net.draw.choice(world.snapshots[-3:]), checked=checked)
        else:
            self.core = Core(checked=checked)
        self.position = next((i for i, s in enumerate(net.log) if s.seq > self.core.seq), len(net.log))
        self.floor = net.stream[-1][0] if net.stream else (0, -1)
        self.goal = len(net.log)
        self.heard = (self.core.state.at_ns, net.now_ns)
        for key, at_ns in self.core.timers.items():
            self.arm(key, at_ns)
        self.soon()

    def keep_snapshot(self, snapshot: bytes) -> None:
        """As the shell does: only when all decisions up to there are stored."""
        seq, stored = self.core.seq, self.net.stored_ns
        # Of the last few events; those before were stored when the last snapshot was.
        newest = published(self.world.decisions, range(max(1, seq - 4 * DIGEST_EVENTS), seq + 1))
        if all(identity in stored for identity in newest):
            self.world.snapshots.append(snapshot)

    def die(self) -> None:
        self.alive = False
        self.life += 1

    def soon(self) -> None:
        net = self.net
        net.at(net.now_ns + net.lag_ns(), self.read, self)

    def read(self) -> None:
        net = self.net
        if not self.alive or not net.server_up:
            return
        if net.now_ns < self.paused_until_ns:
            net.later(self.paused_until_ns - net.now_ns, self.read)
            return
        while self.position < len(net.log):
            stamped = net.log[self.position]
            self.position += 1
            before = self.core.seq
            decisions = self.core.step(stamped)
            self.heard = (self.core.state.at_ns, net.now_ns)
            self.world.decided(self, stamped, decisions)
            for position, decision in enumerate(decisions):
                if isinstance(decision, SetTimer):
                    self.arm(decision.key, decision.at_ns)
                elif (stamped.seq, position) > self.floor:
                    self.publish((stamped.seq, position), decision)
            if stamped.seq // DIGEST_EVENTS > before // DIGEST_EVENTS:
                self.world.digested(self)

    def publish(self, identity: Identity, decision: Decision) -> None:
        self.world.planner_deaths.before(decision)
        self.out_until_ns = max(self.out_until_ns, self.net.now_ns + self.net.lag_ns())
        self.net.at(self.out_until_ns, lambda life=self.life: self.leave(life, identity, decision))
        self.world.planner_deaths.after(self, identity, decision)

    def leave(self, life: int, identity: Identity, decision: Decision) -> None:
        """Reaches the server."""
        if self.life != life or not self.alive:
            return
        if not self.net.server_up:
            self.net.at(self.net.server_back_ns + 1, lambda: self.leave(life, identity, decision))
            return
        self.net.publish(identity, decision)

    def arm(self, key: str, at_ns: int) -> None:
        log_ns, when_ns = self.heard
        wait_ns = max(0, at_ns - log_ns - self.net.now_ns + when_ns) + self.net.lag_ns()
        self.net.later(wait_ns, lambda life=self.life: self.fire(life, key, at_ns))

    def fire(self, life: int, key: str, at_ns: int) -> None:
        net = self.net
        if self.life != life or not self.alive or self.core.timers.get(key) != at_ns:
            return
        if self.position < self.goal or not net.server_up or net.now_ns < self.paused_until_ns:
            net.later(500 * MS, lambda: self.fire(life, key, at_ns))
            return
        net.append(TimerFired(key=key, at_ns=at_ns), f"timer-{key}-{at_ns}")
