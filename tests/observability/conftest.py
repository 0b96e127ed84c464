"""Tests that need a real Prometheus are asked for by `make test-observability`, and skip with the reason where
none is.
"""

from __future__ import annotations

import os

import pytest

from tests.observability.server import Unavailable, command


@pytest.fixture(scope="session")
def promtool() -> str:
    if not os.environ.get("HALFMOON_TEST_OBSERVABILITY"):
        pytest.skip("Prometheus: `make test-observability` runs these")
    try:
        command("prometheus")
        return command("promtool")
    except Unavailable as problem:
        # It cannot be had on this machine, which is no fault of the code: the closing line counts it as skipped.
        pytest.skip(str(problem))
