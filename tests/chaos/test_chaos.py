"""Some worlds of chaos; `make chaos` plays thousands. That the checks of a world can fail is shown here too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from world import Conductor, World

from halfmoon.conductor.core import machine, reconcile
from halfmoon.store.pool.pool import Pool

#: The first of these failed once: KV that was lost, an answer that was lost with its worker.
SEEDS = [3, 34, *range(100, 106)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_of_chaos_keeps_its_promises(seed: int) -> None:
    world = World(seed)
    world.run()
    assert len(world.log) > 100
    assert world.accepted == len(world.ends) > 5


def test_a_seed_plays_the_same_again() -> None:
    worlds = [World(7), World(7)]
    for world in worlds:
        world.run()
    assert worlds[0].log == worlds[1].log
    assert worlds[0].stream == worlds[1].stream


def test_the_command_names_what_it_played() -> None:
    program = Path(__file__).parent / "run.py"
    done = subprocess.run(
        [sys.executable, program, "--seed", "100"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1 seeds, ")
    assert "none fails" in done.stdout


def fails(seeds: range, match: str) -> None:
    """One of these worlds must."""

    def play() -> None:
        for seed in seeds:
            World(seed).run()

    with pytest.raises(AssertionError, match=match):
        play()


def test_a_conductor_that_decides_by_something_else_than_the_log_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Conductor.start

    def ill(self: Conductor) -> None:
        whole(self)
        self.core.state.policy = self.world.any_policy()

    monkeypatch.setattr(Conductor, "start", ill)
    fails(range(20), "decided differently|another state")


def test_lost_kv_that_nobody_misses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_is_overdue", lambda *_: False)
    fails(range(20), "orders at d|open at f")


def test_a_request_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine.orders.place

    def forgets(state: Any, request: Any, lost: str, out: Any) -> None:
        if request.placements == 1:
            machine.orders.end(state, request)
        else:
            whole(state, request, lost, out)

    monkeypatch.setattr(machine.orders, "place", forgets)
    monkeypatch.setattr(reconcile, "place", forgets)
    fails(range(20), "open at f")


def test_a_block_that_is_leased_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "_take_free", lambda self: self._free[-1])
    fails(range(5), "leased twice|free twice|[0-9]+, Slot")


def test_a_lease_that_is_never_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "sweep", lambda self, now_ns: [])
    monkeypatch.setattr(World, "release", lambda self, node_id, owner: None)
    fails(range(5), "held at n-|orders at|open at")


def test_a_full_queue_that_takes_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_decide = machine.orders.decide
    monkeypatch.setattr(machine.orders, "decide", lambda state, *args: whole_decide(Roomy(state), *args))
    fails(range(20), "more than the queue takes")


class Roomy:
    """A state as seen by somebody who does not count the queue."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.policy = msgspec.structs.replace(state.policy, queued_max_per_worker=1_000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)
