"""Who is to stop where conductors' states differ."""

from __future__ import annotations

import pytest

from halfmoon.conductor.live.agreement import POINTS_MAX, Agreement, Verdict
from halfmoon.schemas.events import StateDigested


def said(conductor_id: str, digest: str, *, at_seq: int = 100, code: str = "1") -> StateDigested:
    return StateDigested(
        conductor_id=conductor_id, incarnation="i1", code_version=code, at_seq=at_seq, digest=digest
    )


def agreement(*words: StateDigested, code: str = "1") -> Agreement:
    """As c1 sees it, whose own digest after event 100 is "a"."""
    mine = Agreement("c1", "i1", code)
    mine.computed(100, "a")
    for word in words:
        mine.heard(word)
    return mine


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        ("", Verdict.AGREED),
        ("aa", Verdict.AGREED),
        ("ab", Verdict.MAJORITY),
        ("b", Verdict.TIE),
        ("bc", Verdict.TIE),
        ("abb", Verdict.TIE),
        ("bb", Verdict.MINORITY),
        ("abbb", Verdict.MINORITY),
        ("abc", Verdict.MAJORITY),
    ],
)
def test_the_side_with_fewer_voices_stops(others: str, verdict: Verdict) -> None:
    words = [said(f"c{number}", digest) for number, digest in enumerate(others, 2)]
    assert agreement(*words).verdict(100) is verdict


def test_only_what_differs_from_ours_is_a_difference() -> None:
    mine = agreement()
    assert not mine.heard(said("c1", "a"))
    assert not mine.heard(said("c2", "a"))
    assert not mine.heard(said("c2", "b", at_seq=200))  # we have not been there yet
    assert mine.heard(said("c3", "b"))
    assert mine.verdict(100) is Verdict.MAJORITY
    assert mine.describe(100) == "c1, c2: a; c3: b"


def test_our_own_word_counts_once_and_a_process_that_took_our_name_counts_too() -> None:
    other = StateDigested(conductor_id="c1", incarnation="i2", code_version="1", at_seq=100, digest="b")
    assert agreement(said("c1", "a"), said("c1", "a"), other).verdict(100) is Verdict.TIE


@pytest.mark.parametrize(
    ("ours", "theirs", "of_the_log", "we_stop"),
    [
        ("1", "1", "1", False),  # equal code: the other was the ill one
        ("1", "2", "1", False),
        ("2", "1", "1", True),
        ("2", "3", "1", False),
        ("3", "2", "1", True),
    ],
)
def test_in_a_tie_the_code_that_began_the_log_goes_on(
    ours: str, theirs: str, of_the_log: str, we_stop: bool
) -> None:
    assert agreement(said("c2", "b", code=theirs), code=ours).yields(100, of_the_log) is we_stop


def test_only_the_last_places_are_remembered() -> None:
    mine = agreement()
    for at_seq in range(200, 200 + 100 * POINTS_MAX, 100):
        mine.computed(at_seq, "a")
    assert not mine.heard(said("c2", "b"))
    assert mine.heard(said("c2", "b", at_seq=200))
