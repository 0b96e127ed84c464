"""`halfmoon`: one entry point.

Nothing is imported here that the asked-for command does not need.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Coroutine, Sequence
from typing import Any

from halfmoon.bus.errors import BusError
from halfmoon.cli.commands import COMMANDS
from halfmoon.cli.options import OptionInvalid, parse
from halfmoon.workers.model.config import ModelError


class _Version(argparse.Action):
    """argparse's own version action needs the version before anybody asks; looking it up takes 30 ms."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        text = "show program's version number and exit"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=text)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata

        print(f"halfmoon {importlib.metadata.version('halfmoon')}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; its status is the process's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="halfmoon",
        description="An LLM served from separate prefill and decode pools around one distributed KVCache.",
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = {each.name: subparsers.add_parser(each.name, help=each.help) for each in COMMANDS}
    modules = {each.name: each.module for each in COMMANDS}
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # asyncio says it once for every TLS connection that a server or we close, and it means nothing.
    logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())
    # nats-py imports it for addresses that begin with ws://, which takes longer than all else of `halfmoon status`.
    _import_when_used("aiohttp")
    try:
        args = parse(
            parser,
            commands,
            arguments,
            lambda name: importlib.import_module(modules[name]).add(commands[name]),
        )
        sys.exit(_run(importlib.import_module(modules[args.command]).run(args)))
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        sys.exit(0)
    except (OptionInvalid, ModelError, BusError, OSError, ValueError) as problem:
        print(f"halfmoon: {problem}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


class _ImportedWhenUsed(types.ModuleType):
    """Stands in for a module until the first attribute of it is looked up.

    Unlike `importlib.util.LazyLoader`'s, which the next `import` statement of the same name loads.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _import_when_used(name: str) -> None:
    """Lets `import name` return at once."""
    if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
        stand_in = _ImportedWhenUsed(name)
        stand_in.__spec__ = spec
        sys.modules[name] = stand_in


def _run(work: Coroutine[Any, Any, int]) -> int:
    import asyncio

    try:
        import uvloop
    except ImportError:  # a platform without it: asyncio's own loop does
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    main()
