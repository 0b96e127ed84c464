"""Events that are well formed and make no sense, in the middle of a log: numbers at their limits, names of others,
events again and out of order. Whatever the log holds, the core steps over it: what stops one conductor stops them all,
each time that they read the log. The state stays in order, can be saved and restored, and decisions can be sent.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import msgspec

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.policies import PluginMissing
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.events import Event, Stamped
from halfmoon.schemas.policy import Policy
from tests.fuzz.frame import Found, Play
from tests.fuzz.targets._golden import LOGS, plausible, values_of

TEST_INPUTS = 150
INPUTS_MEANT = 400_000
DEADLINE_S = 20.0
#: Events that are played as they were, before the changed ones.
BEFORE = (0, 5, 20, 60, 120)


class Story(msgspec.Struct):
    """An input: the log, how many of its events come first, and what follows: events with their times."""

    log: str
    before: int
    events: list[tuple[int, bytes]]


_stories = msgspec.msgpack.Decoder(Story)


@cache
def events_of(log: str) -> list[tuple[int, bytes]]:
    return [
        (value["at_ns"], json.dumps(value["event"]).encode())
        for value in values_of(log)
        if value["line"] == "event"
    ]


@cache
def snapshot_after(log: str, events: int) -> bytes:
    core = Core(checked=True)
    for seq, (at_ns, raw) in enumerate(events_of(log)[:events], start=1):
        core.step(Stamped(seq=seq, at_ns=at_ns, event=decode(raw, Event)))
    return core.snapshot()


@cache
def kinds_of(log: str) -> dict[str, list[dict[str, Any]]]:
    """Events by their type; one of each type that the log has not, about its workers and requests."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _, raw in events_of(log):
        event = json.loads(raw)
        found.setdefault(event["type"], []).append(event)
    # A message leaves out what is as it is by default; here all of it is to be changed.
    found["PolicyChanged"] = [{"type": "PolicyChanged", "policy": msgspec.structs.asdict(Policy())}]
    known = {name: value for events in found.values() for event in events for name, value in event.items()}
    for kind in get_args(Event):
        if kind.__name__ not in found:
            info = msgspec.inspect.type_info(kind)
            assert isinstance(info, msgspec.inspect.StructType)
            fields = {field.name: _plain(field, known) for field in info.fields if field.required}
            found[kind.__name__] = [{**fields, "type": kind.__name__}]
    return found


def _plain(field: msgspec.inspect.Field, known: dict[str, Any]) -> Any:
    """Some value for a field: that of a field of the same name, or the simplest."""
    if field.name in known:
        return known[field.name]
    kind = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
    match kind:
        case msgspec.inspect.IntType():
            return 1
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.StructType():
            return {}
        case msgspec.inspect.ListType():
            return []
        case _:
            return "another"


def _any_event(draw: random.Random, log: str) -> dict[str, Any]:
    """All types come as often."""
    kinds = kinds_of(log)
    return draw.choice(kinds[draw.choice(list(kinds))])


def make(draw: random.Random) -> bytes:
    log = draw.choice(LOGS)
    known = events_of(log)
    before = draw.choice(BEFORE)
    at_ns = known[before][0]
    events = []
    for _ in range(draw.randint(1, 12)):
        # What comes next in the log mostly, so that its requests go on; else anything from anywhere.
        if draw.random() < 0.4:
            event = json.loads(known[min(before + len(events), len(known) - 1)][1])
        else:
            event = _any_event(draw, log)
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            event = plausible(draw, log, event)
        at_ns += draw.choice((0, 1, 10**6, 10**8, 10**9, 10**10, 10**13))
        events.append((at_ns, json.dumps(event).encode()))
    return msgspec.msgpack.encode(Story(log, before, events))


def play(content: bytes) -> str:
    story = _stories.decode(content)
    core = Core.restore(snapshot_after(story.log, story.before), checked=True)
    taken = decisions = 0
    seq = core.seq
    for at_ns, raw in story.events:
        try:
            event = decode(raw, Event)
        except MessageInvalid:  # conductors pass over it
            continue
        seq += 1
        taken += 1
        try:
            decided = core.step(Stamped(seq=seq, at_ns=at_ns, event=event))
        except PluginMissing:  # a conductor ends there
            return "a plug-in that is not here"
        for decision in decided:
            decode(encode(decision), type(decision))
            decisions += 1
    saved = core.snapshot()
    if Core.restore(saved).snapshot() != saved:
        raise Found("a snapshot is not what was saved")
    return f"{'decisions' if decisions else 'events' if taken else 'nothing'}"


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    yield play
