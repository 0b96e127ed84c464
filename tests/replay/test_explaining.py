"""Lives and their grounds: what is explained is what was decided, and what happened stands beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from conductor_scripts import MS, Script, arrived, decode, finished, keys, prefill, prefilled, stored
from recorded import HEADER, lines_of, saved

from halfmoon.conductor.core.admission import Placement, Refusal
from halfmoon.conductor.core.explanation import Explanation
from halfmoon.conductor.core.placement.policies import POLICIES, Least
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import explained
from halfmoon.conductor.replay.histories import RequestHistories, request_histories
from halfmoon.conductor.replay.logfile import DecisionLine, EventLine, Line, LogFile
from halfmoon.conductor.replay.reasons import decode_reasons, prefill_reasons
from halfmoon.conductor.replay.verify import Replay
from halfmoon.schemas.decisions import FailRequest, RejectRequest, SetTimer, StartMixed, StartPrefill
from halfmoon.schemas.events import FrontendJoined, WorkerDraining, WorkerLeft
from halfmoon.schemas.policy import Policy
from tests.lengths import seeds

STORIES = Path(__file__).parent / "stories"


@pytest.mark.parametrize("seed", seeds(2, of=6))
def test_every_placement_and_refusal_is_explained_by_what_it_was_decided_on(
    tmp_path: Path, seed: int
) -> None:
    log = saved(tmp_path / "log.jsonl", lines_of(seed))
    replay = Replay(log, explain_requests=explain_all)
    explained_seqs = decided = ruled = mixed = 0
    for line, decisions in replay:
        if not isinstance(line, EventLine):
            continue
        notes = {note.request_id: note for note in replay.core.notes}
        for decision in decisions:
            if (
                isinstance(decision, StartPrefill | StartMixed | RejectRequest)
                and decision.request_id in notes
            ):
                why = notes.pop(decision.request_id)
                decided += 1
                assert (why.seq, why.at_ns) == (line.seq, replay.core.state.at_ns)
                if isinstance(decision, StartMixed):
                    assert isinstance(why.verdict, Placement)
                    assert why.verdict.mixed
                    both = why.verdict.prefill.worker_id, why.verdict.decode.worker_id
                    assert both == (decision.worker_id, decision.worker_id)
                    assert decision.worker_id in [c.worker_id for c in why.mixed]
                    mixed += 1
                elif isinstance(decision, StartPrefill):
                    assert isinstance(why.verdict, Placement)
                    chosen, other = why.verdict.prefill, why.verdict.decode
                    decode_id = "" if decision.answers else decision.decode_worker_id
                    assert (chosen.worker_id, other.worker_id) == (decision.worker_id, decode_id)
                    assert decision.fetches == chosen.fetches
                    if chosen.reference is None:
                        assert chosen in why.prefill
                    else:  # it was looked for at the chosen worker alone
                        assert [
                            each.prefill_ns > chosen.prefill_ns
                            for each in why.prefill
                            if (each.worker_id, each.queue_ns, each.fetches)
                            == (chosen.worker_id, chosen.queue_ns, chosen.fetches)
                        ] == [True]
                    assert decision.answers or other in why.decode
                    assert decision.predicted.prefill_ns == chosen.prefill_ns
                    reasons = prefill_reasons(why, chosen.worker_id)
                    assert list(sorted(reasons)) == [c.worker_id for c in why.prefill]
                    assert all(reasons.values())
                    assert all(decode_reasons(why, other.worker_id).values())
                    ruled += _by_rule(why, chosen.worker_id, other.worker_id)
                else:
                    assert isinstance(why.verdict, Refusal)
                    assert (why.verdict.reason, why.verdict.message) == (decision.reason, decision.message)
            elif isinstance(decision, StartPrefill | StartMixed):
                raise AssertionError(("not explained", decision))
        explained_seqs += len(notes)
        assert all(note.verdict is None for note in notes.values()), "those that wait"
    assert decided > 30
    # These two choose by no measure; a log may have had one of them nearly all the time.
    assert ruled + mixed >= 5 or {policy.name for policy in policies(log)} & {"random", "round_robin"}


def _by_rule(why: Explanation, prefill_id: str, decode_id: str) -> bool:
    """That the winners are those that the words about them are made by, where it is not drawn."""
    rules = POLICIES[why.policy]
    if not isinstance(rules.prefill, Least) or not isinstance(rules.decode, Least):
        return False
    ours, theirs = rules.prefill.measures, rules.decode.measures
    open_ = [c for c in why.prefill if not c.full] if not why.lost_reason else why.prefill
    first = min(open_, key=lambda c: (*(measure.of(c) for measure in ours), c.worker_id))
    assert first.worker_id == prefill_id, why
    roomy = [c for c in why.decode if c.room and (why.lost_reason or not c.full)]
    if roomy:
        best = min(roomy, key=lambda c: (*(measure.of(c) for measure in theirs), c.worker_id))
        assert best.worker_id == decode_id, why
    return True


def policies(log: LogFile) -> list[Policy]:
    return [
        li.event.policy for li in log.lines() if isinstance(li, EventLine) and hasattr(li.event, "policy")
    ]


@pytest.mark.parametrize("seed", seeds(2, of=6))
def test_lives_end_as_the_core_counts_them(tmp_path: Path, seed: int) -> None:
    log = saved(tmp_path / "log.jsonl", lines_of(seed, chaos_s=20, calm_s=5))
    replay = Replay(log)
    found = request_histories(replay)
    # A request that failed may be sent again, and fail again: it is one life, and counted each time.
    told = [
        d.decision.request_id
        for d in log.lines()
        if isinstance(d, DecisionLine) and isinstance(d.decision, FailRequest)
    ]
    again = len(told) - len(set(told))
    counters, state = replay.core.state.counters, replay.core.state
    endings = [history.ending for history in found.of.values()]
    assert len(endings) > 50
    assert endings.count("finished") == counters.finished
    assert endings.count("rejected") == sum(counters.rejected.values())
    assert endings.count("failed") + again == counters.failed
    assert [key for key, history in found.of.items() if history.ending == "open"] == list(state.requests)
    assert sum(len(history.attempts) for history in found.of.values()) == counters.placed
    for history in found.of.values():
        for attempt in history.attempts:
            is_open = attempt.order.order_id in state.orders
            assert is_open == (attempt.end_ns == 0)
            assert bool(attempt.lost) == (not is_open and attempt.finished is None)


def story(tmp_path: Path, script: Script, *, request_id: str = "r1") -> str:
    lines: list[Line] = []
    for stamped, decisions in zip(script.log, script.decided, strict=True):
        lines.append(EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=stamped.event))
        lines += [
            DecisionLine(cause_seq=stamped.seq, position=position, at_ns=stamped.at_ns, decision=decision)
            for position, decision in enumerate(decisions)
            if not isinstance(decision, SetTimer)
        ]
    return explained(told(saved(tmp_path / "log.jsonl", lines, HEADER), request_id).of[request_id]) + "\n"


def told(log: LogFile, request_id: str) -> RequestHistories:
    return request_histories(Replay(log, explain_requests=lambda name: name == request_id))


def test_a_request_that_was_placed_twice_is_told_whole(tmp_path: Path) -> None:
    script = Script(
        prefill(0),
        prefill(1),
        prefill(2),
        decode(0),
        FrontendJoined(frontend_id="f1", incarnation="i1"),
    )
    script(stored("p1", keys(5)))
    script(WorkerDraining(worker_id="p2", incarnation="i1"))
    script(arrived("r1", tokens=1_000))
    script(WorkerLeft(worker_id="p1"), 20 * MS)
    order = f"{script.core.seq}-1"
    happened = {
        "queue_ns": 1 * MS,
        "transfer_ns": 2 * MS,
        "compute_ns": 90 * MS,
        "pushed_bytes": 700,
        "push_ns": 3 * MS,
    }
    script(prefilled(order, worker_id="p0", cached_local_tokens=100, **happened), 95 * MS)
    script(finished(order, ttft_ns=93 * MS, tbt_ns=12 * MS), 900 * MS)
    assert story(tmp_path, script) == (STORIES / "placed_twice.txt").read_text()


def test_a_refused_request_says_what_each_candidate_would_have_taken(tmp_path: Path) -> None:
    script = Script(
        prefill(0),
        decode(0),
        FrontendJoined(frontend_id="f1", incarnation="i1"),
        ttft_slo_ns=50 * MS,
    )
    script(arrived("r1", tokens=1_000))
    assert story(tmp_path, script) == (STORIES / "refused.txt").read_text()


def test_a_request_whose_answer_was_lost_lives_again(tmp_path: Path) -> None:
    script = Script(prefill(0), decode(0), decode(1), FrontendJoined(frontend_id="f1", incarnation="i1"))
    request = arrived("r1", tokens=300)
    script(request)
    order = f"{script.core.seq}-1"
    script(prefilled(order), 50 * MS)
    script(finished(order, ttft_ns=50 * MS), 100 * MS)
    script(request, 10 * MS)  # word for word: nothing happens
    script(WorkerLeft(worker_id="d0"), 10 * MS)
    script(msgspec.structs.replace(request, answer_lost=True), 10 * MS)
    text = story(tmp_path, script)
    assert text.count("placed on ") == 2
    assert "(its answer was lost)" in text
    assert text.endswith("not ended by the end of the log\n")


def test_watching_changes_neither_decisions_nor_state(tmp_path: Path) -> None:
    log = saved(tmp_path / "log.jsonl", lines_of(11))
    one, other = Replay(log), Replay(log, explain_requests=explain_all)
    assert [decisions for _, decisions in one] == [decisions for _, decisions in other]
    assert one.core.digest() == other.core.digest()
    assert msgspec.to_builtins(one.core.notes) == []
