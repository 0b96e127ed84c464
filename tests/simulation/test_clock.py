"""Simulated time: what is booked happens by time, and what is booked for one time in the order of booking."""

from __future__ import annotations

import random

from halfmoon.conductor.simulation.clock import Clock


def test_calls_are_made_by_time_and_then_in_the_order_in_which_they_were_booked() -> None:
    draw, clock = random.Random(1), Clock()
    booked: list[tuple[int, int]] = []
    made: list[tuple[int, int]] = []

    def book() -> None:
        at_ns = clock.now_ns + draw.choice([-5, 0, 0, 1, 2, 3])
        name = (max(at_ns, clock.now_ns), len(booked))
        booked.append(name)
        clock.at(at_ns, call, name)

    def call(name: tuple[int, int]) -> None:
        assert clock.now_ns == name[0]
        made.append(name)
        for _ in range(draw.choice([0, 1, 2])):
            if len(booked) < 2_000:
                book()

    for _ in range(20):
        book()
    while clock.step():
        pass
    assert len(made) == clock.calls > 500
    assert made == sorted(booked)
