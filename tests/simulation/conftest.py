"""The trace of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.conductor.simulation.trace import Arrival, read_trace

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "conversation_trace.jsonl.zst"


@pytest.fixture(scope="session")
def trace_file() -> Path:
    return TRACE


@pytest.fixture(scope="session")
def conversation() -> list[Arrival]:
    return read_trace(TRACE)
