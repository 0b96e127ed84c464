"""Stepping the core over a recorded log, and comparing every decision with the recorded one.

A decision is known by (sequence of its cause, position). Conductors publish in that order, and the stream keeps it: so
a decision older than the newest recorded one must be recorded, and a newer one had not been published when the log was
saved. Absent may be these newer ones, and ones older than the oldest that had not expired; both are counted. A decision
that was stored twice (a conductor lagged by more than the stream's window for duplicates) must be the same both times.
Timers are never published.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from importlib.metadata import version

import msgspec

from halfmoon.conductor.code_version import LOG_VERSIONS_READ, code_version
from halfmoon.conductor.core.machine import Core, SnapshotInvalid
from halfmoon.conductor.core.step_output import Explains, explain_none
from halfmoon.conductor.replay.logfile import (
    DecisionLine,
    EventLine,
    InvalidLine,
    Line,
    LogFile,
    LogFileInvalid,
    SnapshotLine,
)
from halfmoon.schemas.codec import encode
from halfmoon.schemas.decisions import Decision, SetTimer
from halfmoon.schemas.events import ClusterConfigured, Event, Stamped, StateDigested

Identity = tuple[int, int]


class Divergence(msgspec.Struct, kw_only=True):
    """The first place where replay and record differ; a decision that is None is not there."""

    seq: int
    position: int
    event: Event | None
    recorded: Decision | None
    computed: Decision | None


class Verification(msgspec.Struct, kw_only=True):
    """The result of comparing a log with its replay."""

    events: int
    #: Recorded, and equal to what was computed.
    decisions: int
    #: Computed, and newer than every recorded one.
    unpublished: int
    #: Computed, and older than the oldest decision that had not expired when the log was saved.
    expired: int
    #: Events before the one that begins the log, when its head is gone: not replayed.
    passed_over: int
    #: Digests that conductors of this very code published, and that were found again; those that differ.
    states: int
    states_differ: list[StateDigested]
    #: Which code began the log ("": not in the file), and which this is.
    log_code: str
    replay_code: str
    identical: bool
    first_divergence: Divergence | None
    #: Of every decision that was computed, timers too, in order; of the state after the last event.
    digest: str
    state_digest: str
    events_per_s: int


class Replay:
    """Iterating steps a core over a log: each line with the core's decisions on it (none but for an event).

    Raises LogFileInvalid: see `LogFile`, a gap, a beginning that is missing, messages of another version.
    `checked` runs the invariants after every step; `until` is the last event; `explain_requests`: see `Core`.
    """

    def __init__(
        self,
        log: LogFile,
        *,
        checked: bool = False,
        until: int | None = None,
        explain_requests: Explains = explain_none,
    ) -> None:
        self.core = Core(checked=checked)
        self.core.explain_requests = explain_requests
        self._log = log
        self._checked = checked
        self._until = until
        #: Events at the head of the file, before the one that begins the log.
        self.passed_over = 0
        self._from_snapshot = False
        #: How the decisions seen so far compare with the recorded ones.
        self.compared = Compared(log.header.first_decision)

    def __iter__(self) -> Iterator[tuple[Line, list[Decision]]]:
        for line in self._lines():
            decisions: list[Decision] = []
            if isinstance(line, EventLine):
                decisions = self._step(line)
            elif isinstance(line, SnapshotLine):
                self._restore(line)
            self.compared.see(line, decisions)
            yield self._in_log_time(line), decisions

    def _in_log_time(self, line: Line) -> Line:
        """The line at its time by the log's own clock: a step of the server's clock lasts no time at all."""
        state = self.core.state
        if not state.clock_lead_ns or isinstance(line, SnapshotLine):
            return line
        return msgspec.structs.replace(line, at_ns=state.log_ns(line.at_ns))

    def _step(self, line: EventLine) -> list[Decision]:
        try:
            return self.core.step(Stamped(seq=line.seq, at_ns=line.at_ns, event=line.event))
        except (AssertionError, LookupError, ArithmeticError) as problem:
            # After a log's own beginning this is a fault of the core; a snapshot in a file may say anything.
            if not self._from_snapshot:
                raise
            raise LogFileInvalid(
                f"{self._log.path}: its snapshot does not fit event {line.seq}: {repr(problem)[:200]}"
            ) from None

    def _lines(self) -> Iterator[Line]:
        """The lines from the log's first event on, without a gap."""
        header, path = self._log.header, self._log.path
        if header.log_version not in (0, *LOG_VERSIONS_READ):
            raise LogFileInvalid(
                f"{path}: log version {header.log_version}, begun by halfmoon {header.code_version}: replay it with "
                f"that one; this is {version('halfmoon')} and reads log version {LOG_VERSIONS_READ[-1]} and older"
            )
        seq = 0
        for line in self._log.lines():
            if isinstance(line, EventLine | InvalidLine):
                if self._until is not None and line.seq > self._until:
                    return
                if seq and line.seq != seq + 1:
                    raise LogFileInvalid(f"{path}: events {seq + 1} to {line.seq - 1} are missing")
                if seq == 0 and not self._begins(line):
                    self.passed_over += 1
                    continue
                seq = line.seq
            elif isinstance(line, SnapshotLine):
                if seq:
                    raise LogFileInvalid(f"{path}: a snapshot after event {seq}")
                seq = line.seq
            if seq:
                yield line
        if seq == 0:
            raise LogFileInvalid(
                f"{path}: its head is gone, and neither a snapshot nor an event begins what is left"
            )

    @staticmethod
    def _begins(line: EventLine | InvalidLine) -> bool:
        """True where a core that knows nothing may start: at the very first event, or where a log begins again."""
        return line.seq == 1 or (isinstance(line, EventLine) and isinstance(line.event, ClusterConfigured))

    def _restore(self, line: SnapshotLine) -> None:
        self._from_snapshot = True
        try:
            explain_requests = self.core.explain_requests
            self.core = Core.restore(line.snapshot, checked=self._checked, examined=True)
            self.core.explain_requests = explain_requests
        except SnapshotInvalid as problem:
            raise LogFileInvalid(
                f"{self._log.path}: its snapshot cannot be read ({problem}); it was saved by halfmoon "
                f"{self._log.header.saved_by}"
            ) from None
        if self.core.seq > line.seq:
            raise LogFileInvalid(f"{self._log.path}: its snapshot is of {self.core.seq}, not {line.seq}")


class Compared:
    """Decisions against decisions, as they come."""

    def __init__(self, first: Identity | None = None) -> None:
        self.events = 0
        #: Computed, and older than the oldest decision that had not expired.
        self.expired = 0
        self._first = first or (0, -1)
        #: Recorded, and equal to what was computed.
        self.equal = 0
        self._digest = hashlib.blake2b(digest_size=16)
        #: Computed decisions that were not met yet, with a hash; those met, for the case that they come again.
        self._open: dict[Identity, tuple[Decision, int]] = {}
        self._met: dict[Identity, int] = {}
        self._newest: Identity = (0, -1)
        self._different: Divergence | None = None

    def see(self, line: Line, decisions: list[Decision]) -> None:
        if isinstance(line, EventLine):
            self.events += 1
            for position, decision in enumerate(decisions):
                encoded = encode(decision)
                self._digest.update(encoded)
                if isinstance(decision, SetTimer):
                    continue
                if (line.seq, position) < self._first:
                    self.expired += 1
                else:
                    self._open[(line.seq, position)] = (decision, hash(encoded))
        elif isinstance(line, DecisionLine):
            self._met_one(line)
        elif isinstance(line, InvalidLine):
            self.events += 1

    def _met_one(self, line: DecisionLine) -> None:
        identity = (line.cause_seq, line.position)
        self._newest = max(self._newest, identity)
        computed, name = self._open.pop(identity, (None, 0))
        if computed == line.decision:
            self._met[identity] = name
            self.equal += 1
        elif self._different is None and (
            computed is not None or self._met.get(identity) != hash(encode(line.decision))
        ):
            self._different = Divergence(
                seq=line.cause_seq,
                position=line.position,
                event=None,
                recorded=line.decision,
                computed=computed,
            )

    @property
    def different(self) -> bool:
        """A recorded decision is not the computed one. (Whether one is missing is known at the end.)"""
        return self._different is not None

    @property
    def divergence(self) -> Divergence | None:
        """The first, of all seen so far; `event` is left out."""
        found = self._different
        missing = min((identity for identity in self._open if identity < self._newest), default=None)
        if missing is not None and (found is None or missing < (found.seq, found.position)):
            seq, position = missing
            computed = self._open[missing][0]
            return Divergence(seq=seq, position=position, event=None, recorded=None, computed=computed)
        return found

    @property
    def unpublished(self) -> int:
        """Computed, and newer than every recorded one."""
        return sum(identity > self._newest for identity in self._open)

    def digest(self) -> str:
        return self._digest.hexdigest()


class States:
    """Digests that conductors published of their states, against ours: a stricter look than decisions alone.

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
        if (
            isinstance(said, StateDigested)
            and said.code_version == code_version()
            and said.at_seq in self._ours
        ):
            if said.digest == self._ours[said.at_seq]:
                self.equal += 1
            else:
                self.differ.append(said)


def verify(log: LogFile, *, checked: bool = False, until: int | None = None) -> Verification:
    """Replay `log` up to its end, event `until`, or the first decision that differs."""
    started_s = time.monotonic()
    replay = Replay(log, checked=checked, until=until)
    states, compared = States(), replay.compared
    for line, _ in replay:
        if isinstance(line, EventLine):
            states.see(line, replay.core)
        elif compared.different:
            break
    divergence = compared.divergence
    if divergence is not None:
        divergence.event = _event(log, divergence.seq)
    return Verification(
        events=compared.events,
        decisions=compared.equal,
        unpublished=compared.unpublished,
        expired=compared.expired,
        passed_over=replay.passed_over,
        states=states.equal,
        states_differ=states.differ,
        log_code=log.header.code_version,
        replay_code=code_version(),
        identical=divergence is None and not states.differ,
        first_divergence=divergence,
        digest=compared.digest(),
        state_digest=replay.core.digest(),
        events_per_s=int(compared.events / max(time.monotonic() - started_s, 1e-9)),
    )


def _event(log: LogFile, seq: int) -> Event | None:
    for line in log.lines():
        if isinstance(line, EventLine) and line.seq >= seq:
            return line.event if line.seq == seq else None
    return None
