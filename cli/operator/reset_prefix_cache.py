"""`halfmoon reset-prefix-cache`: engines behind adapters drop their prefix caches, and conductors know it."""

from __future__ import annotations

import argparse
import sys

from halfmoon.bus.errors import PeerError, PeerUnreachable
from halfmoon.cli.operator.policy import conductor_status, operator_bus
from halfmoon.cli.options import OptionInvalid, add_bus, add_config
from halfmoon.schemas import subjects
from halfmoon.schemas.roles import WORKER_ROLES
from halfmoon.schemas.weights import PrefixCacheReset, ResetPrefixCache

#: For an engine to answer.
ANSWER_S = 10.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workers", nargs="*", metavar="worker", help="of an adapter; default: all")
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when all are empty. Raises OptionInvalid, BusError."""
    bus = await operator_bus(args, "reset")
    failed = 0
    try:
        status = await conductor_status(bus)
        if not status.paused:
            raise OptionInvalid(
                "reset-prefix-cache: an engine that computes keeps its cache: halfmoon pause first"
            )
        everyone = [node.id for node in status.nodes if node.role in WORKER_ROLES]
        for worker_id in args.workers or everyone:
            try:
                subject = subjects.reset(worker_id)
                done = await bus.request(subject, ResetPrefixCache(), PrefixCacheReset, timeout_s=ANSWER_S)
                print(f"{worker_id}: {done.blocks} blocks are dropped")
            except PeerError as problem:
                failed = 1
                print(f"halfmoon: {worker_id}: {problem.message}", file=sys.stderr)
            except PeerUnreachable:
                failed = 1
                print(f"halfmoon: {worker_id}: no adapter of an engine answers", file=sys.stderr)
    finally:
        await bus.close()
    return failed
