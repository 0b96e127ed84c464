"""Replay against record: equal logs are identical, and every way to differ is found at its place.

Invariant I104 of `docs/invariants.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded import HEADER, decisions_in, lines_of, saved

from halfmoon.conductor.code_version import code_version
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.replay.logfile import (
    DecisionLine,
    EventLine,
    InvalidLine,
    Line,
    LogFileInvalid,
    SnapshotLine,
)
from halfmoon.conductor.replay.verify import Verification, verify
from halfmoon.schemas.decisions import CancelOrder, StartPrefill
from halfmoon.schemas.events import ClusterConfigured, Stamped, StateDigested
from tests.lengths import seeds

CHANGED = CancelOrder(order_id="0-0", worker_id="nobody")


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return lines_of(4)


def judged(tmp_path: Path, lines: list[Line]) -> Verification:
    return verify(saved(tmp_path / "log.jsonl.zst", lines), checked=True)


def identity(line: Line) -> tuple[int, int]:
    assert isinstance(line, DecisionLine)
    return line.cause_seq, line.position


def parted_at(verdict: Verification) -> tuple[int, int]:
    assert not verdict.identical
    assert verdict.first_divergence is not None
    return verdict.first_divergence.seq, verdict.first_divergence.position


@pytest.mark.parametrize("seed", seeds(2, of=5))
def test_a_recorded_log_replays_identically(tmp_path: Path, seed: int) -> None:
    lines = lines_of(seed, chaos_s=10, calm_s=5)
    verdict = judged(tmp_path, lines)
    assert (verdict.identical, verdict.first_divergence, verdict.unpublished) == (True, None, 0)
    assert verdict.decisions == len(decisions_in(lines)) > 50
    assert verdict.events == len(lines) - verdict.decisions
    assert verify(saved(tmp_path / "plain.jsonl", lines)).digest == verdict.digest


def test_a_decision_that_was_recorded_otherwise_is_named_with_its_event(
    tmp_path: Path, lines: list[Line]
) -> None:
    place = decisions_in(lines)[60]
    original = lines[place]
    assert isinstance(original, DecisionLine)
    verdict = judged(
        tmp_path, [*lines[:place], msgspec.structs.replace(original, decision=CHANGED), *lines[place + 1 :]]
    )
    assert parted_at(verdict) == identity(original)
    found = verdict.first_divergence
    assert found is not None
    assert (found.recorded, found.computed) == (CHANGED, original.decision)
    assert found.event == next(
        li.event for li in lines if isinstance(li, EventLine) and li.seq == original.cause_seq
    )
    assert verdict.decisions == 60


def test_one_field_of_a_prediction_is_enough_to_part(tmp_path: Path, lines: list[Line]) -> None:
    place = next(
        place
        for place in decisions_in(lines)[20:]
        if isinstance(line := lines[place], DecisionLine) and isinstance(line.decision, StartPrefill)
    )
    original = lines[place]
    assert isinstance(original, DecisionLine)
    assert isinstance(original.decision, StartPrefill)
    predicted = msgspec.structs.replace(
        original.decision.predicted, queue_ns=original.decision.predicted.queue_ns + 1
    )
    other = msgspec.structs.replace(original.decision, predicted=predicted)
    lines = [*lines[:place], msgspec.structs.replace(original, decision=other), *lines[place + 1 :]]
    assert parted_at(judged(tmp_path, lines)) == identity(original)


def test_a_decision_that_is_missing_between_others_is_a_divergence(tmp_path: Path, lines: list[Line]) -> None:
    place = decisions_in(lines)[30]
    verdict = judged(tmp_path, lines[:place] + lines[place + 1 :])
    assert parted_at(verdict) == identity(lines[place])
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.recorded is None


def test_a_missing_decision_comes_before_a_later_changed_one(tmp_path: Path, lines: list[Line]) -> None:
    missing, changed = decisions_in(lines)[30], decisions_in(lines)[40]
    other = lines[changed]
    assert isinstance(other, DecisionLine)
    lines = list(lines)
    lines[changed] = msgspec.structs.replace(other, decision=CHANGED)
    gone = lines.pop(missing)
    assert parted_at(judged(tmp_path, lines)) == identity(gone)


def test_a_decision_that_nothing_caused_is_a_divergence(tmp_path: Path, lines: list[Line]) -> None:
    decisions = decisions_in(lines)
    causes = [identity(lines[place])[0] for place in decisions]
    # After the last decision of an event: one in between would push the next out of its place.
    last = next(i for i in range(30, len(causes)) if causes[i + 1] != causes[i])
    place, seq = decisions[last], causes[last]
    extra = DecisionLine(cause_seq=seq, position=900, at_ns=0, decision=CHANGED)
    verdict = judged(tmp_path, [*lines[: place + 1], extra, *lines[place + 1 :]])
    assert parted_at(verdict) == (seq, 900)
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.computed is None


def test_only_the_newest_decisions_may_be_unpublished(tmp_path: Path, lines: list[Line]) -> None:
    last = decisions_in(lines)[-3:]
    verdict = judged(tmp_path, [line for place, line in enumerate(lines) if place not in last])
    assert (verdict.identical, verdict.unpublished) == (True, 3)


def test_a_decision_stored_twice_must_be_the_same(tmp_path: Path, lines: list[Line]) -> None:
    first = lines[decisions_in(lines)[10]]
    assert isinstance(first, DecisionLine)
    again = judged(tmp_path, [*lines, first])
    assert (again.identical, again.decisions) == (True, len(decisions_in(lines)))
    other = judged(tmp_path, [*lines, msgspec.structs.replace(first, decision=CHANGED)])
    assert parted_at(other) == identity(first)


def test_a_log_whose_head_is_gone_replays_from_its_snapshot(tmp_path: Path, lines: list[Line]) -> None:
    cut = next(line.seq for line in lines[len(lines) // 2 :] if isinstance(line, EventLine))
    core = Core()
    for line in lines:
        if isinstance(line, EventLine) and line.seq <= cut:
            core.step(Stamped(seq=line.seq, at_ns=line.at_ns, event=line.event))
    rest = [line for line in lines if (getattr(line, "seq", 0) or getattr(line, "cause_seq", 0)) > cut]
    verdict = judged(tmp_path, [SnapshotLine(seq=cut, snapshot=core.snapshot()), *rest])
    assert verdict.identical
    assert verdict.decisions == len(decisions_in(rest)) > 0
    assert verdict.state_digest == judged(tmp_path, lines).state_digest
    with pytest.raises(
        LogFileInvalid, match="its head is gone, and neither a snapshot nor an event begins what is left"
    ):
        judged(tmp_path, rest)
    with pytest.raises(LogFileInvalid, match=r"snapshot cannot be read .* saved by halfmoon t"):
        judged(tmp_path, [SnapshotLine(seq=cut, snapshot=b"nonsense"), *rest])


def test_a_log_that_begins_anew_replays_from_there(tmp_path: Path, lines: list[Line]) -> None:
    cut = next(line.seq for line in lines[len(lines) // 2 :] if isinstance(line, EventLine))
    old = [line for line in lines if 0 < (getattr(line, "seq", 0) or getattr(line, "cause_seq", 0)) <= cut]
    place = next(p for p, line in enumerate(old) if p > 20 and isinstance(line, EventLine))
    headless = old[place:]
    passed_over = sum(not isinstance(line, DecisionLine) for line in headless)
    anew = [
        msgspec.structs.replace(line, seq=line.seq + cut)
        if isinstance(line, EventLine | InvalidLine)
        else msgspec.structs.replace(line, cause_seq=line.cause_seq + cut)
        if isinstance(line, DecisionLine)
        else line
        for line in lines_of(4, chaos_s=5, calm_s=0)
    ]
    # Orders are named after the event that caused them: only what needs no order is the same there.
    assert isinstance(anew[0], EventLine)
    anew = anew[: next(p for p, line in enumerate(anew) if isinstance(line, DecisionLine))]
    verdict = judged(tmp_path, [*headless, *anew])
    assert verdict.identical
    assert (verdict.passed_over, verdict.events) == (passed_over, len(anew))


def test_states_that_conductors_of_this_code_said_are_found_again(tmp_path: Path, lines: list[Line]) -> None:
    core, events = Core(), [line for line in lines if isinstance(line, EventLine)]
    configured = events[0].event
    assert isinstance(configured, ClusterConfigured)
    policy = msgspec.structs.replace(configured.policy, digest_events=100, heartbeat_ns=60_000_000_000)
    first = msgspec.structs.replace(configured, policy=policy)
    logged: list[Line] = []
    for seq, event in enumerate([first, *(line.event for line in events[1:250])], 1):
        core.step(Stamped(seq=seq, at_ns=events[0].at_ns, event=event))
        logged.append(EventLine(seq=seq, at_ns=events[0].at_ns, event=event))
        if seq == 200:
            ours = core.digest()
    said = StateDigested(
        conductor_id="c1", incarnation="i", code_version=code_version(), at_seq=200, digest=ours
    )
    strange = msgspec.structs.replace(said, conductor_id="c2", digest="0")
    others = msgspec.structs.replace(strange, code_version="9.9")

    def with_words(*words: StateDigested) -> Verification:
        more = [EventLine(seq=251 + n, at_ns=events[0].at_ns, event=word) for n, word in enumerate(words)]
        return judged(tmp_path, [*logged, *more])

    verdict = with_words(said, others)
    assert (verdict.identical, verdict.states, verdict.states_differ) == (True, 1, [])
    verdict = with_words(said, strange)
    assert (verdict.identical, verdict.first_divergence, verdict.states_differ) == (False, None, [strange])


def test_events_that_are_missing_in_between_are_named(tmp_path: Path, lines: list[Line]) -> None:
    line = next(li for p, li in enumerate(lines) if p > 50 and isinstance(li, EventLine))
    with pytest.raises(LogFileInvalid, match=rf"events {line.seq} to {line.seq} are missing"):
        judged(tmp_path, [li for li in lines if li is not line and getattr(li, "cause_seq", 0) != line.seq])


def test_a_log_of_another_version_says_which_halfmoon_can(tmp_path: Path, lines: list[Line]) -> None:
    header = msgspec.structs.replace(HEADER, log_version=99, code_version="9.9")
    with pytest.raises(
        LogFileInvalid, match=r"log version 99, begun by halfmoon 9\.9: replay it with that one"
    ):
        verify(saved(tmp_path / "log.jsonl", lines, header))


def test_a_snapshot_that_contradicts_itself_or_its_log_is_refused(tmp_path: Path) -> None:
    lines = lines_of(5)
    core = Core()
    cut = 0
    while not core.state.orders:
        if isinstance(line := lines[cut], EventLine):
            core.step(Stamped(seq=line.seq, at_ns=line.at_ns, event=line.event))
        cut += 1
    version, state = msgspec.msgpack.decode(core.snapshot())

    def refusal(**changed: Any) -> str:
        snapshot = SnapshotLine(seq=core.seq, snapshot=msgspec.msgpack.encode([version, state | changed]))
        with pytest.raises(LogFileInvalid) as caught:
            verify(saved(tmp_path / "log.jsonl", [snapshot, *lines[cut:]]))
        return str(caught.value)

    assert "its parts contradict each other" in refusal(orders={})
    assert "its snapshot is of 1000000000000, not" in refusal(seq=10**12)
