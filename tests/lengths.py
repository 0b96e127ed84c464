"""How long a test is: short in `make test`, whole in `make test-slow`, which leaves out no seed and no example."""

from __future__ import annotations

import os
from typing import Any

import pytest

WHOLE = os.environ.get("HALFMOON_TEST_EXAMPLES") == "all"
_SHORTER = 8
#: Several minutes of clusters, beyond what `make test-slow` has room for.
by_make_test_attention = pytest.mark.skipif(
    not os.environ.get("HALFMOON_TEST_ATTENTION"), reason="minutes of clusters: `make test-attention`"
)


def seeds(few: int, *, of: int, first: int = 0) -> list[Any]:
    """Parameters from `first` on: `few` of them for every run, the rest of the `of` for `make test-slow`."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed >= first + few else [])
        for seed in range(first, first + of)
    ]


def sizes(short: Any, whole: Any) -> list[Any]:
    """Parameters of a test that has a short form and one for `make test-slow`."""
    return [short, pytest.param(whole, marks=pytest.mark.slow)]


def examples(whole: int) -> int:
    """How many examples a test of drawn input takes. `make test-slow` runs all such tests again, with `whole`."""
    return whole if WHOLE else max(2, whole // _SHORTER)
