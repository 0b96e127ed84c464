"""`halfmoon resume`: placements go on after `halfmoon pause`, with weights of another version where one is named."""

from __future__ import annotations

import argparse

from halfmoon.bus.connection import Bus
from halfmoon.cli.operator.policy import STORED_S, conductor_status, in_force, operator_bus
from halfmoon.cli.options import OptionInvalid, add_bus, add_config
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weight-version",
        default=None,
        metavar="TEXT",
        help="of the weights that all workers have now; blocks of other ones are read no more",
    )
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when requests are placed again. Raises OptionInvalid, BusError."""
    bus = await operator_bus(args, "resume")
    try:
        status = await conductor_status(bus)
        if not status.paused:
            raise OptionInvalid("resume: placements are not paused")
        if args.weight_version is not None:
            await _change_weights(bus, args.weight_version)
        event = PlacementsPaused(paused=False)
        await in_force(bus, await bus.append(event, source_id=subjects.OPERATOR, within_s=STORED_S))
    finally:
        await bus.close()
    print(f"placements go on: {status.requests_parked} requests waited")
    return 0


async def _change_weights(bus: Bus, weight_version: str) -> None:
    """Raises OptionInvalid where conductors do not take it: placements would go on with keys of other weights."""
    changed = WeightsChanged(weight_version=weight_version)
    try:
        decode(encode(changed), WeightsChanged)
    except MessageInvalid as problem:
        raise OptionInvalid(f"resume --weight-version: {problem}") from None
    await in_force(bus, await bus.append(changed, source_id=subjects.OPERATOR, within_s=STORED_S))
    if (await conductor_status(bus)).weight_version != weight_version:
        raise OptionInvalid("resume --weight-version: the conductors refuse it, and placements stay paused")
