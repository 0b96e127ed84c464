"""Tests that rest on real time are marked, and counted."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.realtime import (
    ELSEWHERE,
    counted,
    is_realtime,
    no_processes_if,
    sockets_only_if,
    starts_clusters,
)


@pytest.mark.realtime
def test_a_test_that_opens_a_socket_is_marked() -> None:
    with sockets_only_if(marked=True), socket.create_server(("127.0.0.1", 0)):
        pass
    with (
        pytest.raises(AssertionError, match="opens sockets and is not marked"),
        sockets_only_if(marked=False),
        socket.create_server(("127.0.0.1", 0)),
    ):
        pass
    with sockets_only_if(marked=False), socket.socket():
        pass


def test_a_test_that_starts_a_process_is_not_pure() -> None:
    with no_processes_if(pure=False):
        subprocess.run(["true"], check=True)
    with (
        pytest.raises(AssertionError, match="starts processes and is marked `pure`"),
        no_processes_if(pure=True),
    ):
        subprocess.run(["true"], check=True)
    with no_processes_if(pure=True):
        pass


def test_a_file_within_a_folder_may_mark_its_tests_one_by_one() -> None:
    assert is_realtime("tests/store/test_client.py::test_x")
    assert not is_realtime("tests/store/test_pool.py::test_x")
    assert starts_clusters("tests/cluster/test_up.py")
    assert not starts_clusters("tests/cluster/test_profiles.py")


def test_functions_are_counted(tmp_path: Path) -> None:
    for place, source in {
        "tests/store/test_client.py": "def test_a(): ...\nasync def test_b(): ...\ndef other(): ...\n"
        "@pytest.mark.pure\ndef test_c(): ...\n@pytest.mark.slow\ndef test_d(): ...\n",
        "tests/store/test_engine.py": "pytestmark = [pytest.mark.slow]\ndef test_a(): ...\n",
        "tests/rdma/test_pairs.py": "def test_a(): ...\n",
        "tests/test_x.py": "@pytest.mark.realtime\ndef test_a(): ...\nclass TestB:\n    def test_b(self): ...\n",
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(source)
    assert counted(tmp_path) == (8, 6, 3)


def test_no_more_rest_on_real_time_than_one_in_four() -> None:
    """One more wants a reason: most can have their server, their sockets or their clock within the process."""
    every, resting, _ = counted(Path(__file__).parents[1])
    assert resting <= 500 < every // 4, (every, resting)


def test_what_skips_in_the_default_suite_names_its_target() -> None:
    for place in ELSEWHERE:
        file = Path(__file__).parent / place
        said = [file.read_text()]
        if (beside := file.with_name("conftest.py")).exists():
            said.append(beside.read_text())
        assert re.search(r"skip.*make test-(docker|gateway|observability|rdma)", "\n".join(said)), place
