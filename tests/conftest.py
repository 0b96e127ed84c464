"""Fixtures that all tests share: a real nats-server, a fresh one for each test that asks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from halfmoon.bus.embedded import EmbeddedServer
from tests import guardian, nats_in_process, reruns
from tests.realtime import is_realtime, no_processes_if, sockets_only_if, starts_clusters

# The same examples each time: a change is judged by what it changed. `--hypothesis-profile=default` draws others.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one process's. All clusters are one's, which begins with them and goes on with what else rests on real
    time: both wait more than they compute, while the others compute.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        #: The node that has the clusters.
        waiting: Any = None

        def _split_scope(self, nodeid: str) -> str:
            return "tests/cluster" if starts_clusters(nodeid) else str(super()._split_scope(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            waits = node is self.waiting
            first = min(
                self.workqueue, key=lambda path: (not starts_clusters(path), is_realtime(path) != waits)
            )
            if starts_clusters(first):
                self.waiting = node
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


_GUARDIAN = pytest.StashKey[Any]()


def _late_in_the_run(path: str) -> tuple[bool, bool]:
    """To sort by, in one process: what waits for nothing is told first."""
    return is_realtime(path), not starts_clusters(path)


def pytest_configure(config: pytest.Config) -> None:
    reruns.pytest_configure(config)
    if not config.option.collectonly:
        config.stash[_GUARDIAN] = guardian.watch()


# Imports and thousands of tests are there to stay: going over them at each collection took a quarter of a second.
gc.disable()
#: Objects that are new before Python collects (its own: 700), and how many such collections come before an older
#: generation's turn. Worlds of chaos, cores and syntax trees are made of what lives until the test ends: a quarter of
#: their time went into collections that found nothing.
GARBAGE = (100_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # Pytest adds its handlers to each logger that hands nothing on, six times a test. Torch has forty of them.
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.set_threshold(*GARBAGE)
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> None:
    """Each simulation collects once: it would go over all that earlier tests have imported and left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def what_is_frozen_is_not_counted() -> Iterator[None]:
    """Each simulation asks whether anything is frozen. Here something always is, and Python counts it one by one: that
    took longer than a short simulation.
    """
    told = SimpleNamespace(
        collect=gc.collect, freeze=gc.freeze, unfreeze=gc.unfreeze, get_freeze_count=lambda: 1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfmoon.conductor.simulation.simulate.gc", told)
        yield


_COLLECTED = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Noted before any is deselected."""
    config.stash[_COLLECTED] = {item.nodeid.partition("[")[0] for item in items}
    for item in items:
        if is_realtime(item.nodeid) and item.get_closest_marker("pure") is None:
            item.add_marker(pytest.mark.realtime)
    items.sort(key=lambda item: _late_in_the_run(item.nodeid))


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> set[str]:
    """Tests that pytest found in this run, `path::name`, also those that it leaves out."""
    return request.config.stash[_COLLECTED]


@pytest.fixture(autouse=True)
def sockets_and_processes_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    marked = request.node.get_closest_marker("realtime") is not None
    pure = request.node.get_closest_marker("pure") is not None
    with sockets_only_if(marked=marked), no_processes_if(pure=pure):
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that ran in this process leaves a limit of lines and a format at pytest's own handlers, and levels."""
    formats = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    yield
    for handler in logging.getLogger().handlers:
        handler.filters.clear()
    for handler, formatter in formats:
        handler.setFormatter(formatter)
    levels = {"": logging.WARNING, "halfmoon": logging.NOTSET, "halfmoon.say": logging.NOTSET}
    for name, level in levels.items():
        if (logger := logging.getLogger(name)).level != level:  # each setting goes over all loggers there are
            logger.setLevel(level)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer.start(tmp_path / "nats")
    yield server
    server.stop()


@pytest.fixture
def nats_url(request: pytest.FixtureRequest) -> str:
    """Of a test that is marked `pure`, where `run_at` has a server within the process."""
    if request.node.get_closest_marker("pure"):
        return nats_in_process.URL
    server: EmbeddedServer = request.getfixturevalue("nats_server")
    return server.url
