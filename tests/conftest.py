"""Fixtures that all tests share: a real nats-server, a fresh one for each test that asks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from halfmoon.bus.embedded import EmbeddedServer

# The same examples each time: a change is judged by what it changed. `--hypothesis-profile=default` draws others.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where processes share the tests (`make test`), a file is one's, and all clusters are one's: a cluster has more
    processes than the machine has cores, and is killed by the clock.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "clusters" if "/cluster/" in file or "test_cluster_log" in file else file

    return Scheduling(config, log)


# Imports and thousands of tests are there to stay: going over them at each collection took a quarter of a second.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


_COLLECTED = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Noted before any is deselected."""
    config.stash[_COLLECTED] = {item.nodeid.partition("[")[0] for item in items}


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> set[str]:
    """Tests that pytest found in this run, `path::name`, also those that it leaves out."""
    return request.config.stash[_COLLECTED]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that ran in this process leaves a limit of lines and a format at pytest's own handlers, and levels."""
    formats = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    yield
    for handler in logging.getLogger().handlers:
        handler.filters.clear()
    for handler, formatter in formats:
        handler.setFormatter(formatter)
    logging.getLogger().setLevel(logging.WARNING)
    for name in ("halfmoon", "halfmoon.say"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer.start(tmp_path / "nats")
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: EmbeddedServer) -> str:
    return nats_server.url
