"""What the commands import: only what the asked-for one needs, so that help and status come at once."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from halfmoon.cli.commands import COMMANDS
from halfmoon.cli.main import EXTRAS

#: Each takes a noticeable part of a second, or is needed by servers only. `aiohttp.client` stands for all of aiohttp
#: and `nats.js.client` for JetStream: nats-py imports both packages, of which nothing is executed until it is used.
HEAVY = {
    "aiohttp.client", "importlib.metadata", "matplotlib", "msgspec", "multidict._multidict", "nats.js.client", "numpy",
    "prometheus_client", "tokenizers", "torch", "tqdm", "zmq",
}  # fmt: skip
#: All modules, the interpreter's own too, that `halfmoon status` may import (224 on Python 3.11).
STATUS_MODULES_MAX = 235
#: What only commands that talk, or read messages, need.
TALK = {"asyncio", "msgspec", "nats", "orjson", "ssl", "uvloop"}
IMPORTED_BY_HELP = {
    "halfmoon.bus", "halfmoon.bus.errors", "halfmoon.cli", "halfmoon.cli.commands", "halfmoon.cli.main",
    "halfmoon.cli.options", "halfmoon.cli.output", "halfmoon.schemas", "halfmoon.schemas.contract",
    "halfmoon.schemas.contract.rights", "halfmoon.schemas.numbers", "halfmoon.schemas.roles",
    "halfmoon.schemas.subjects", "halfmoon.workers", "halfmoon.workers.model", "halfmoon.workers.model.loading",
    "halfmoon.workers.model.loading.errors",
}  # fmt: skip
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
    assert ours <= IMPORTED_BY_HELP


def test_status_imports_what_talking_needs() -> None:
    found = imported_by("status", "--nats", "nats://127.0.0.1:1")
    assert "nats" in found
    assert not found & HEAVY
    ours = {name for name in found if name.startswith("halfmoon.")}
    assert ours <= IMPORTED_BY_HELP | {
        "halfmoon.bus.config", "halfmoon.cli.client", "halfmoon.cli.client.api_client", "halfmoon.cli.lean_nats",
        "halfmoon.cli.run_file", "halfmoon.cli.status",
    }  # fmt: skip
    assert len(found) <= STATUS_MODULES_MAX, sorted(found)
    found = imported_by("simulate", "--help")
    assert "tqdm" in found  # it is seen where it is needed
    assert "halfmoon.conductor.core.machine" in found
    # The core computes no array: whoever runs it alone starts without numpy.
    assert "numpy" not in found
    program = "import sys, halfmoon.cli.processes.conductor; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
def test_a_worker_without_a_model_does_not_wait_for_torch() -> None:
    program = (
        "import sys\n"
        "import halfmoon.workers.decode.worker, halfmoon.workers.prefill.worker\n"
        "import halfmoon.workers.model.null_engine\n"
        "assert 'torch' not in sys.modules\n"
        "import halfmoon.workers.attention.lender, halfmoon.workers.decode.borrower\n"
        "assert 'torch' in sys.modules  # where they attend for each other\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_module_that_is_executed_when_it_is_used_is_whole_then() -> None:
    program = (
        "from halfmoon.cli.main import _WhenUsed\n"
        "import sys\n"
        "sys.meta_path.insert(0, _WhenUsed('aiohttp', 'multidict', 'nats.js'))\n"
        "import nats\n"
        "assert not {'aiohttp.client', 'nats.js.client'} & set(sys.modules)\n"
        "session = nats.aio.transport.aiohttp.ClientSession\n"
        "import aiohttp\n"
        "from aiohttp import web\n"
        "assert session is aiohttp.ClientSession and web is aiohttp.web\n"
        "import multidict\n"
        "assert multidict.CIMultiDict(a='1')['A'] == '1'\n"
        "from nats.js.api import StreamConfig\n"
        "client = nats.NATS()\n"
        "assert type(client.jetstream()) is nats.js.JetStreamContext\n"
        "assert StreamConfig is nats.js.api.StreamConfig\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_package_says_its_version() -> None:
    program = (
        "import importlib.metadata as m, halfmoon\n"
        "assert halfmoon.__version__ == m.version('halfmoon')\n"
        "assert not hasattr(halfmoon, 'other')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.pure
def test_every_command_has_options_and_a_way_to_run() -> None:
    assert len({each.name for each in COMMANDS}) == len(COMMANDS)
    for each in COMMANDS:
        module = importlib.import_module(each.module)
        assert callable(module.add)
        assert callable(module.run)


def test_what_nats_does_without_for_a_short_command_is_there_for_all_others() -> None:
    program = (
        "import sys\n"
        "from halfmoon.cli.lean_nats import nats\n"
        "assert 'importlib.metadata' not in sys.modules\n"
        "from importlib.metadata import version\n"
        "assert version('nats-py') != nats.aio.client.__version__\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    # What was imported before stays.
    program = (
        "import importlib.metadata as m, sys, halfmoon.cli.lean_nats; assert sys.modules[m.__name__] is m"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(("words", "runs"), [("status", True), ("--help", False), ("nonsense", False)])
def test_garbage_is_collected_but_while_modules_are_imported(words: str, runs: bool) -> None:
    program = (
        "import gc, sys\n"
        "import halfmoon.cli.status as status\n"
        "from halfmoon.cli.main import main\n"
        "async def run(args):\n"
        "    print('runs', gc.isenabled())\n"
        "    return 0\n"
        "add = status.add\n"
        "status.add = lambda parser: (print('adds', gc.isenabled()), add(parser))\n"
        "status.run = run\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    print('ends', gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, words], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stdout.splitlines() if line.startswith(("adds ", "runs ", "ends "))]
    assert said == [*(["adds False", "runs True"] if runs else []), "ends True"]


LIGHT = """
import sys
from halfmoon.cli.main import EXTRAS, main
sys.modules.update(dict.fromkeys(EXTRAS))  # as where they are not installed
import halfmoon.cli.processes.conductor, halfmoon.cli.processes.store, benchmarks.papers.systems
import halfmoon.store.client
main(sys.argv[1:])
"""


def test_the_light_install_says_which_extra_a_command_needs() -> None:
    """A store's client and agent, a conductor and the simulator need none."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, "profile"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == (
        "halfmoon: torch is not installed, and this needs it: pip install 'halfmoon[engine]'\n"
    )


@pytest.mark.pure
def test_every_extra_that_is_named_is_one() -> None:
    """What is imported by a name of EXTRAS stands in that extra, and not among what all installs have."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        assert any(line.startswith(f"{package}>=") for line in project["optional-dependencies"][extra])
        assert not any(line.startswith(f"{package}>=") for line in project["dependencies"])
