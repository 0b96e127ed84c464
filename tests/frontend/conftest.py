"""Fixtures of the frontend's tests; the double is in `frontend_double`."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from frontend_double import MODEL, Cluster, cluster

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.workers.frontend import cluster_status, redelivery
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests import nats_in_process
from tests.eventually import BOUND_S, SCENARIO_S
from tests.in_process import InProcessLoop


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests of this folder: each reads the log from where it starts."""
    server = EmbeddedServer.start(tmp_path_factory.mktemp("nats"), max_payload_bytes=1 << 20)
    yield server.url
    server.stop()


@pytest.fixture(autouse=True, scope="session")
def platform_is_known() -> None:
    """OpenAI's client asks for it with its first request. Python answers by a process, once, and keeps what it heard:
    without this the test that happens to be the first would be told that it is not `pure`.
    """
    platform.platform()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend waits for others as long as tests do: who plays them shares its loop, and may stand still with it."""
    monkeypatch.setattr(cluster_status, "ANSWER_S", BOUND_S)
    monkeypatch.setattr(redelivery, "TIMEOUT_S", BOUND_S)


@pytest.fixture
def run(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Callable[..., None]:
    """`run(scenario, **config)`: a cluster, and the scenario in it. Of a test that is marked `pure`, all within the
    process (`in_process`); of any other over real sockets and a real server.
    """
    pure = request.node.get_closest_marker("pure") is not None
    server_url = nats_in_process.URL if pure else request.getfixturevalue("server_url")

    def run_scenario(scenario: Callable[[Cluster], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            if pure:
                await nats_in_process.listen()
            async with cluster(server_url, tokenizer, **options) as made:
                await scenario(made)

        with asyncio.Runner(loop_factory=InProcessLoop if pure else None) as runner:
            runner.run(asyncio.wait_for(main(), SCENARIO_S))

    return run_scenario
