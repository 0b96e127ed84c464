"""The conductor that orders a move dies of it, in half of the worlds whose KV moves: before the order is published,
when all conductors die with it, or just after; or the order is published once more, when the server no longer knows it.

Who comes back goes on from the log, or from a snapshot that was taken while the move was under way.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from halfmoon.schemas.decisions import Decision, MoveKv
from tests.conductor.conductor_scripts import S

if TYPE_CHECKING:
    from tests.chaos.conductors import Conductor, Identity
    from tests.chaos.world import World


class PlannerDeaths:
    """Asked by a conductor that is about to publish a decision."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.net = world, world.net
        self.draw = random.Random(f"planner {seed}")
        drawn = world.moving and self.draw.random() < 0.5
        self.on = world.wishes.drawn("planner deaths", drawn)

    def before(self, decision: Decision) -> None:
        """It is decided; nobody has heard of it from this conductor."""
        if self._strikes(decision) and self.draw.random() < 0.5:
            self.net.counts["moves whose planners all died"] += 1
            for conductor in self.world.conductors:
                self._kill(conductor, self.net.now_ns)

    def after(self, conductor: Conductor, identity: Identity, decision: Decision) -> None:
        """It leaves at the conductor's `out_until_ns`."""
        if not self._strikes(decision):
            return
        if self.draw.random() < 0.5:
            self.net.counts["moves whose planner died"] += 1
            self._kill(conductor, conductor.out_until_ns)
        else:
            again_ns = conductor.out_until_ns + self.net.window_ns + self.draw.randrange(1, S)
            self.net.at(again_ns, lambda: self._again(identity, decision))

    def _strikes(self, decision: Decision) -> bool:
        return self.on and self.net.faults and isinstance(decision, MoveKv) and self.draw.random() < 0.5

    def _again(self, identity: Identity, decision: Decision) -> None:
        if self.net.server_up and identity in self.net.stored_ns:
            self.net.counts["moves ordered twice"] += 1
            self.net.publish(identity, decision)

    def _kill(self, conductor: Conductor, at_ns: int) -> None:
        life, back_ns = conductor.life, self.draw.randrange(1, 4 * S)

        def die() -> None:
            if conductor.alive and conductor.life == life:
                conductor.keep_snapshot(conductor.core.snapshot())
                conductor.die()
                self.net.later(back_ns, lambda: None if conductor.alive else conductor.start())

        self.net.at(at_ns, die)
