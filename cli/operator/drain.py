"""`halfmoon drain NODE`: a node's store agent hands its blocks to the others and leaves."""

from __future__ import annotations

import argparse
import sys

import orjson

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusError, PeerError
from halfmoon.cli.client.api_client import ApiFailure, api_client
from halfmoon.cli.options import add_bus, add_config, bus_config, existing_streams
from halfmoon.schemas import subjects
from halfmoon.schemas.store import Drained, DrainStore


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", help="whose store leaves; stop its worker first")
    parser.add_argument(
        "--to", action="append", default=[], metavar="NODE", help="who takes its blocks; else all"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when no block was left behind, 2 when there was no room for some, 1 when it could not be
    done.
    """
    try:
        targets = args.to or await _other_stores(args)
        bus = await Bus.connect(bus_config(args), name="drain", limits=existing_streams())
        try:
            order = DrainStore(target_node_ids=targets)
            subject = subjects.store(args.node, "drain")
            drained = await bus.request(subject, order, Drained, timeout_s=args.timeout_s)
        finally:
            await bus.close()
    except PeerError as problem:
        print(f"halfmoon: {args.node}: {problem.message}", file=sys.stderr)
        return 1
    except (BusError, ApiFailure) as problem:
        print(f"halfmoon: {problem}", file=sys.stderr)
        return 1
    if args.json:
        print(
            orjson.dumps(
                {"moved": drained.moved, "elsewhere": drained.elsewhere, "left": drained.left}
            ).decode()
        )
    else:
        lost = f"{drained.left} are lost for lack of room" if drained.left else "none is lost"
        there = f"{drained.elsewhere} were elsewhere already"
        print(f"{args.node} leaves: {drained.moved} blocks handed over, {there}, {lost}")
    return 2 if drained.left else 0


async def _other_stores(args: argparse.Namespace) -> list[str]:
    """As the conductors know them. Raises ApiFailure, BusError."""
    async with api_client(args) as client:
        status = await client.call("status", {}, timeout_s=5)
    return [node["id"] for node in status["nodes"] if node["role"] == "store" and node["id"] != args.node]
