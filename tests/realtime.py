"""Which tests rest on real time. They carry the marker `realtime` and run after the others.

A test rests on real time where a server, another process, a socket or a second of the clock takes part: by folder, and
by file where a folder holds both kinds. tests/test_tidy.py finds files that are missing here.
"""

from __future__ import annotations

from pathlib import PurePosixPath

FOLDERS = {"bus", "cluster", "docker", "frontend", "observability", "page", "rdma", "store", "vllm"}
FILES = {
    "conductor/test_beginning.py",
    "conductor/test_copies.py",
    "conductor/test_digests.py",
    "conductor/test_live.py",
    "conductor/test_policy_command.py",
    "conductor/test_viewing.py",
    "fuzz/test_fuzz.py",
    "replay/test_browser.py",
    "replay/test_cluster_log.py",
    "replay/test_saving.py",
    "simulation/test_commands.py",
    "test_commands.py",
    "test_eventually.py",
    "test_guardian.py",
    "test_output_logs.py",
    "test_ports.py",
    "test_reruns.py",
    "workers/test_model_files.py",
    "workers/test_moved_segments.py",
    "workers/test_prefill_queue.py",
    "workers/test_pushed_tokens.py",
    "workers/test_remote_cache.py",
    "workers/test_remote_segments.py",
    "workers/test_split_cache.py",
    "workers/test_stages.py",
    "workers/test_worker_channels.py",
}
#: One process runs all tests of these, one after the other: a cluster has more processes than the machine has cores.
CLUSTERS = {"cluster", "replay/test_cluster_log.py", "test_guardian.py"}


def is_realtime(path: str) -> bool:
    """`path`: of a test's file (or its node id), from the root: "tests/store/test_pool.py"."""
    return _place(path, FOLDERS) or _place(path, FILES)


def starts_clusters(path: str) -> bool:
    return _place(path, CLUSTERS)


def _place(path: str, among: set[str]) -> bool:
    file = PurePosixPath(path.partition("::")[0])
    if "tests" not in file.parts:
        return False
    inside = file.parts[file.parts.index("tests") + 1 :]
    return inside[0] in among or "/".join(inside) in among
