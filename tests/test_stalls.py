"""What the stall meter takes for a stall. Tests with real stalls are in tests/test_reruns.py."""

from __future__ import annotations

import pytest

from tests import stalls
from tests.stalls import STALL_S, STOLEN_PERMILLE, Stall, StallMeter, cpu_times

STAT = "cpu  100 0 50 800 10 0 0 {stolen} 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"


def test_a_stall_is_a_large_gap_or_much_that_was_stolen() -> None:
    assert Stall(gap_s=STALL_S)
    assert Stall(stolen_permille=STOLEN_PERMILLE)
    assert not Stall(gap_s=STALL_S - 0.01, stolen_permille=STOLEN_PERMILLE - 1)
    assert str(Stall(1.234, 25)) == "largest stall 1.23 s, 2.5 % stolen"


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (STAT.format(stolen=40), (1_000, 40)),
        ("cpu  1 2 3 4\n", (0, 0)),  # a kernel that does not tell
        ("", (0, 0)),
    ],
)
def test_what_was_stolen_is_the_eighth_number(text: str, times: tuple[int, int]) -> None:
    assert cpu_times(text) == times


def test_what_was_stolen_is_a_share_of_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"text": STAT.format(stolen=40)}
    monkeypatch.setattr(stalls, "_proc_stat", lambda: now["text"])
    meter = StallMeter()
    meter.begin()
    now["text"] = STAT.format(stolen=100).replace("800", "840")
    assert meter.so_far().stolen_permille == 600
    meter.begin()
    assert meter.so_far().stolen_permille == 0


def test_a_gap_counts_until_the_next_span() -> None:
    meter = StallMeter()
    meter.begin()
    meter.tick(1e9)
    meter.tick(1e9)
    assert meter.so_far()
    meter.begin()
    assert not meter.so_far()
