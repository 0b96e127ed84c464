"""A row of results/gate.json says what `.ci/run` printed."""

from __future__ import annotations

from tests.gate import row_of

GREEN = """\
tests/bus/test_bus.py::test_x[1]
    at first: tests.eventually.Late: not within 120 s: it is there
    alone: passed in 1.5 s
largest stall: 1.3 s
=== 2026-11-26T02:08:07Z all stages, 873 s
lint                182 s  passed
test                471 s  passed  =========== 5164 passed, 112 skipped, 1 late in 468.35s (0:07:48) ===========
fuzz                 69 s  passed
"""
RED = """\
=== 2026-11-26T02:08:07Z all stages, 9 s
lint                  2 s  passed
test                  7 s  FAILED (status 1)  ===== 1 failed, 3 passed in 6.35s =====
"""


NOW = {
    "date": "2026-11-26 02:08 UTC",
    "commit": "26dc583",
    "cpu": "x",
    "cores": 2,
    "load_average": [1.0, 1.0, 1.0],
}


def test_a_green_run_is_told_with_its_second_runs_and_stall() -> None:
    row = row_of(GREEN, NOW, green=True, loaded=True)
    assert row["seconds"] == {"lint": 182, "test": 471, "fuzz": 69}
    assert row["tests"] == "5164 passed, 112 skipped, 1 late in 468.35s (0:07:48)"
    why = "tests.eventually.Late: not within 120 s: it is there"
    assert row["second_runs"] == [{"test": "tests/bus/test_bus.py::test_x[1]", "why": why}]
    assert (row["largest_stall"], row["red"], row["green"], row["under_load"]) == ("1.3 s", {}, True, True)


def test_a_red_run_names_its_stages() -> None:
    row = row_of(RED, NOW, green=False, loaded=False)
    assert row["red"] == {"test": "FAILED (status 1)"}
    assert (row["tests"], row["green"], row["second_runs"]) == ("1 failed, 3 passed in 6.35s", False, [])
