"""`halfmoon pause`: nothing is placed from now on. It returns when nothing runs any more.

A pause is an event in the log: it is in force from the next event on, for all conductors at once, and in replay.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

from halfmoon.bus.connection import Bus
from halfmoon.cli.operator.policy import STORED_S, conductor_status, in_force, operator_bus
from halfmoon.cli.options import OptionInvalid, add_bus, add_config
from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.roles import WORKER_ROLES
from halfmoon.schemas.status import ConductorStatus
from halfmoon.schemas.weights import PlacementsPaused

LOOK_S = 0.1


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--abort", action="store_true", help="take back what runs; it goes on when placements do"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="how long what runs may take to end")
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when no worker has an order. Raises OptionInvalid, BusError."""
    started = time.monotonic()
    bus = await operator_bus(args, "pause")
    try:
        await conductor_status(bus)
        event = PlacementsPaused(abort=args.abort)
        await in_force(bus, await bus.append(event, source_id=subjects.OPERATOR, within_s=STORED_S))
        deadline = started + args.timeout_s
        status = await _until(bus, deadline, _no_order)
        if args.abort:
            # What a worker was told to drop may run for a moment: its next heartbeat says.
            await asyncio.sleep(2 * status.policy.heartbeat_ns / SECOND_NS)
            status = await _until(bus, deadline, _idle)
    finally:
        await bus.close()
    took_s, waiting = time.monotonic() - started, status.requests_parked
    print(f"paused after {took_s:.1f} s: no worker has an order, {waiting} requests wait")
    return 0


def _no_order(status: ConductorStatus) -> bool:
    return status.requests_in_flight == status.requests_parked


def _idle(status: ConductorStatus) -> bool:
    """By the workers' own word."""
    return not any(node.queued or node.running for node in status.nodes if node.role in WORKER_ROLES)


async def _until(bus: Bus, deadline: float, done: Callable[[ConductorStatus], bool]) -> ConductorStatus:
    """Raises OptionInvalid: it is too late."""
    while not done(status := await conductor_status(bus)):
        if time.monotonic() > deadline:
            running = status.requests_in_flight - status.requests_parked
            raise OptionInvalid(
                f"pause: {running} requests run yet; nothing new is placed until halfmoon resume"
            )
        await asyncio.sleep(LOOK_S)
    return status
