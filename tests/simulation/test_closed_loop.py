"""Sessions in a closed loop: a turn comes after the answer to the one before it, and its pause."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from halfmoon.cli.commands import parser_of
from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.simulation import simulate as command
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival, TraceInvalid, faster, ordered, read_trace
from halfmoon.schemas.policy import Policy

S, MS = 1_000_000_000, 1_000_000
TWO = ClusterShape(prefill=2, decode=2)
CLOSED = RunOptions(closed_loop=True)


def turn(
    at_ns: int, tokens: int = 4_096, *, follows: int = -1, think_ns: int = 0, answer: int = 10
) -> Arrival:
    return Arrival(
        at_ns=at_ns, prompt_tokens=tokens, output_tokens=answer, follows=follows, think_ns=think_ns
    )


def played(arrivals: list[Arrival], run: RunOptions = CLOSED, **rules: int) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    policy = Policy(admission="none" if not rules else "predicted", **rules)
    simulate(arrivals, TWO, policy, LLAMA3_A800, run, outcomes=outcomes)
    assert len(outcomes) == len(arrivals)
    return outcomes


def test_a_turn_comes_its_pause_after_the_answer_before() -> None:
    # Recorded on a faster cluster: by its own times the second turn would come before the first answer.
    arrivals = [turn(0), turn(1, follows=0, think_ns=3 * S), turn(2, follows=1, think_ns=0), turn(5)]
    outcomes = played(arrivals)
    for place, before, think_ns in ((1, 0, 3 * S), (2, 1, 0)):
        assert outcomes[f"r{place}"].arrived_ns == outcomes[f"r{before}"].ended_ns + think_ns
    assert [outcomes["r0"].arrived_ns, outcomes["r3"].arrived_ns] == [0, 5]
    twice = played(faster(arrivals, 2.0))
    assert twice["r1"].arrived_ns == twice["r0"].ended_ns + 3 * S // 2


def test_two_turns_may_follow_one_answer() -> None:
    """A fork: both wait for the same one."""
    outcomes = played([turn(0), turn(1, follows=0, think_ns=S), turn(2, follows=0, think_ns=2 * S)])
    ended_ns = outcomes["r0"].ended_ns
    assert [outcomes["r1"].arrived_ns, outcomes["r2"].arrived_ns] == [ended_ns + S, ended_ns + 2 * S]


def test_a_session_goes_on_after_a_refusal() -> None:
    arrivals = [turn(0, 100_000), turn(1, 1_000, follows=0, think_ns=S)]
    outcomes = played(arrivals, ttft_slo_ns=2 * S)
    assert outcomes["r0"].end not in ("", "finished")
    assert outcomes["r1"].end == "finished"
    assert outcomes["r1"].arrived_ns == outcomes["r0"].ended_ns + S


def test_in_an_open_loop_nobody_waits() -> None:
    arrivals = [turn(0), turn(1, follows=0, think_ns=3 * S)]
    alone = [msgspec.structs.replace(each, follows=-1, think_ns=0) for each in arrivals]
    digests = {simulate(some, TWO, Policy(), LLAMA3_A800).digest for some in (arrivals, alone)}
    assert len(digests) == 1
    assert played(arrivals, RunOptions())["r1"].arrived_ns == 1


def test_sorted_arrivals_follow_whom_they_followed() -> None:
    # Two sessions, one behind the other, which overlap in time.
    made = [turn(7), turn(20, follows=0), turn(9), turn(11, follows=2), turn(30, follows=3)]
    found = ordered(made)
    assert [one.at_ns for one in found] == [0, 2, 4, 13, 23]
    assert [one.follows for one in found] == [-1, -1, 1, 0, 2]
    assert ordered([]) == []


def row(at_ms: int, **fields: object) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": 600, "output_length": 5, **fields}) + "\n"


def trace(folder: Path, *rows: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(rows))
    return path


def test_rows_say_whom_they_follow(tmp_path: Path) -> None:
    arrivals = read_trace(
        trace(
            tmp_path,
            row(0, session_id="a", think_ms=9),  # the first of its session: nobody is there
            row(1, session_id="b"),
            row(2, session_id="a", think_ms=1_500.5),
            row(3, session_id="b"),  # with its time alone
            row(4, session_id="b", think_ms=0, hash_ids=[1, 2]),
        )
    )
    assert [(one.follows, one.think_ns) for one in arrivals] == [
        (-1, 0),
        (-1, 0),
        (0, 1_500_500_000),
        (-1, 0),
        (3, 0),
    ]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row(0, think_ms=5), "think_ms: there is no session_id"),
        (row(0, session_id=1, think_ms=-1), "think_ms -1 is not within"),
    ],
)
def test_a_pause_that_is_none_is_refused_by_line(tmp_path: Path, bad: str, words: str) -> None:
    with pytest.raises(TraceInvalid, match=rf"trace\.jsonl:2: {words}"):
        read_trace(trace(tmp_path, row(0), bad))


def test_the_command_closes_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sessions = trace(
        tmp_path, *(row(at, session_id=at % 3, think_ms=60_000) for at in range(9)), row(10, session_id="x")
    )

    def run(*words: str) -> dict[str, float]:
        args = parser_of("simulate").parse_args(["--trace", str(sessions), "--json", *words])
        assert asyncio.run(command.run(args)) == 0
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    # Two pauses of a minute each follow each other.
    assert run("--closed-loop")["duration_s"] > 120 > run()["duration_s"]
    unsaid = trace(tmp_path, row(0), row(1))
    with pytest.raises(OptionInvalid, match="--closed-loop: no request of "):
        asyncio.run(command.run(parser_of("simulate").parse_args(["--trace", str(unsaid), "--closed-loop"])))
