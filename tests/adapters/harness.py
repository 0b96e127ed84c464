"""Fake engines as processes, and clusters over them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.eventually import BOUND_S, eventually_here
from tests.ports import HeldPorts

ROOT = Path(__file__).parents[2]


#: The program that speaks each wire.
PROGRAMS = {"vllm": "tests.adapters.fake_engine", "sglang": "tests.adapters.fake_sglang"}
#: Its flags where it does one half of each request: prompts, and answers.
HALVES = {
    "vllm": (("--connector",), ("--connector",)),
    "sglang": (("--mode", "prefill"), ("--mode", "decode")),
}


class FakeEngine:
    """A running engine that computes nothing. It keeps its ports: HTTP, KV events, who asks for past ones, and
    an SGLang's bootstrap server.
    """

    def __init__(self, *flags: str, wire: str = "vllm") -> None:
        self.wire = wire
        self._held = HeldPorts(count=4)
        self.port = self._held.first
        self.url = f"http://127.0.0.1:{self.port}"
        self._flags = flags
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", PROGRAMS[self.wire], f"{self.port}", *self._flags]
        self.process = subprocess.Popen(words, cwd=ROOT)

        def healthy() -> bool:
            assert self.process.poll() is None, "the engine has ended"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=BOUND_S).close()
                return True
            return False

        eventually_here(healthy, "the engine answers")

    def asked(self) -> list[dict[str, Any]]:
        """Requests of clusters: those of probes are left out, which ignore the end of a text."""
        with urllib.request.urlopen(f"{self.url}/asked", timeout=BOUND_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return [
            one for one in found if not one["body"].get("ignore_eos") or "kv_transfer_params" in one["body"]
        ]

    def fault(self, kind: str, **fields: Any) -> Any:
        body = json.dumps({"kind": kind, **fields}).encode()
        asked = urllib.request.Request(f"{self.url}/fault", body)
        with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
            return json.load(answer)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(BOUND_S)

    def close(self) -> None:
        self.kill()
        self._held.close()


@contextlib.contextmanager
def fake_engines(count: int, *flags: str, wires: Sequence[str] = ("vllm",)) -> Iterator[list[FakeEngine]]:
    """They speak the `wires` by turns."""
    engines = [FakeEngine(*flags, wire=wires[number % len(wires)]) for number in range(count)]
    try:
        yield engines
    finally:
        for each in engines:
            each.close()


@contextlib.contextmanager
def halves(wire: str, each: int, *flags: str) -> Iterator[tuple[list[FakeEngine], list[str]]]:
    """So many engines that prefill, and as many that decode after them; and the flags of a cluster over them."""
    with contextlib.ExitStack() as entered:
        engines, words = [], []
        for half, own in zip(("prefill", "decode"), HALVES[wire], strict=True):
            found = entered.enter_context(fake_engines(each, *flags, *own, wires=(wire,)))
            engines += found
            words += [word for engine in found for word in (f"--adapt-{wire}-{half}", engine.url)]
        yield engines, words
