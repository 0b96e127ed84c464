"""`halfmoon policy`: shows the policy of the conductors, and sets another one from now on.

A change is an event in the log: it is in force from the next event on, for all conductors at once, and in
replay.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence

import msgspec
import orjson

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerUnreachable, StreamRefused
from halfmoon.bus.jetstream import NO_STREAM
from halfmoon.cli.options import OptionInvalid, add_bus, add_config, bus_config, existing_streams
from halfmoon.conductor.plugins import policy_title
from halfmoon.conductor.view.asking import caught_up_status
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import one_line
from halfmoon.schemas.events import PolicyChanged
from halfmoon.schemas.numbers import MS_NS, SECOND_NS
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.status import ConductorStatus

ANSWER_S = 2.0
#: For a conductor that is reading the log.
READING_S = 2.0
NO_CONDUCTOR = "no conductor answers"
#: For the log to take the change.
STORED_S = 10.0
IN_FORCE_S = 5.0
_UNITS_NS = {"ns": 1, "us": 1_000, "ms": MS_NS, "s": SECOND_NS}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "set"))
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="for `set`; times also as 500ms or 2s"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the policy shown is in force. Raises OptionInvalid, BusError."""
    if (args.action == "set") != bool(args.changes):
        raise OptionInvalid(
            "policy set: KEY=VALUE is missing" if args.action == "set" else "policy show takes no KEY"
        )
    bus = await operator_bus(args, "policy")
    try:
        status = await conductor_status(bus)
        policy = status.policy
        if args.changes:
            policy = changed(policy, args.changes, status.plugins)
            changed_to = PolicyChanged(policy=policy)
            await in_force(bus, await bus.append(changed_to, source_id=subjects.OPERATOR, within_s=STORED_S))
    finally:
        await bus.close()
    values = msgspec.structs.asdict(policy)
    if args.json:
        print(orjson.dumps(values).decode())
    else:
        for name, value in values.items():
            print(f"{name:<24} {_for_people(name, value)}")
    return 0


async def operator_bus(args: argparse.Namespace, name: str) -> Bus:
    """Connected as the operator. Raises OptionInvalid, BusError."""
    try:
        return await Bus.connect(bus_config(args), name=name, limits=existing_streams())
    except StreamRefused as refused:
        if refused.code != NO_STREAM:
            raise
        raise OptionInvalid(NO_CONDUCTOR) from None  # none has ever been there


def changed(policy: Policy, changes: list[str], plugins: Sequence[str] = ()) -> Policy:
    """`policy` with each KEY=VALUE; `plugins`: titles of those that may be named. Raises OptionInvalid, naming the
    key.
    """
    values, new = msgspec.structs.asdict(policy), policy
    for change in changes:
        key, equals, text = change.partition("=")
        shown = one_line(change)
        if not equals:
            raise OptionInvalid(f"policy set {shown}: not of the form KEY=VALUE")
        if key not in values:
            raise OptionInvalid(
                f"policy set {one_line(key)}: there is no such key; the keys are {', '.join(values)}"
            )
        if key == "heartbeat_ns":
            raise OptionInvalid("policy set heartbeat_ns: it is the processes' own, and stays as it is")
        try:
            if key == "name":
                text = policy_title(text, plugins)
            values[key] = _read(key, text) if isinstance(values[key], int) else text
            new = msgspec.convert(values, Policy)
        except ValueError as problem:
            raise OptionInvalid(f"policy set {shown}: {str(problem).partition(' - at ')[0]}") from None
    if new.lost_after_ns < 2 * new.heartbeat_ns:
        raise OptionInvalid("policy set lost_after_ns: less than two heartbeats would lose healthy processes")
    return new


def _read(key: str, text: str) -> int:
    found = re.fullmatch(r"(\d+)(ns|us|ms|s)?", text)
    if found is None or (found[2] and not key.endswith(("_ns", "_ns_max"))):
        raise ValueError(
            "Expected a whole number" + (", or one with ns, us, ms or s" if "_ns" in key else "")
        )
    return int(found[1]) * _UNITS_NS[found[2] or "ns"]


def _for_people(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith(("_ns", "_ns_max")):
        unit = next(unit for unit, ns in reversed(_UNITS_NS.items()) if value % ns == 0)
        return f"{value // _UNITS_NS[unit]}{unit}"
    return str(value)


async def in_force(bus: Bus, seq: int) -> None:
    """Returns when a conductor has read event `seq` of the log. Raises OptionInvalid: none does."""
    try:
        async with asyncio.timeout(IN_FORCE_S):
            while (await conductor_status(bus)).seq < seq:
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise OptionInvalid(f"the change is event {seq} of the log; no conductor has read it yet") from None


async def conductor_status(bus: Bus) -> ConductorStatus:
    """By any conductor. Raises OptionInvalid where none answers, or none that has read the log."""
    try:
        status = await caught_up_status(bus, answer_s=ANSWER_S, reading_s=READING_S)
    except PeerUnreachable:
        raise OptionInvalid(NO_CONDUCTOR) from None
    if not status.caught_up:
        raise OptionInvalid(
            f"conductor {status.conductor_id} is still reading the log, at event {status.seq}: ask again"
        )
    return status
