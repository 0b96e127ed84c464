"""`halfmoon`: one entry point.

Nothing is imported here that the asked-for command does not need.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import types
from collections.abc import Coroutine, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from typing import Any

from halfmoon.bus.errors import BusError
from halfmoon.cli.commands import COMMANDS, module_of
from halfmoon.cli.options import OptionInvalid, parse
from halfmoon.cli.output import set_logging
from halfmoon.schemas.roles import ROLES
from halfmoon.workers.model.loading.errors import ModelError

#: Name of an imported package → the extra of this distribution that brings it.
EXTRAS = {
    "gguf": "engine",
    "jinja2": "engine",
    "llguidance": "engine",
    "matplotlib": "plots",
    "safetensors": "engine",
    "tokenizers": "engine",
    "torch": "engine",
}


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
    # Objects of imports stay: going over them again and again is a tenth of a short command's time.
    gc.disable()
    try:
        _main(argv)
    finally:
        gc.enable()
        if argv is None:
            # The process ends: its objects need not be gone over once more.
            gc.freeze()


def _main(argv: Sequence[str] | None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="halfmoon",
        description="An LLM served from separate prefill and decode pools around one distributed KVCache.",
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = {each.name: subparsers.add_parser(each.name, help=each.help) for each in COMMANDS}
    refused_status = 1
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # asyncio logs it for every TLS connection that a server or we close, and it means nothing.
    logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())
    import_when_used()
    try:
        args = parse(parser, commands, arguments, lambda name: module_of(name).add(commands[name]))
        set_logging(args)
        # A supervisor must know that starting the process again mends nothing.
        if args.command in ROLES:
            refused_status = os.EX_CONFIG
        sys.exit(_run(module_of(args.command).run(args)))
    except ModuleNotFoundError as problem:
        extra = EXTRAS.get((problem.name or "").partition(".")[0])
        if extra is None:
            raise
        command = f"pip install 'halfmoon[{extra}]'"
        print(f"halfmoon: {problem.name} is not installed, and this needs it: {command}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        sys.exit(0)
    except (OptionInvalid, ModelError, BusError, OSError, ValueError) as problem:
        print(f"halfmoon: {str(problem) or type(problem).__name__}", file=sys.stderr)
        sys.exit(refused_status if isinstance(problem, OptionInvalid | ModelError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def import_when_used() -> None:
    """nats-py imports these for addresses that begin with ws:// and for streams, which takes longer than all else of
    `halfmoon status`.
    """
    sys.meta_path.insert(0, _WhenUsed("aiohttp", "multidict", "nats.js"))


class _WhenUsed:
    """A finder of modules: those of these names are executed at the first look into them, not at their import.

    A second `import` of the same name is such a look, so code of ours that needs one of them has it at once.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def _run(work: Coroutine[Any, Any, int]) -> int:
    import asyncio

    gc.enable()
    try:
        import uvloop
    except ImportError:  # a platform without it: asyncio's own loop does
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    main()
