"""`halfmoon`: one entry point."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import logging
import sys
from collections.abc import Sequence

from halfmoon.bus.errors import BusError
from halfmoon.cli import (
    capacity,
    chat,
    container,
    drain,
    events,
    experiments,
    generate,
    policy,
    processes,
    profile,
    replay,
    secrets,
    simulate,
    size,
    status,
    up,
)
from halfmoon.cli.bench import command as bench
from halfmoon.cli.options import OptionInvalid, parse
from halfmoon.workers.model.config import ModelError

COMMANDS = (
    up,
    generate,
    chat,
    status,
    bench,
    events,
    replay,
    simulate,
    capacity,
    size,
    experiments,
    policy,
    profile,
    secrets,
    container,
    drain,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; its status is the process's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="halfmoon",
        description="An LLM served from separate prefill and decode pools around one distributed KVCache.",
    )
    parser.add_argument(
        "--version", action="version", version=f"halfmoon {importlib.metadata.version('halfmoon')}"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    runs = {}
    for module in COMMANDS:
        module.add(subparsers)
        runs[module.__name__.split(".")[2]] = module.run
    runs.update(processes.add(subparsers))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # asyncio says it once for every TLS connection that a server or we close, and it means nothing.
    logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())
    try:
        args = parse(parser, subparsers.choices, arguments)
        sys.exit(_run(runs[args.command](args)))
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        sys.exit(0)
    except (OptionInvalid, ModelError, BusError, OSError, ValueError) as problem:
        print(f"halfmoon: {problem}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(work: object) -> int:
    try:
        import uvloop
    except ImportError:  # a platform without it: asyncio's own loop does
        return asyncio.run(work)  # type: ignore[arg-type]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
