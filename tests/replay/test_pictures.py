"""The timeline and what is drawn of it: the page holds everything and asks for nothing; the trace keeps its
form.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import orjson
import pytest
from recorded import lines_of, saved

from halfmoon.conductor.core.admission import Placement
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.logfile import EventLine, Line, ProgressLine
from halfmoon.conductor.replay.page import page
from halfmoon.conductor.replay.perfetto import trace
from halfmoon.conductor.replay.timeline import Timeline, timeline
from halfmoon.conductor.replay.verify import Replay
from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.events import PrefillFinished
from halfmoon.schemas.kv import KvLoaded, KvReady
from halfmoon.schemas.numbers import SECOND_NS
from tests.lengths import sizes

#: Seeds whose clusters lose workers, refuse requests and have real blocks, and whose server's clock nobody sets: the
#: KV progress that is made up here follows the stamps.
SEEDS = (1, 2, 10)


def with_progress(lines: list[Line]) -> list[Line]:
    """KV progress behind each placement: two chunks of two layers, pushed; two layers, loaded."""
    found: list[Line] = []
    events = [line for line in lines if isinstance(line, EventLine)]
    ends = {line.event.order_id: line for line in events if isinstance(line.event, PrefillFinished)}
    for line in lines:
        found.append(line)
        decision = getattr(line, "decision", None)
        if isinstance(decision, StartPrefill):
            begin_ns, each_ns = line.at_ns, 1_000_000
            if (end := ends.get(decision.order_id)) is not None:  # while it computed
                assert isinstance(end.event, PrefillFinished)
                each_ns = end.event.compute_ns // 6
                begin_ns = end.at_ns - end.event.push_ns - end.event.compute_ns
            order = {"order_id": decision.order_id, "blocks": 1}
            for number, (layer, block) in enumerate(itertools.product((0, 1), (0, 1))):
                ready = KvReady(**order, request_id=decision.request_id, layer=layer, first_block=block)
                found.append(ProgressLine(at_ns=begin_ns + each_ns * (1 + number), progress=ready))
            loaded = KvLoaded(**order, layer=0, first_block=0)
            found.append(ProgressLine(at_ns=begin_ns + each_ns // 2, progress=loaded))
    return found


@pytest.fixture(
    scope="module", params=[SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    log = saved(
        tmp_path_factory.mktemp("run") / "log.jsonl", with_progress(lines_of(request.param, chaos_s=40))
    )
    return timeline(Replay(log, explain_requests=explain_all))


def test_every_placement_has_its_bars_and_no_two_of_a_row_meet(run: Timeline) -> None:
    attempt = [order.order.order_id for history in run.histories for order in history.attempts]
    assert len(attempt) > 50
    assert [bar.order_id for bar in run.prefill] == attempt
    prefilled = {p.order.order_id for history in run.histories for p in history.attempts if p.prefilled}
    assert prefilled <= {bar.order_id for bar in run.decode} <= set(attempt)
    rows: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    for bar in [*run.prefill, *run.decode]:
        assert bar.parts == sorted(bar.parts), bar
        assert 0 <= bar.row < run.rows[bar.lane]
        rows[bar.lane, bar.row].append(bar.parts)
    for parts in rows.values():
        assert all(one[-1] <= other[0] for one, other in itertools.pairwise(sorted(parts)))


@pytest.mark.parametrize("seed", sizes(4, 5))
def test_a_clock_that_is_set_by_hours_takes_no_time_in_the_pictures(seed: int, tmp_path: Path) -> None:
    log = saved(tmp_path / "log.jsonl", lines_of(seed, chaos_s=40))
    stamps = [line.at_ns for line in log.lines() if isinstance(line, EventLine)]
    hour_ns = 3600 * SECOND_NS
    assert max(abs(b - a) for a, b in itertools.pairwise(stamps)) > hour_ns, "a clock was set"
    run = timeline(Replay(log, explain_requests=explain_all))
    assert 0 < run.end_ns - run.start_ns < hour_ns
    for bar in [*run.prefill, *run.decode]:
        assert bar.parts == sorted(bar.parts), bar
        assert 0 <= bar.parts[0] <= bar.parts[-1] <= run.end_ns - run.start_ns


def test_bars_say_what_the_workers_said(run: Timeline) -> None:
    bars = {bar.order_id: bar for bar in run.prefill}
    compared = 0
    for history in run.histories:
        for attempt in history.attempts:
            bar, then = bars[attempt.order.order_id], attempt.prefilled
            assert bar.parts[0] == attempt.at_ns - run.start_ns
            if then is not None:
                assert bar.parts[3] == attempt.prefill_end_ns - run.start_ns
                assert bar.parts[2] - bar.parts[1] <= then.compute_ns
                compared += bar.parts[2] - bar.parts[1] == then.compute_ns
                if attempt.order.worker_id == attempt.order.decode_worker_id:
                    continue  # a mixed worker's KV goes nowhere
                assert len(bar.marks) == 1, "loaded"
                assert len(bar.chunks) == 1, "two chunks"
    assert compared > 20


def test_losses_and_joins_are_marked_on_the_lane_that_they_are_of(run: Timeline) -> None:
    kinds = {happening.kind for happening in run.happenings}
    assert {"joined", "lost"} <= kinds
    for happening in run.happenings:
        assert happening.lane in run.lanes or happening.lane == ""
        assert 0 <= happening.at_ns <= run.end_ns - run.start_ns
    assert any(happening.kind == "lost" and happening.lane for happening in run.happenings)


def unpacked(text: str, name: str) -> Any:
    found = re.search(rf'id="{name}">([^<]*)</script>', text)
    assert found
    return orjson.loads(gzip.decompress(base64.b64decode(found[1])))


def test_the_page_is_whole_and_needs_nothing_from_outside(run: Timeline) -> None:
    text = page(run, title="a <run> & more")
    assert "<title>a &lt;run&gt; &amp; more</title>" in text
    plain = re.sub(r'<script type="application/octet-stream".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(
        r"https?:|//[a-z0-9.-]+\.[a-z]{2,}|\bsrc=|@import|url\(|<link|\bfetch\(|XMLHttp", plain
    )
    data, why = unpacked(text, "run"), unpacked(text, "why")
    requests = data["requests"]
    assert requests["id"] == [history.arrived.request_id for history in run.histories]
    assert {len(column) for column in requests.values()} == {len(run.histories)}
    assert len(why) == len(run.histories)
    assert (len(data["prefill"]), len(data["decode"])) == (len(run.prefill), len(run.decode))
    assert sum(ending == "rejected" for ending in requests["ending"]) > 0
    for history, notes in zip(run.histories, why, strict=True):
        assert len(notes) == len(history.why) > 0
        for note, grounds in zip(notes, history.why, strict=True):
            candidates = [row for row in note["prefill"] if row[0] != "then"]
            assert [cells[0] for _, cells in candidates] == [c.worker_id for c in grounds.prefill]
            assert all(len(cells) == 9 for _, cells in note["prefill"])
            assert all(len(cells) == 7 for _, cells in note["decode"])
            mixed = isinstance(grounds.verdict, Placement) and grounds.verdict.mixed
            won = mixed or any(row[0] == "won" for row in note["prefill"])
            assert note["refused"] == (not won)
    lanes = range(len(data["lanes"]))
    assert all(
        bar[2] in lanes and bar[0] in range(len(run.histories)) for bar in data["prefill"] + data["decode"]
    )
    curves = data["curves"]
    assert {len(curves[name]) for name in ("t", "requests", "blocks", "prompt", "cached")} == {
        len(run.samples)
    }


def test_the_trace_keeps_the_form(run: Timeline) -> None:
    content = orjson.loads(trace(run))
    events = content["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    processes = {
        e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"
    }
    assert list(processes.values()) == ["cluster", *run.lanes]
    phases: dict[str, int] = defaultdict(int)
    for event in events:
        phases[event["ph"]] += 1
        assert event["pid"] in processes
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append(
                (event["ts"], event["ts"] + event["dur"], event["name"])
            )
        if event["ph"] == "C":
            assert isinstance(event["args"]["value"], int | float)
    assert phases["b"] == phases["e"] > 0
    assert phases["s"] == phases["f"] > 0
    assert phases["i"] > 0
    for slices in threads.values():
        open_until: list[float] = []
        for begin, end, name in slices:  # as they stand in the file: a parent before its children
            while open_until and open_until[-1] <= begin + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, (name, begin, end, open_until)
            open_until.append(end)
    named = {name for slices in threads.values() for _, _, name in slices}
    assert {history.arrived.request_id for history in run.histories if history.attempts} <= named
    assert {"prefill", "delivery", "wait for KV", "decode", "chunk 0", "chunk 1"} <= named
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    assert all(starts[event["id"]] <= event["ts"] for event in events if event["ph"] == "f")
