"""Stepping the core over a recorded log, and comparing every decision with the recorded one.

A decision is known by (sequence of its cause, position). Conductors publish in that order, and the stream keeps it: so
what is older than the newest recorded decision must be recorded, and what is newer had not been published when the log
was saved. Only the latter may be absent; it is counted. A decision that was stored twice (a conductor lagged by more
than the stream's window for duplicates) must be the same both times. Timers are never published.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from importlib.metadata import version

import msgspec

from halfmoon.conductor.beginning import LOG_VERSIONS_READ
from halfmoon.conductor.machine import Core, SnapshotInvalid
from halfmoon.conductor.replay.logfile import (
    DecisionLine,
    EventLine,
    InvalidLine,
    Line,
    LogFile,
    LogFileInvalid,
    SnapshotLine,
)
from halfmoon.conductor.version import code_version
from halfmoon.schemas.codec import encode
from halfmoon.schemas.decisions import Decision, SetTimer
from halfmoon.schemas.events import ClusterConfigured, Event, Stamped, StateDigested

Identity = tuple[int, int]


class Divergence(msgspec.Struct, kw_only=True):
    """Where replay and record part: a decision that is None is not there."""

    seq: int
    position: int
    event: Event | None
    recorded: Decision | None
    computed: Decision | None


class Verdict(msgspec.Struct, kw_only=True):
    """What a replay found."""

    events: int
    #: Recorded, and equal to what was computed.
    decisions: int
    #: Computed, and newer than every recorded one.
    unpublished: int
    #: Events before what begins the log, when its head is gone: not replayed.
    passed_over: int
    #: Digests that conductors of this very code said, and found again; those that differ.
    states: int
    states_differ: list[StateDigested]
    identical: bool
    first_divergence: Divergence | None
    #: Of every decision that was computed, timers too, in order; of the state after the last event.
    digest: str
    state_digest: str
    events_per_s: int


class Replay:
    """Iterating steps a core over a log: each line with what the core decides on it (nothing but for an event).

    Raises LogFileInvalid: see `LogFile`, a gap, a beginning that is missing, messages of another version. `checked`
    runs the invariants after every step; `until` is the last event; `watched`: see `Core.watched`.
    """

    def __init__(self, log: LogFile, *, checked: bool = False, until: int | None = None, watched: str = "") -> None:
        self.core = Core(checked=checked)
        self.core.watched = watched
        self._log = log
        self._checked = checked
        self._until = until
        #: Events at the head of the file that stand before what begins the log.
        self.passed_over = 0

    def __iter__(self) -> Iterator[tuple[Line, list[Decision]]]:
        header, path = self._log.header, self._log.path
        if header.log_version not in (0, *LOG_VERSIONS_READ):
            raise LogFileInvalid(
                f"{path}: log version {header.log_version}, begun by halfmoon {header.code_version}: replay it with "
                f"that one; this is {version('halfmoon')} and reads log version {LOG_VERSIONS_READ[-1]} and older"
            )
        seq = 0
        for line in self._log.lines():
            match line:
                case EventLine() | InvalidLine():
                    if self._until is not None and line.seq > self._until:
                        return
                    if seq and line.seq != seq + 1:
                        raise LogFileInvalid(f"{path}: events {seq + 1} to {line.seq - 1} are missing")
                    if seq == 0 and not self._begins(line):
                        self.passed_over += 1
                        continue
                    seq = line.seq
                    if isinstance(line, EventLine):
                        yield line, self.core.step(Stamped(seq=seq, at_ns=line.at_ns, event=line.event))
                    else:
                        yield line, []
                case SnapshotLine():
                    if seq:
                        raise LogFileInvalid(f"{path}: a snapshot after event {seq}")
                    self._restore(line)
                    seq = line.seq
                    yield line, []
                case _:
                    if seq:
                        yield line, []
        if seq == 0:
            raise LogFileInvalid(f"{path}: its head is gone, and neither a snapshot nor an event begins what is left")

    @staticmethod
    def _begins(line: EventLine | InvalidLine) -> bool:
        """Whether a core that knows nothing may begin here: at the first event of all, or where a log begins anew."""
        return line.seq == 1 or (isinstance(line, EventLine) and isinstance(line.event, ClusterConfigured))

    def _restore(self, line: SnapshotLine) -> None:
        try:
            watched = self.core.watched
            self.core = Core.restore(line.snapshot, checked=self._checked)
            self.core.watched = watched
        except SnapshotInvalid as problem:
            raise LogFileInvalid(
                f"{self._log.path}: its snapshot cannot be read ({problem}); it was saved by halfmoon "
                f"{self._log.header.saved_by}"
            ) from None
        if self.core.seq > line.seq:
            raise LogFileInvalid(f"{self._log.path}: its snapshot is of {self.core.seq}, not {line.seq}")


class States:
    """What conductors said of their states, against ours: a stricter look than decisions alone.

    Only of conductors with the same code: another may keep the same in another form.
    """

    def __init__(self) -> None:
        self.equal = 0
        self.differ: list[StateDigested] = []
        self._ours: dict[int, str] = {}
        self._before = 0

    def see(self, line: EventLine, core: Core) -> None:
        """After the core has stepped over `line`."""
        every = core.state.policy.digest_events
        if line.seq // every > self._before // every:
            self._ours[line.seq] = core.digest()
        self._before = line.seq
        said = line.event
        if isinstance(said, StateDigested) and said.code_version == code_version() and said.at_seq in self._ours:
            if said.digest == self._ours[said.at_seq]:
                self.equal += 1
            else:
                self.differ.append(said)


def verify(log: LogFile, *, checked: bool = False, until: int | None = None) -> Verdict:
    """Replay `log` up to its end, event `until`, or the first divergence."""
    started_s = time.monotonic()
    replay = Replay(log, checked=checked, until=until)
    digest = hashlib.blake2b(digest_size=16)
    #: Computed and not met yet; what was met, for the case that it comes again.
    open_: dict[Identity, Decision] = {}
    met: dict[Identity, int] = {}
    events = compared = 0
    newest: Identity = (0, -1)
    states = States()
    divergence: Divergence | None = None
    for line, decisions in replay:
        if isinstance(line, EventLine):
            events += 1
            states.see(line, replay.core)
            for position, decision in enumerate(decisions):
                digest.update(encode(decision))
                if not isinstance(decision, SetTimer):
                    open_[(line.seq, position)] = decision
        elif isinstance(line, DecisionLine):
            identity = (line.cause_seq, line.position)
            newest = max(newest, identity)
            computed = open_.pop(identity, None)
            if computed == line.decision:
                met[identity] = hash(encode(line.decision))
                compared += 1
            elif computed is not None or met.get(identity) != hash(encode(line.decision)):
                divergence = Divergence(
                    seq=line.cause_seq,
                    position=line.position,
                    event=None,
                    recorded=line.decision,
                    computed=computed,
                )
                break
        elif isinstance(line, InvalidLine):
            events += 1
    missing = min((identity for identity in open_ if identity < newest), default=None)
    if missing is not None and (divergence is None or missing < (divergence.seq, divergence.position)):
        divergence = Divergence(seq=missing[0], position=missing[1], event=None, recorded=None, computed=open_[missing])
    if divergence is not None:
        divergence.event = _event(log, divergence.seq)
    return Verdict(
        events=events,
        decisions=compared,
        unpublished=sum(identity > newest for identity in open_),
        passed_over=replay.passed_over,
        states=states.equal,
        states_differ=states.differ,
        identical=divergence is None and not states.differ,
        first_divergence=divergence,
        digest=digest.hexdigest(),
        state_digest=replay.core.digest(),
        events_per_s=int(events / max(time.monotonic() - started_s, 1e-9)),
    )


def _event(log: LogFile, seq: int) -> Event | None:
    for line in log.lines():
        if isinstance(line, EventLine) and line.seq >= seq:
            return line.event if line.seq == seq else None
    return None
