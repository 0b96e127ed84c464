"""What goes wrong in a make-believe cluster: one fault after another, drawn from the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.events import (
    BlocksStored,
    DecodeFailed,
    PolicyChanged,
    PrefillFinished,
    RoleWanted,
    TimerFired,
    WorkerDraining,
)
from halfmoon.schemas.roles import ELASTIC_ROLES, WORKER_ROLES
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged
from tests.chaos.network import Process
from tests.conductor.conductor_scripts import S, keys

if TYPE_CHECKING:
    from tests.chaos.world import World


class Faults:
    """Calls itself for as long as the network has faults. `cuts`: links are cut too."""

    def __init__(self, world: World, *, cuts: bool) -> None:
        self.world, self.net, self.cuts = world, world.net, cuts
        self.pause_s = world.net.draw.choice([0.3, 1.0, 3.0, 6.0])

    def strike(self) -> None:
        net = self.net
        if not net.faults:
            return
        draw = net.draw
        process = draw.choice(list(net.processes.values()))
        conductor = draw.choice(self.world.conductors)
        match draw.randrange(11):
            case 0 | 1 if process.alive:
                self.kill(process, noticed=draw.random() < 0.5)
            case 2 | 3 if conductor.alive:
                conductor.die()
                net.counts["killed: conductor"] += 1
                net.later(draw.randrange(6 * S), lambda: None if conductor.alive else conductor.start())
            case 4:
                conductor.paused_until_ns = net.now_ns + draw.randrange(10 * S)
                net.counts["paused: conductor"] += 1
            case 5 | 6 if self.cuts:
                net.cut(process, draw.randrange(6 * S))
                net.counts["link cut"] += 1
            case 7 if net.server_up and self.cuts:
                net.server_away(draw.randrange(5 * S))
            case 8 if process.role in WORKER_ROLES and process.alive:
                self.drain(process, draining=draw.random() < 0.5)
                process.later(5 * S, lambda: self.drain(process, draining=False))
            case 9 if draw.random() < 0.3:
                net.append(PolicyChanged(policy=self.world.any_policy()))
            case 10:
                self.talk_nonsense()
        net.later(int(draw.random() * self.pause_s * S), self.strike)

    def strike_attention(self) -> None:
        """One of those dies who decode without KV, or hold it."""
        net, draw = self.net, self.world.attention_draw
        if not net.faults:
            return
        role = "attention" if draw.random() < 0.2 else "decode"
        process = draw.choice([one for one in net.processes.values() if one.role == role])
        if process.alive:
            self.kill(process, noticed=draw.random() < 0.7)
        net.later(draw.randrange(6 * S), self.strike_attention)

    def change_role(self) -> None:
        """An operator wants some worker in some role, now and then two at once."""
        net, draw = self.net, self.world.role_draw
        if not net.faults:
            return
        ids = [one.process_id for one in net.processes.values() if one.role in ELASTIC_ROLES]
        for _ in range(draw.choice([1, 1, 2])):
            net.append(RoleWanted(target_id=draw.choice(ids), role=draw.choice(ELASTIC_ROLES)))
        net.later(draw.randrange(2 * S), self.change_role)

    def pause(self) -> None:
        """An operator pauses placements for a while; then, half of the times, they are of other weights."""
        net, draw = self.net, self.world.pause_draw
        if not net.faults:
            return
        net.append(PlacementsPaused(abort=draw.random() < 0.5))
        net.later(draw.randrange(4 * S), self.resume)

    def resume(self) -> None:
        net, draw = self.net, self.world.pause_draw
        if draw.random() < 0.5:
            net.append(WeightsChanged(weight_version=draw.choice(["", "v1", "v2"])))
        net.append(PlacementsPaused(paused=False))
        net.later(draw.randrange(6 * S), self.pause)

    def step_clock(self) -> None:
        """The server's clock is set by hours, or by seconds, back or forth."""
        net, draw = self.net, self.world.clock_draw
        if net.faults:
            net.server_clock_ns += draw.choice([-1, 1]) * draw.choice([3 * S, 3_600 * S, 100_000 * S])
            net.counts["server's clock set"] += 1
            net.later(draw.randrange(6 * S), self.step_clock)

    def talk_nonsense(self) -> None:
        """Words about orders and processes that nobody knows."""
        placed = [d.order_id for _, d in self.net.stream[-50:] if isinstance(d, StartPrefill)]
        ids = {"order_id": self.net.draw.choice(["77-1", *placed]), "request_id": "r0"}
        self.net.append(PrefillFinished(**ids, worker_id="p0", queue_ns=0, transfer_ns=0, compute_ns=1))
        self.net.append(DecodeFailed(**ids, worker_id="d9", reason=""))
        self.net.append(TimerFired(key="lost:prefill:p0:i1", at_ns=5))
        self.net.append(BlocksStored(node_id="n-x", incarnation="i1", block_keys=keys(3)))

    def kill(self, process: Process, *, noticed: bool) -> None:
        """It comes back after a while. `noticed`: whoever started it tells the log."""
        process.die()
        self.net.counts[f"killed: {process.role}"] += 1
        # Whoever notices it may not know which life it was.
        incarnation = self.net.draw.choice([f"i{process.life - 1}", ""])
        if noticed:
            self.net.append(process.left(incarnation))
        self.net.later(self.net.draw.randrange(8 * S), lambda: None if process.alive else process.start())

    def drain(self, process: Process, *, draining: bool) -> None:
        process.say(
            WorkerDraining(worker_id=process.process_id, incarnation=process.incarnation, draining=draining)
        )
