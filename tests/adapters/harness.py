"""Fake engines as processes, and clusters over them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfmoon.bus.embedded import free_port

HERE = Path(__file__).parent
START_S = 30.0


class FakeEngine:
    """A running `fake_engine.py`."""

    def __init__(self, *flags: str, port: int = 0) -> None:
        self.port = port or free_port(count=3)
        self.url = f"http://127.0.0.1:{self.port}"
        self._flags = flags
        self.start()

    def start(self) -> None:
        words = [sys.executable, str(HERE / "fake_engine.py"), f"{self.port}", *self._flags]
        self.process = subprocess.Popen(words)
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            assert self.process.poll() is None, "the engine has ended"
            assert time.monotonic() < until, "the engine does not start"
            time.sleep(0.02)

    def asked(self) -> list[dict[str, Any]]:
        """Requests of clusters: those of probes are left out, whose prompts are 16 or 513 tokens long."""
        with urllib.request.urlopen(f"{self.url}/asked", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return [one for one in found if not one["body"]["ignore_eos"]]

    def fault(self, kind: str, **fields: Any) -> None:
        body = json.dumps({"kind": kind, **fields}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/fault", body), timeout=10).close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def fake_engines(count: int, *flags: str) -> Iterator[list[FakeEngine]]:
    engines = [FakeEngine(*flags) for _ in range(count)]
    try:
        yield engines
    finally:
        for each in engines:
            each.kill()
