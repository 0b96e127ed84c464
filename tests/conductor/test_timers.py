"""Timers of a shell: one time for each key."""

from __future__ import annotations

from halfmoon.conductor.live.timers import Timers


def test_timers_are_due_in_the_order_of_time_then_key() -> None:
    timers = Timers({"b": 5, "a": 5, "c": 3})
    assert timers.next_ns() == 3
    assert timers.pop_due(4) == [("c", 3)]
    assert timers.pop_due(5) == [("a", 5), ("b", 5)]
    assert timers.next_ns() is None


def test_setting_a_timer_again_replaces_it() -> None:
    timers = Timers()
    timers.set("a", 10)
    timers.set("a", 5)
    timers.set("a", 7)
    assert timers.next_ns() == 7
    assert timers.pop_due(20) == [("a", 7)]


def test_a_timer_that_fired_is_forgotten_unless_it_was_set_anew() -> None:
    timers = Timers()
    timers.set("a", 5)
    timers.fired("a", 5)
    assert timers.next_ns() is None
    timers.set("a", 6)
    timers.fired("a", 5)
    assert timers.next_ns() == 6
