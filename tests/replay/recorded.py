"""Saved logs for tests, out of random clusters: as `halfmoon events save` would have written them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from random_clusters import Cluster

from halfmoon.cli.main import main
from halfmoon.conductor.code_version import LOG_VERSION
from halfmoon.conductor.replay.logfile import (
    FORMAT,
    DecisionLine,
    Header,
    InvalidLine,
    Line,
    LogFile,
    LogWriter,
    lines_of_step,
)
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.profiles import load_profile
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.policy import Policy

HEADER = Header(
    format=FORMAT, saved_by="t", cluster="random", code_version="t", log_version=LOG_VERSION, first_seq=1
)


def lines_of(seed: int, *, chaos_s: int = 20, calm_s: int = 20) -> list[Line]:
    """Events of a random cluster, each followed by what was decided on it."""
    cluster = Cluster(seed, checked=False, lossy=False)
    cluster.run(chaos_s=chaos_s, calm_s=calm_s)
    lines: list[Line] = []
    seq = 0
    for stamped, decisions in zip(cluster.log, cluster.decided, strict=True):
        lines += [InvalidLine(seq=skipped, at_ns=stamped.at_ns) for skipped in range(seq + 1, stamped.seq)]
        seq = stamped.seq
        lines += lines_of_step(stamped, decisions)
    return lines


def saved(path: Path, lines: Iterable[Line], header: Header = HEADER) -> LogFile:
    with LogWriter(path, header) as out:
        for line in lines:
            out.write(line)
    return LogFile(path)


def simulated_log(path: Path, cluster: ClusterShape, arrivals: list[Arrival], policy: Policy) -> World:
    """Saves the log of a simulated cluster on `a800`, so that what is made of it can be compared with what it was."""
    world = World(cluster, policy, load_profile("a800"))
    lines: list[Line] = []
    world.after_step = lambda stamped, decisions: lines.extend(lines_of_step(stamped, decisions))
    world.run(arrivals, sample_ns=10**10)
    while world.core.state.requests:  # the last ones have ended, and the log has yet to be told
        world.clock.step()
    saved(path, lines)
    return world


def status_of(*words: object) -> int:
    """Exit status of the command, run in this process."""
    asyncio.set_event_loop(None)
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def decisions_in(lines: Iterable[Line]) -> list[int]:
    """Places of the decisions in `lines`."""
    return [place for place, line in enumerate(lines) if isinstance(line, DecisionLine)]
