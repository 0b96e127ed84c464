"""A Prometheus for the tests: the one that is there, or Debian's package, unpacked into build/ and not
installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.eventually import BOUND_S, eventually_here
from tests.observability.parts import FILES, ROOT
from tests.ports import HeldPorts

PLACE = ROOT / "build" / "prometheus"


class Unavailable(Exception):
    """Why there is no Prometheus here."""


def command(name: str) -> str:
    """Path of `prometheus` or `promtool`. Raises Unavailable."""
    if found := shutil.which(name):
        return found
    path = PLACE / "root" / "usr" / "bin" / name
    if not path.exists():
        _unpack()
    return str(path)


def _unpack() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Unavailable("there is no prometheus, and no apt-get to have Debian's")
    PLACE.mkdir(parents=True, exist_ok=True)
    try:
        if _run("apt-get", "download", "prometheus", check=False).returncode:
            _run("apt-get", "update", "-q")
            _run("apt-get", "download", "prometheus")
        package = max(PLACE.glob("prometheus_*.deb"), key=os.path.getmtime)
        _run("dpkg-deb", "-x", str(package), str(PLACE / "root"))
        package.unlink()
    except (subprocess.SubprocessError, ValueError) as problem:
        raise Unavailable(f"Debian's prometheus cannot be had: {problem}") from None


def _run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=PLACE, capture_output=True, text=True, timeout=180, check=check)


@dataclass
class Prometheus:
    """A running one, asked over its HTTP API."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        """`data` of the answer."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.loads(reply.read())["data"]
        except urllib.error.HTTPError as problem:
            raise AssertionError(f"{path} {query}: {problem.read().decode()}") from None

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample, now."""
        answer = self.get("query", query=expr)
        assert answer["resultType"] == "vector", answer
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["result"]]

    def value(self, expr: str) -> float:
        found = self.query(expr)
        assert len(found) == 1, (expr, found)
        return found[0][1]


@contextlib.contextmanager
def prometheus(scratch: Path, targets: Path, *, every: str = "1s") -> Iterator[Prometheus]:
    """docker/observability's own configuration, rules and alerts; only where the processes are is told by a
    file.
    """
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": every, "evaluation_interval": every}
    config["rule_files"] = [str(FILES / name) for name in config["rule_files"]]
    config["scrape_configs"] = [{"job_name": "cluster", "file_sd_configs": [{"files": [str(targets)]}]}]
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(config))
    held = HeldPorts()
    at = f"127.0.0.1:{held.first}"
    words = [
        command("prometheus"),
        f"--config.file={scratch / 'prometheus.yml'}",
        f"--web.listen-address={at}",
    ]
    with (scratch / "output").open("wb") as output:
        process = subprocess.Popen(
            [*words, f"--storage.tsdb.path={scratch / 'data'}"], stdout=output, stderr=subprocess.STDOUT
        )
        try:

            def ready() -> bool:
                assert process.poll() is None, (scratch / "output").read_text()[-2000:]
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://{at}/-/ready", timeout=BOUND_S),
                ):
                    return True
                return False

            eventually_here(ready, "Prometheus is ready")
            yield Prometheus(f"http://{at}")
        finally:
            process.terminate()
            process.wait(BOUND_S)
            held.close()
