"""`halfmoon replay` and `halfmoon events show`: what they print, and one line for what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from recorded import HEADER, decisions_in, lines_of, saved, status_of

from halfmoon.conductor.code_version import code_version
from halfmoon.conductor.replay.logfile import DecisionLine, EventLine
from halfmoon.schemas.decisions import CancelOrder

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("commands") / "log.jsonl.zst", lines_of(5)).path


def test_a_whole_log_is_identical(file: Path, capsys: Said) -> None:
    lines = lines_of(5)
    decisions = len(decisions_in(lines))
    assert status_of("replay", file) == 0
    counts = f"{len(lines) - decisions:,} events, {decisions:,} decisions"
    assert capsys.readouterr().out.startswith(f"{counts}, identical (")
    assert status_of("replay", file, "--json") == 0
    verdict = json.loads(capsys.readouterr().out)
    assert {"events", "decisions", "identical", "first_divergence", "digest", "events_per_s"} <= set(verdict)
    assert (verdict["identical"], verdict["decisions"]) == (True, decisions)


def test_a_divergence_is_shown_side_by_side_with_status_1(tmp_path: Path, capsys: Said) -> None:
    lines = lines_of(5)
    place = decisions_in(lines)[40]
    original = lines[place]
    assert isinstance(original, DecisionLine)
    lines[place] = msgspec.structs.replace(original, decision=CancelOrder(order_id="9-9", worker_id="w"))
    path = saved(tmp_path / "log.jsonl", lines, HEADER).path
    assert status_of("replay", path) == 1
    first, where, event, recorded, computed, code = capsys.readouterr().out.splitlines()
    assert first.endswith(" decisions, then they part")
    assert where == f"first divergence: decision {original.position} on event {original.cause_seq}"
    seen = next(li.event for li in lines if isinstance(li, EventLine) and li.seq == original.cause_seq)
    assert event.startswith(f"  event     {type(seen).__name__} ")
    assert recorded == "  recorded  CancelOrder order_id=9-9 worker_id=w"
    assert computed.startswith(f"  computed  {type(original.decision).__name__} ")
    assert code == f"the log was begun by halfmoon t, this is {code_version()}"
    assert status_of("replay", path, "--until", original.cause_seq - 1) == 0
    capsys.readouterr()
    assert status_of("replay", path, "--state") == 1
    assert f"from event {original.cause_seq} on the recorded decisions are others" in capsys.readouterr().err


def test_state_and_explanation_at_one_place(file: Path, capsys: Said) -> None:
    assert status_of("replay", file, "--until", 200, "--state", "--json") == 0
    state = json.loads(capsys.readouterr().out)
    assert 199 <= state["seq"] <= 200
    request = next(iter(state["requests"]))
    assert status_of("replay", file, "--explain", request) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"request {request}, event ")
    assert "first token" in text
    assert status_of("replay", file, "--explain", request, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    decided = [why for why in told["why"] if why["verdict"] is not None]  # the others say why it waited
    assert (told["arrived"]["request_id"], len(decided)) == (request, len(told["placed"]) or 1)


def test_pictures_are_written(file: Path, tmp_path: Path, capsys: Said) -> None:
    html, trace = tmp_path / "run.html", tmp_path / "run.json.gz"
    assert status_of("replay", file, "--html", html, "--perfetto", trace) == 0
    assert capsys.readouterr().out.count(" requests, ") == 2
    assert html.read_text().startswith("<!doctype html>")
    assert trace.read_bytes()[:2] == b"\x1f\x8b"


def test_show_prints_a_line_for_each(file: Path, capsys: Said) -> None:
    assert status_of("events", "show", file) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(lines_of(5))
    assert " ClusterConfigured code_version=t " in printed[0] or "no event" in printed[0]
    assert status_of("events", "show", file, "--from", 300, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert min(row.get("seq", row.get("cause_seq")) for row in rows) >= 299
    assert {row["line"] for row in rows} == {"event", "decision", "invalid"}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("replay", "FILE", "--explain", "nobody"), "--explain nobody: no such request in FILE"),
        (("replay", "FILE", "--until", "0"), "--until 0: the log begins at 1"),
        (
            ("replay", "FILE", "--state", "--explain", "r1"),
            "--state, --explain, --what-if, and --html with --perfetto",
        ),
        (
            ("replay", "FILE", "--html", "/no/such/place"),
            "[Errno 2] No such file or directory: '/no/such/place'",
        ),
        (("replay", "/no/such/file"), "[Errno 2] No such file or directory: '/no/such/file'"),
        (("events", "save"), "events save: name a FILE"),
        (("events", "show", "FILE", "--store", "x"), "--store: only to save; show takes none"),
        (("events", "save", "x", "--store", "/no/such/place"), "/no/such/place: there is no event log in it"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    file: Path, capsys: Said, words: tuple[str, ...], complaint: str
) -> None:
    assert status_of(*(word.replace("FILE", str(file)) for word in words)) == 1
    said = capsys.readouterr()
    if complaint.endswith("in FILE"):
        complaint = complaint.replace("FILE", str(file))
    assert said.err.startswith(f"halfmoon: {complaint}")
    assert said.err.count("\n") == 1
