"""Which tests rest on real time. They carry the marker `realtime`, and run after the others where one process runs all.

A test rests on real time where a server, another process, a socket or a second of the clock takes part: by folder, and
by file where a folder holds both kinds. In a file of which few tests do, these carry the marker themselves.
tests/test_tidy.py finds files that are missing here, `sockets_only_if` tests, and `no_processes_if` those of its files
that say they are `pure`. A frontend whose tests are has its server and its sockets within the process
(tests/in_process.py).

    python -m tests.realtime     # how many functions of tests there are, and how many of them rest on real time
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

FOLDERS = {
    "adapters",
    "bus",
    "cluster",
    "docker",
    "frontend",
    "gateway",
    "observability",
    "page",
    "rdma",
    "sglang",
    "store",
    "vllm",
}
FILES = {
    "conductor/test_beginning.py",
    "conductor/test_copies.py",
    "conductor/test_digests.py",
    "conductor/test_live.py",
    "conductor/test_live_plugins.py",
    "conductor/test_policy_command.py",
    "fuzz/test_fuzz.py",
    "replay/test_browser.py",
    "replay/test_cluster_log.py",
    "replay/test_saving.py",
    "simulation/test_commands.py",
    "test_commands.py",
    "test_eventually.py",
    "test_guardian.py",
    "test_ports.py",
    "test_reruns.py",
    "workers/test_moved_segments.py",
    "workers/test_prefill_queue.py",
    "workers/test_pushed_tokens.py",
    "workers/test_remote_cache.py",
    "workers/test_remote_segments.py",
    "workers/test_split_cache.py",
    "workers/test_stages.py",
    "workers/test_worker_channels.py",
}
#: Within those folders. Few or none of their tests do, and these are marked one by one.
MARKED_WITHIN = {
    "adapters/test_adapter_halves.py",
    "adapters/test_adapter_state.py",
    "adapters/test_engine_answers.py",
    "adapters/test_engine_blocks.py",
    "bus/test_permission_table.py",
    "bus/test_private_names.py",
    "cluster/test_profiles.py",
    "docker/test_files.py",
    "docker/test_names.py",
    "docker/test_supply_chain.py",
    "frontend/test_begun_answers.py",
    "frontend/test_dialect.py",
    "frontend/test_fields.py",
    "frontend/test_last_words.py",
    "frontend/test_logprobs.py",
    "frontend/test_model_defaults.py",
    "frontend/test_pauses.py",
    "frontend/test_productive.py",
    "frontend/test_text.py",
    "frontend/test_tools.py",
    "observability/test_counting.py",
    "observability/test_files.py",
    "store/test_channel_messages.py",
    "store/test_epochs.py",
    "store/test_eviction.py",
    "store/test_guard.py",
    "store/test_kv_event_tokens.py",
    "store/test_pool.py",
    "store/test_pool_invariants.py",
    "store/test_rdma_refusals.py",
    "store/test_rdma_selection.py",
    "store/test_segment_names.py",
    "vllm/test_differences.py",
    "vllm/test_recorded.py",
}
#: Each of their tests skips in the default suite: a target of its own brings the containers, the server or the devices.
ELSEWHERE = {
    "docker/test_attention.py",
    "docker/test_compose.py",
    "docker/test_observability.py",
    "docker/test_vllm.py",
    "gateway/test_envoy.py",
    "observability/test_prometheus.py",
    "rdma/test_pairs.py",
    "rdma/test_two_hosts.py",
}
#: One process runs all tests of these, one after the other: a cluster has more processes than the machine has cores.
CLUSTERS = {
    "adapters/test_fleet.py",
    "adapters/test_roles.py",
    "adapters/test_weights.py",
    "cluster",
    "replay/test_cluster_log.py",
    "test_guardian.py",
}


def is_realtime(path: str) -> bool:
    """`path`: of a test's file (or its node id), from the root: "tests/store/test_pool.py"."""
    return _place(path, FOLDERS | FILES) and not _place(path, MARKED_WITHIN)


def starts_clusters(path: str) -> bool:
    return _place(path, CLUSTERS) and not _place(path, MARKED_WITHIN)


class Sockets:
    """Counts the sockets of Python that this process binds and connects, `opened`, and what it starts, `processes`."""

    def __init__(self) -> None:
        self.opened = self.processes = 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, _: tuple[Any, ...]) -> None:
        self.opened += event in ("socket.bind", "socket.connect")
        self.processes += event in ("subprocess.Popen", "os.fork", "os.posix_spawn")


SOCKETS = Sockets()


@contextlib.contextmanager
def sockets_only_if(marked: bool) -> Iterator[None]:
    """Around a test. One that opens sockets and is not marked would not run again where it was late on a machine that
    stood still.
    """
    before = SOCKETS.opened
    yield
    assert marked or SOCKETS.opened == before, (
        "it opens sockets and is not marked `realtime`: see tests/realtime.py"
    )


@contextlib.contextmanager
def no_processes_if(pure: bool) -> Iterator[None]:
    """Around a test. Elsewhere one may wait for a process that only computes; `pure` says that there is none."""
    before = SOCKETS.processes
    yield
    assert not pure or SOCKETS.processes == before, (
        "it starts processes and is marked `pure`: see tests/realtime.py"
    )


def _place(path: str, among: set[str]) -> bool:
    file = PurePosixPath(path.partition("::")[0])
    if "tests" not in file.parts:
        return False
    inside = file.parts[file.parts.index("tests") + 1 :]
    return inside[0] in among or "/".join(inside) in among


def counted(root: Path) -> tuple[int, int, int]:
    """Functions of tests below `root`, those of them that rest on real time, and those of these that the default suite
    runs: no marker leaves them out, and they are not of ELSEWHERE.
    """
    every = resting = blocking = 0
    for path in sorted((root / "tests").rglob("test_*.py")):
        place = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text())
        of_all = [node for node in tree.body if _is_pytestmark(node)]
        whole = is_realtime(place) and not any(_has(node, "pure") for node in of_all)
        left_out = _place(place, ELSEWHERE) or any(_has(node, "slow") for node in of_all)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                every += 1
                marks = {ast.unparse(mark) for mark in node.decorator_list}
                rests = (whole and "pytest.mark.pure" not in marks) or "pytest.mark.realtime" in marks
                resting += rests
                blocking += rests and not left_out and "pytest.mark.slow" not in marks
    return every, resting, blocking


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


def _has(node: ast.stmt, marker: str) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == marker for one in ast.walk(node))


if __name__ == "__main__":
    every, resting, blocking = counted(Path(__file__).parents[1])
    print(
        f"{every} functions of tests; {resting} rest on real time, {blocking} of these in the default suite"
    )
