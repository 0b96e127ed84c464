"""Saved logs for tests, out of random clusters: as `halfmoon events save` would have written them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from random_clusters import Cluster

from halfmoon.conductor.beginning import LOG_VERSION
from halfmoon.conductor.replay.logfile import (
    FORMAT,
    DecisionLine,
    EventLine,
    Header,
    InvalidLine,
    Line,
    LogFile,
    LogWriter,
)
from halfmoon.conductor.simulation.world import World
from halfmoon.schemas.decisions import SetTimer
from halfmoon.schemas.events import Event, Stamped

HEADER = Header(format=FORMAT, saved_by="t", cluster="random", code_version="t", log_version=LOG_VERSION, first_seq=1)


def lines_of(seed: int, *, chaos_s: int = 20, calm_s: int = 20) -> list[Line]:
    """Events of a random cluster, each followed by what was decided on it."""
    cluster = Cluster(seed, checked=False)
    cluster.run(chaos_s=chaos_s, calm_s=calm_s)
    lines: list[Line] = []
    seq = 0
    for stamped, decisions in zip(cluster.log, cluster.decided, strict=True):
        lines += [InvalidLine(seq=skipped, at_ns=stamped.at_ns) for skipped in range(seq + 1, stamped.seq)]
        seq = stamped.seq
        lines.append(EventLine(seq=seq, at_ns=stamped.at_ns, event=stamped.event))
        lines += [
            DecisionLine(cause_seq=seq, position=position, at_ns=stamped.at_ns, decision=decision)
            for position, decision in enumerate(decisions)
            if not isinstance(decision, SetTimer)
        ]
    return lines


class Simulated(World):
    """A simulated cluster that keeps its log in `lines`."""

    lines: list[Line]

    def _append(self, event: Event) -> None:
        self._events += 1
        seq, at_ns = self._events, self.clock.now_ns
        if seq == 1:
            self.lines = []
        decisions = self.core.step(Stamped(seq=seq, at_ns=at_ns, event=event))
        self.lines.append(EventLine(seq=seq, at_ns=at_ns, event=event))
        for position, decision in enumerate(decisions):
            if not isinstance(decision, SetTimer):
                self.lines.append(DecisionLine(cause_seq=seq, position=position, at_ns=at_ns, decision=decision))
        for decision in decisions:
            self._do(decision)


def saved(path: Path, lines: Iterable[Line], header: Header = HEADER) -> LogFile:
    with LogWriter(path, header) as out:
        for line in lines:
            out.write(line)
    return LogFile(path)


def decisions_in(lines: Iterable[Line]) -> list[int]:
    """Places of the decisions in `lines`."""
    return [place for place, line in enumerate(lines) if isinstance(line, DecisionLine)]
