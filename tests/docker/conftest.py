"""One cluster of containers for all tests here, from a clean checkout. `make test-docker` asks for it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import Unavailable, engine
from tests.docker.load import RunningLoad
from tests.docker.stack import Stack, clean_checkout
from tests.eventually import eventually_here, noted_where_late

READY_S = 300.0
PROMPT = {"prompt": "The moon is", "max_tokens": 12, "temperature": 0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "built" in getattr(item, "fixturenames", ()) and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))
            if not os.environ.get("HALFMOON_TEST_DOCKER"):
                item.add_marker(pytest.mark.skip(reason="containers: `make test-docker` runs these"))


@pytest.fixture(scope="session")
def report() -> Iterator[list[str]]:
    """Figures; said at the end, and written to HALFMOON_DOCKER_REPORT where that is set."""
    lines: list[str] = []
    yield lines
    print("\n" + "\n".join(lines))
    if file := os.environ.get("HALFMOON_DOCKER_REPORT"):
        Path(file).write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def built(report: list[str]) -> Iterator[Stack]:
    """An engine, the image in it, and a cluster that is not up: `another` of it is."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with engine():
                stack = Stack(clean_checkout(Path(scratch) / "checkout"))
                stack.build()
                size = int(stack.docker("image", "inspect", "-f", "{{.Size}}", stack.image))
                base = int(stack.docker("image", "inspect", "-f", "{{.Size}}", stack.base))
                of_it = f"{size / 1e6:,.0f} MB, of which base {base / 1e6:,.0f}"
                report.append(f"image: {of_it}; built in {stack.build_s:.0f} s")
                yield stack
        except Unavailable as problem:
            pytest.skip(str(problem))


@pytest.fixture(scope="session")
def stack(built: Stack, report: list[str]) -> Iterator[Stack]:
    """Built, started and whole."""
    with built.another().running() as stack:
        started = time.monotonic()
        stack.up()
        report.append(f"compose up returns after {time.monotonic() - started:.1f} s")
        with noted_where_late(lambda: stack.command("logs", "--tail", "20")):
            eventually_here(
                lambda: stack.get("/ready", timeout=1)[0] == 200, "it is ready", every_s=0.1, bound_s=READY_S
            )
        report.append(f"from compose up to the first answer of /ready: {time.monotonic() - started:.1f} s")
        stack.wait_whole()
        report.append(f"from compose up to all healthy: {time.monotonic() - started:.1f} s")
        yield stack


@pytest.fixture(scope="session")
def load(stack: Stack) -> Iterator[RunningLoad]:
    running = RunningLoad(stack)
    running.start()
    yield running
    running.stop()
