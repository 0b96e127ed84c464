"""What the commands import: only what the asked-for one needs, so that help and status come at once."""

from __future__ import annotations

import importlib
import subprocess
import sys

from halfmoon.cli.commands import COMMANDS

#: Each takes a noticeable part of a second, or is needed by servers only. `aiohttp.client` stands for all of aiohttp:
#: nats-py imports the package itself, of which a stand-in is given.
HEAVY = {"aiohttp.client", "matplotlib", "numpy", "prometheus_client", "tokenizers", "torch", "tqdm", "zmq"}
#: What only commands that talk, or read messages, need.
TALK = {"asyncio", "msgspec", "nats", "orjson", "ssl", "uvloop"}
PROGRAM = """
import sys
from halfmoon.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
finally:
    print("imported:", *sys.modules)
"""


def imported_by(*words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=60)
    line = done.stdout.splitlines()[-1]
    assert line.startswith("imported:"), (done.stdout, done.stderr)
    return set(line.split()[1:])


def test_help_imports_no_command_and_nothing_heavy() -> None:
    found = imported_by("--help")
    assert not found & (HEAVY | TALK)
    ours = {name for name in found if name.startswith("halfmoon.")}
    assert ours <= {
        "halfmoon.bus", "halfmoon.bus.errors", "halfmoon.cli", "halfmoon.cli.commands", "halfmoon.cli.main",
        "halfmoon.cli.options", "halfmoon.schemas", "halfmoon.schemas.numbers", "halfmoon.schemas.roles",
        "halfmoon.workers",
        "halfmoon.workers.model", "halfmoon.workers.model.config",
    }  # fmt: skip


def test_status_imports_what_talking_needs() -> None:
    found = imported_by("status", "--nats", "nats://127.0.0.1:1")
    assert "nats" in found
    assert not found & HEAVY
    assert not {name for name in found if name.startswith(("halfmoon.conductor", "halfmoon.store"))}
    assert "tqdm" in imported_by("simulate", "--help")  # it is seen where it is needed


def test_a_module_that_stands_in_is_the_module_once_it_is_used() -> None:
    program = (
        "from halfmoon.cli.main import _import_when_used\n"
        "import sys\n"
        "_import_when_used('aiohttp')\n"
        "import nats, aiohttp\n"
        "assert 'aiohttp.client' not in sys.modules\n"
        "session = nats.aio.transport.aiohttp.ClientSession\n"
        "from aiohttp import web\n"
        "import aiohttp as real\n"
        "assert real is not aiohttp and session is real.ClientSession and web is real.web\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_command_has_options_and_a_way_to_run() -> None:
    assert len({each.name for each in COMMANDS}) == len(COMMANDS)
    for each in COMMANDS:
        module = importlib.import_module(each.module)
        assert callable(module.add)
        assert callable(module.run)
