"""Logs that real clusters left: every later commit decides as the conductors did that were there.

When the core is meant to decide otherwise: `make golden`.

Invariant I105 of `docs/invariants.md`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TypeVar

import pytest

from halfmoon.conductor.code_version import LOG_VERSION
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import explained
from halfmoon.conductor.replay.histories import RequestHistories, request_histories
from halfmoon.conductor.replay.logfile import DecisionLine, EventLine, LogFile, ProgressLine
from halfmoon.conductor.replay.page import page
from halfmoon.conductor.replay.perfetto import trace
from halfmoon.conductor.replay.text import duration
from halfmoon.conductor.replay.timeline import timeline
from halfmoon.conductor.replay.verify import Replay, verify
from halfmoon.schemas.decisions import MoveKv, StartDecode, StartPrefill
from halfmoon.schemas.events import KvMoved, WorkerLeft

Ordered = TypeVar("Ordered", StartDecode, StartPrefill, MoveKv)
FILES = sorted((Path(__file__).parent / "golden").glob("*.jsonl.zst"))


def lived(name: str) -> RequestHistories:
    return request_histories(Replay(golden(name), explain_requests=explain_all))


def golden(name: str) -> LogFile:
    return LogFile(Path(__file__).parent / "golden" / f"{name}.jsonl.zst")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.split(".")[0])
def test_every_decision_of_a_real_run_is_made_again(file: Path) -> None:
    log = LogFile(file)
    verdict = verify(log, checked=True)
    assert verdict.first_divergence is None, "the core decides otherwise; if it is meant to: make golden"
    assert verdict.identical
    assert verdict.unpublished == 0
    assert verdict.decisions > 50
    assert verdict.events == log.header.last_seq > 200


def test_there_are_logs() -> None:
    names = [file.name.removesuffix(".jsonl.zst") for file in FILES]
    assert names == ["attention", "lending", "log_version_1", "null", "smollm2"]


def test_a_log_of_the_first_version_still_replays() -> None:
    """Left by conductors whose messages were older; `make golden` cannot record it again."""
    header = golden("log_version_1").header
    assert (header.log_version, header.code_version) == (1, "0.1.0")
    assert header.log_version < LOG_VERSION
    assert verify(golden("log_version_1")).identical


def test_the_real_model_s_run_lost_workers_fetched_refused_and_cancelled() -> None:
    found = lived("smollm2")
    endings = Counter(history.ending for history in found.of.values())
    assert endings["finished"] >= 10
    assert endings["rejected"] == 3
    assert endings["cancelled"] == 1
    attempts = [attempt for history in found.of.values() for attempt in history.attempts]
    assert {attempt.lost for attempt in attempts} >= {"worker decode-1 was lost", "worker prefill-0 was lost"}
    assert any(p.prefilled and p.prefilled.cached_fetched_tokens for p in attempts)
    assert sum(isinstance(line, ProgressLine) for line in golden("smollm2").lines()) > 500


def test_beside_the_predictions_stands_what_the_real_model_did() -> None:
    told = 0
    for history in lived("smollm2").of.values():
        text = explained(history)
        last = history.attempts[-1] if history.attempts else None
        if last is not None and last.finished is not None:
            assert text.count("happened") >= 2
            assert f"finished after {duration(history.end_ns - history.arrived_ns)} (" in text
            told += last.finished.ttft_ns < 3 * last.order.predicted.ttft_ns
    assert told >= 10


def test_the_conductors_of_the_null_run_agreed_through_two_deaths() -> None:
    found = lived("null")
    assert {history.ending for history in found.of.values()} == {"finished"}
    assert Counter(len(history.attempts) for history in found.of.values())[1] < len(found.of)


def decisions(name: str, kind: type[Ordered]) -> list[Ordered]:
    lines = (line.decision for line in golden(name).lines() if isinstance(line, DecisionLine))
    return [decision for decision in lines if isinstance(decision, kind)]


def test_the_lending_run_borrowed_moved_and_lost_a_worker() -> None:
    assert any(order.loans for order in decisions("lending", StartDecode))
    ordered = {move.plan_id: move for move in decisions("lending", MoveKv)}
    events = [line.event for line in golden("lending").lines() if isinstance(line, EventLine)]
    moved = [event for event in events if isinstance(event, KvMoved)]
    assert moved
    for event in moved:
        move = ordered[event.plan_id]
        assert (event.order_id, event.worker_id) == (move.order_id, move.worker_id)
        # Blocks of 256 tokens, four to a segment; keys and values of 3 heads of 64 numbers in 30 layers, f32.
        assert event.blocks == 4 * move.segments
        assert event.moved_bytes == event.blocks * 256 * 2 * 3 * 64 * 4 * 30
    assert "decode-1" in {event.worker_id for event in events if isinstance(event, WorkerLeft)}


def test_the_run_with_attention_workers_went_on_without_a_prefill() -> None:
    orders = {order.order_id: order for order in decisions("attention", StartDecode)}
    assert all(order.cache for order in orders.values())
    resumed = [order for order in orders.values() if order.resumes]
    assert resumed
    for order in resumed:
        before = orders[order.resumes]
        assert (before.request_id, before.cache) == (order.request_id, order.cache)
        assert before.worker_id != order.worker_id
    prefilled = {order.order_id for order in decisions("attention", StartPrefill)}
    assert not prefilled & {order.order_id for order in resumed}
    endings = Counter(history.ending for history in lived("attention").of.values())
    assert endings == {"finished": len(lived("attention").of)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.split(".")[0])
def test_it_can_be_drawn(file: Path) -> None:
    run = timeline(Replay(LogFile(file), explain_requests=explain_all))
    assert len(run.histories) == sum(
        type(line.event).__name__ == "RequestArrived"
        for line in LogFile(file).lines()
        if isinstance(line, EventLine)
    )
    assert len(page(run, title=file.name)) > 20_000
    assert len(trace(run)) > 20_000
