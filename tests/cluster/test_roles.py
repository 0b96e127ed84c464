"""Workers change roles under load: no request is lost or repeated, every text is that of a cluster in peace."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.schemas.decisions import ChangeRole
from halfmoon.schemas.events import WorkerJoined
from tests.chaos.live import replayed
from tests.chaos.live_load import Load
from tests.cluster.harness import PATIENT, Cluster, children, running

pytestmark = pytest.mark.slow
ELASTIC = ("--elastic", "advise", "--prefill", "2", "--decode", "2", "--pool-mib", "192", *PATIENT)
#: Each is possible when its turn comes; halfway every worker has the other role, at the end its own.
CHANGES = (
    ("prefill-1", "decode"),
    ("decode-0", "prefill"),
    ("prefill-0", "decode"),
    ("decode-1", "prefill"),
    ("prefill-0", "prefill"),
    ("decode-0", "decode"),
    ("prefill-1", "prefill"),
    ("decode-1", "decode"),
)


async def change(cluster: Cluster, worker: str, role: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "halfmoon.cli.main", "role", worker, role, "--cluster", cluster.name]
    return await asyncio.to_thread(
        subprocess.run, command, env=cluster.environment, capture_output=True, text=True, timeout=200
    )


async def roles(cluster: Cluster) -> dict[str, str]:
    (state,) = await cluster.conductors(1)
    return {node.id: node.role for node in state.nodes if node.role in ("prefill", "decode")}


async def test_workers_change_roles_under_load_and_no_text_changes(tmp_path: Path) -> None:
    with running(tmp_path, *ELASTIC) as cluster:
        before, processes = await roles(cluster), sorted(children(cluster.process.pid))
        load = Load(cluster, random.Random(1), clients=3, steady=True)
        await load.learn()
        loading = asyncio.create_task(load.run())
        for worker, role in CHANGES:
            done = await change(cluster, worker, role)
            assert done.returncode == 0, (worker, role, done.stdout, done.stderr)
            assert (await roles(cluster))[worker] == role
        load.stop()
        await loading
        assert (load.wrong, list(load.ended)) == ([], ["finished"]), load.ended
        assert load.ended["finished"] >= len(CHANGES)
        assert await roles(cluster) == before
        assert sorted(children(cluster.process.pid)) == processes, "a process was started anew"
        ordered = [one.decision for one in await cluster.decisions() if isinstance(one.decision, ChangeRole)]
        assert [(each.worker_id, each.role) for each in ordered] == list(CHANGES)
        joined = [one.event for one in await cluster.events() if isinstance(one.event, WorkerJoined)]
        assert len(joined) == 4 + len(CHANGES), "weights are loaded once, and nobody was lost"
        assert "identical" in replayed(cluster, tmp_path)
        for worker, role, why in (
            ("prefill-9", "decode", "there is no such worker; the workers are decode-0, decode-1, prefill-0"),
            ("prefill-0", "prefill", "it is a prefill worker already"),
        ):
            done = await change(cluster, worker, role)
            assert (done.returncode != 0, why in done.stderr) == (True, True), done


async def test_a_role_that_is_needed_or_was_not_meant_to_change_stays(tmp_path: Path) -> None:
    with running(
        tmp_path, "--engine", "null", "--elastic", "advise", "--prefill", "1", "--decode", "2"
    ) as cluster:
        done = await change(cluster, "prefill-0", "decode")
        assert "no prefill worker would be left" in done.stderr, done
    with running(tmp_path, "--engine", "null", "--prefill", "2", "--decode", "1") as cluster:
        done = await change(cluster, "prefill-0", "decode")
        assert "start the cluster with --elastic" in done.stderr, done
