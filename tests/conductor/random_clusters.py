"""Logs of make-believe clusters for tests of the core: a world of chaos (`tests.chaos.world`) with one conductor.

Everything is drawn from the seed, the configuration too. Run as a program it prints a digest of every
decision and of the state, so that two interpreters can be compared.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from halfmoon.conductor.core import admission
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.codec import encode
from halfmoon.schemas.decisions import Decision, FailRequest, Ordered, RejectRequest, SetTimer
from halfmoon.schemas.events import RequestFinished, Stamped
from tests.chaos.network import Process
from tests.chaos.world import World
from tests.conductor.conductor_scripts import MS


class Cluster:
    """Call `run`; then `log` and `decided` hold what happened, and `core` is as it was after the last event.

    `lossy` False: every message arrives.
    """

    def __init__(self, seed: int, *, checked: bool = True, lossy: bool = True) -> None:
        self.world = World(seed, conductors=1, lossy=lossy)
        # Many requests, and time for some of them between two faults.
        self.world.arrival_ns, self.world.faults.pause_s = 200 * MS, 3.0
        self.core = Core(checked=checked)
        self.decided: list[list[Decision]] = []

    @property
    def log(self) -> list[Stamped]:
        return self.world.log

    @property
    def processes(self) -> dict[str, Process]:
        return self.world.net.processes

    def run(self, chaos_s: int, calm_s: int) -> None:
        """Faults for a while, then none, with all processes back."""
        self.world.storm(chaos_s)
        if calm_s:
            self.world.calm_down()
            self.world.pass_time(calm_s)
        self.decided = [self.core.step(stamped) for stamped in self.log]

    def told(self) -> dict[str, list[str]]:
        """Of each request, the ends in the log and those that were decided, in order."""
        found: dict[str, list[str]] = {}
        for stamped, decisions in zip(self.log, self.decided, strict=True):
            if isinstance(stamped.event, RequestFinished):
                found.setdefault(stamped.event.request_id, []).append("finished")
            for decision in decisions:
                if isinstance(decision, RejectRequest | FailRequest):
                    found.setdefault(decision.request_id, []).append(type(decision).__name__)
        return found


def digest(log: list[Stamped], decided: list[list[Decision]], core: Core) -> str:
    """Of every decision, in order, and of the state after the last."""
    state = hashlib.blake2b(core.digest().encode())
    for stamped, decisions in zip(log, decided, strict=True):
        for position, decision in enumerate(decisions):
            state.update(
                repr(Ordered(cause_seq=stamped.seq, position=position, decision=decision)).encode()
                if isinstance(decision, SetTimer)
                else encode(decision)
            )
    return state.hexdigest()


def choose_by_hash() -> None:
    """What the rules of the core forbid: among prefill workers the one whose id has the smallest hash."""

    def choose(state: Any, candidates: Any, draw: str) -> Any:
        return min(candidates, key=lambda candidate: hash(candidate.worker_id), default=None)

    admission.choose_prefill = choose


def main() -> None:
    if sys.argv[1] == "--by-hash":
        choose_by_hash()
        del sys.argv[1]
    for seed in sys.argv[1:]:
        cluster = Cluster(int(seed), checked=False)
        cluster.run(chaos_s=15, calm_s=5)
        print(seed, len(cluster.log), digest(cluster.log, cluster.decided, cluster.core))


if __name__ == "__main__":
    main()
