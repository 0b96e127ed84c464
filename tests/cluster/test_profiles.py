"""Clusters of tests do not measure a profile twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.workers.kept_profile import doubt, kept_profile
from tests.cluster.profiles import SteadyProfiles


def start(home: Path, patch: pytest.MonkeyPatch) -> int:
    """As a worker does: how often it measured. No two of its measurements agree."""
    measured: list[CostProfile] = []

    def measure() -> CostProfile:
        measured.append(CostProfile(prefill_base_ns=1_000 * 10 ** len(measured)))
        return measured[-1]

    with patch.context() as inside:
        inside.setenv("XDG_CACHE_HOME", str(home))
        assert kept_profile("key", measure, lambda _: 9_000).prefill_base_ns == 1_000
    return len(measured)


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SteadyProfiles:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    found = SteadyProfiles(tmp_path / "clusters")
    found.settle()
    return found


def test_what_was_measured_once_is_there_at_each_later_start(
    profiles: SteadyProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(profiles.home, monkeypatch) > 0
    assert start(profiles.home, monkeypatch) > 0  # what does not agree is measured again
    profiles.settle()
    assert start(profiles.home, monkeypatch) == 0
    with monkeypatch.context() as inside:
        inside.setenv("XDG_CACHE_HOME", str(profiles.home))
        doubt("key")
    profiles.settle()
    assert start(profiles.home, monkeypatch) == 0


def test_a_checkout_begins_with_what_the_user_has_and_leaves_it_as_it_is(
    profiles: SteadyProfiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    assert start(users, monkeypatch) > 0
    profiles.settle()
    assert start(profiles.home, monkeypatch) == 0
    assert start(users, monkeypatch) > 0


def test_weights_are_the_users(profiles: SteadyProfiles, tmp_path: Path) -> None:
    profiles.settle()
    (profiles.home / "halfmoon" / "weights" / "large").write_text("x")
    assert (tmp_path / "users" / "halfmoon" / "weights" / "large").read_text() == "x"
