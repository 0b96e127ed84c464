"""`pip install` into an empty environment: what comes, what works, and what is named that is missing.

The light one takes half a minute and is among the slow tests; the one with `[engine]` brings torch, and is
`make test-install`. Both need an index that pip can ask, and say so where there is none.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[1]
#: Of a store's client and agent, a conductor, replay and the simulator.
LIGHT_MODULES = (
    "halfmoon.cli.processes.conductor, halfmoon.cli.processes.store, halfmoon.store.client, halfmoon.cli.replay, "
    "halfmoon.conductor.simulation.systems.by_name"
)
HEAVY = ("gguf", "jinja2", "llguidance", "matplotlib", "safetensors", "tokenizers", "torch")


class Installed:
    """An environment of its own. Nothing of this one is seen there."""

    def __init__(self, at: Path, extra: str) -> None:
        checkout = at / "checkout"
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for file in listed.splitlines():
            if (ROOT / file).is_file():
                (checkout / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, checkout / file)
        venv.create(at / "venv", with_pip=True)
        self.bin = at / "venv" / "bin"
        self.home = at
        self.environment = {
            "HOME": str(at),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "XDG_STATE_HOME": str(at / "state"),
        }
        self.pip("install", f".{extra}", within=checkout)

    def pip(self, *words: str, within: Path | None = None) -> None:
        asked = {
            key: value
            for key, value in os.environ.items()
            if key.startswith("PIP_") or "proxy" in key.lower()
        }
        done = subprocess.run(
            [self.bin / "python", "-m", "pip", "--disable-pip-version-check", *words],
            cwd=within, env={**self.environment, **asked}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode and (
            "Could not find a version" in done.stderr or "No matching dist" in done.stderr
        ):
            pytest.skip(f"pip finds no packages here: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr

    def run(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.bin / words[0], *words[1:]], cwd=self.home, env=self.environment, capture_output=True, text=True,
            check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == status, (done.stdout, done.stderr)
        return done

    def has(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return (
            subprocess.run([self.bin / "python", "-c", code], env=self.environment, check=False).returncode
            == 0
        )


def test_the_light_install_is_light_and_works(tmp_path: Path) -> None:
    here = Installed(tmp_path, "")
    assert [module for module in HEAVY if here.has(module)] == []
    assert here.run("halfmoon", "--version").stdout.startswith("halfmoon ")
    here.run("python", "-c", f"import {LIGHT_MODULES}")
    trace = ROOT / "benchmarks" / "traces" / "conversation_trace.jsonl.zst"
    told = here.run("halfmoon", "simulate", "--trace", str(trace), "--requests", "50", "--json").stdout
    assert '"completed"' in told
    for command in (["up"], ["profile"]):
        missing = here.run("halfmoon", *command, status=1).stderr
        assert missing.splitlines()[-1].endswith("pip install 'halfmoon[engine]'"), missing


@pytest.mark.skipif(
    not os.environ.get("HALFMOON_TEST_INSTALL"),
    reason="brings torch into a new environment: `make test-install`",
)
def test_with_the_engine_a_cluster_comes_up_or_says_the_command_that_helps(tmp_path: Path) -> None:
    here = Installed(tmp_path, "[engine]")
    assert not here.has("matplotlib")
    refused = here.run("halfmoon", "up", status=1).stderr.strip().splitlines()[-1]
    command = refused.partition("pip install ")[2].split()
    assert command, refused
    here.pip("install", *command)
    words = [here.bin / "halfmoon", "up", "--prefill", "1", "--decode", "1", "--port", "0"]
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen(words, env=here.environment, stdout=log, stderr=log, cwd=tmp_path)
    try:
        until = time.monotonic() + 180
        while "halfmoon generate" not in (tmp_path / "up.log").read_text():
            assert up.poll() is None, (tmp_path / "up.log").read_text()
            assert time.monotonic() < until, (tmp_path / "up.log").read_text()
            time.sleep(0.2)
        said = here.run(
            "halfmoon", "generate", "The moon is", "--max-tokens", "8", "--temperature", "0"
        ).stdout
        assert said.strip()
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0, (tmp_path / "up.log").read_text()


def test_this_is_no_environment_of_the_tests() -> None:
    """What the others look for here is there: their looking can fail."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
