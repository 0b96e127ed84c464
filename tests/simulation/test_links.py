"""Transfers that share their ends."""

from __future__ import annotations

from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.network import Network

S = 1_000_000_000


def ended(clock: Clock) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = clock.found  # type: ignore[attr-defined]
    while clock.step():
        pass
    return found


def network(latency_ns: int = 0) -> tuple[Clock, Network]:
    clock = Clock()
    clock.found = []  # type: ignore[attr-defined]
    return clock, Network(clock, 100, latency_ns)


def note(clock: Clock, name: str):  # type: ignore[no-untyped-def]
    return lambda: clock.found.append((name, clock.now_ns))  # type: ignore[attr-defined]


def test_a_transfer_alone_has_the_whole_link_after_the_latency() -> None:
    clock, links = network(latency_ns=7)
    links.send("a", "b", (100, note(clock, "half")), (100, note(clock, "whole")))
    assert ended(clock) == [("half", S + 7), ("whole", 2 * S + 7)]
    assert links.bytes_moved == 200


def test_two_that_leave_one_node_share_it_until_one_ends() -> None:
    clock, links = network()
    links.send("a", "b", (100, note(clock, "one")))
    links.send("a", "c", (200, note(clock, "two")))
    assert ended(clock) == [("one", 2 * S), ("two", 3 * S)]


def test_two_that_enter_one_node_share_it_and_others_do_not() -> None:
    clock, links = network()
    links.send("a", "c", (100, note(clock, "one")))
    links.send("b", "c", (100, note(clock, "two")))
    links.send("c", "a", (100, note(clock, "back")))
    assert sorted(ended(clock)) == [("back", S), ("one", 2 * S), ("two", 2 * S)]


def test_a_stopped_transfer_makes_room_and_is_silent() -> None:
    clock, links = network()
    gone = links.send("a", "b", (100, note(clock, "gone")))
    links.send("a", "c", (100, note(clock, "stays")))
    clock.at(S, links.stop, gone)
    assert ended(clock) == [("stays", S + S // 2)]
