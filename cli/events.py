"""`halfmoon events`: a cluster's event log, to a file (`save`), as it grows (`tail`), or out of a file
(`show`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli.options import (
    OptionInvalid,
    add_bus,
    add_config,
    bus_config,
    existing_streams,
    state_directory,
)
from halfmoon.conductor.replay.logfile import LogFile
from halfmoon.conductor.replay.offline_log import served
from halfmoon.conductor.replay.save import follow, save
from halfmoon.conductor.replay.text import described


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("save", "tail", "show"))
    parser.add_argument(
        "file", nargs="?", default="", metavar="FILE", help="JSON Lines; compressed when named .zst"
    )
    parser.add_argument(
        "--store", metavar="DIR", default="", help="save: of a stopped cluster, where its streams are"
    )
    parser.add_argument(
        "--from", dest="from_seq", type=int, default=0, metavar="SEQ", help="show: from this event on"
    )
    parser.add_argument("--json", action="store_true")
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0; errors as one line by `main`."""
    if args.store and args.action != "save":
        raise OptionInvalid(f"--store: only to save; {args.action} takes none")
    if args.action == "tail":
        return await _tail(args)
    if not args.file:
        raise OptionInvalid(f"events {args.action}: name a FILE")
    if args.action == "show":
        return _show(args)
    async with _bus(args) as bus:
        events, decisions = await save(bus, Path(args.file), cluster=args.cluster, told=_progress(args))
    if args.json:
        print(msgspec.json.encode({"events": events, "decisions": decisions}).decode())
    else:
        clear = "\x1b[K" if sys.stdout.isatty() else ""
        print(f"{clear}{args.file}: {events:,} events, {decisions:,} decisions")
    return 0


@contextlib.asynccontextmanager
async def _bus(args: argparse.Namespace) -> AsyncIterator[Bus]:
    """The running cluster's bus, or that of a server started over the streams of a stopped one."""
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(served(Path(args.store))) if args.store else bus_config(args)
        try:
            # Of a stopped cluster the stream that was kept in memory is made anew, empty.
            limits = None if args.store else existing_streams()
            bus = await Bus.connect(config, name="events", limits=limits)
        except BusUnreachable as problem:
            kept = state_directory(args.cluster) / "nats"
            hint = f"; if the cluster is stopped: --store {kept}" if kept.exists() and not args.store else ""
            raise BusUnreachable(f"{problem}{hint}") from None
        try:
            yield bus
        finally:
            await bus.close()


def _progress(args: argparse.Namespace) -> Any:
    if args.json or not sys.stderr.isatty():
        return None
    # The cursor stays at the start of the line, so that the next line replaces it.
    return lambda seq, last: print(f"\x1b[K{seq:,} of {last:,} events\r", end="", file=sys.stderr, flush=True)


async def _tail(args: argparse.Namespace) -> int:
    async with _bus(args) as bus:
        async for line in follow(bus):
            print(msgspec.json.encode(line).decode() if args.json else described(line), flush=True)
    return 0


def _show(args: argparse.Namespace) -> int:
    seq = 0
    for line in LogFile(Path(args.file)).lines():
        seq = getattr(line, "seq", seq)
        if seq >= args.from_seq:
            print(msgspec.json.encode(line).decode() if args.json else described(line))
    return 0
