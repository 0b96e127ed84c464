"""The cluster of `halfmoon up` is its user's alone: who has no key gets no connection, and a key is one process's."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import nats
import pytest

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import BusUnreachable
from halfmoon.schemas import subjects
from halfmoon.schemas.events import WorkerLeft
from halfmoon.workers.frontend.edges.nats_service import settled
from tests.cluster.harness import Cluster, command_of
from tests.eventually import BOUND_S, eventually


@pytest.fixture
def cluster(null: Cluster) -> Cluster:
    return null


def halfmoon(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the cluster's user, who names neither the server nor a key."""
    command = [sys.executable, "-m", "halfmoon.cli.main", *words]
    environment = {**cluster.environment, "HALFMOON_CLUSTER": cluster.name}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False
    )


async def test_who_has_no_key_gets_no_connection(cluster: Cluster) -> None:
    with pytest.raises(BusUnreachable, match="Authorization Violation"):
        await Bus.connect(BusConfig(url=cluster.nats), name="stranger")
    with pytest.raises(BusUnreachable, match="Authorization Violation"):
        await Bus.connect(BusConfig(url=cluster.nats, user="operator", password="x"), name="operator")


def test_nobody_else_sees_into_the_state_directory(cluster: Cluster) -> None:
    """Log, keys, secret and output; the keys are not in the words of any process either."""
    assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o700
    private = [*cluster.directory.glob("credentials/*"), cluster.directory / "secret"]
    private += [cluster.directory / "cluster.json", cluster.directory / "nats" / "nats.conf"]
    names = {path.name for path in private}
    assert {"conductor-0.nk", "frontend-0.nk", "prefill-0.nk", "decode-0.nk", "up.nk", "operator.nk"} <= names
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE((cluster.directory / "credentials").stat().st_mode) == 0o700
    seeds = [path.read_text().strip() for path in private if path.suffix == ".nk"]
    assert len(set(seeds)) == len(seeds)
    for name in cluster.names():
        words = " ".join(command_of(cluster.pid(name)))
        assert not [seed for seed in seeds if seed in words]


def test_commands_of_the_same_user_find_the_cluster_without_an_option(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = str(tmp_path / "log.jsonl")
    for words in (
        ("generate", "Once", "--max-tokens", "3"),
        ("status",),
        ("policy", "show"),
        ("bench", "--requests", "2", "--concurrency", "1", "--json"),
        ("events", "save", file),
        ("replay", file),
    ):
        done = halfmoon(cluster, *words)
        assert (done.returncode, done.stderr) == (0, ""), (words, done)
    by_url = halfmoon(cluster, "status", "--nats", cluster.nats.replace("127.0.0.1", "localhost"))
    assert by_url.returncode == 0, by_url.stderr


def test_another_state_directory_has_no_key(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(cluster.process, "local", cluster.nats, cluster.http, cluster.directory)
    other.environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = halfmoon(other, "generate", "Once", "--nats", cluster.nats)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Authorization Violation" in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_each_process_speaks_for_itself_only(cluster: Cluster) -> None:
    """With the permissions of a cluster of containers (`tests/bus/test_permission_table.py`)."""
    refused: list[str] = []

    async def note(problem: Exception) -> None:
        refused.append(str(problem))

    key = cluster.config("decode-0").nkey_seed_file
    nc = await nats.connect(cluster.nats, nkeys_seed=key, error_cb=note)
    lies = [
        subjects.event("prefill-0", "WorkerLeft"),
        subjects.event(subjects.SUPERVISOR, "WorkerLeft"),
        subjects.decision("prefill-0", "StartPrefill"),
        "$JS.API.STREAM.PURGE.EVENTS",
        "$JS.API.STREAM.DELETE.EVENTS",
    ]
    for subject in lies:
        await nc.publish(subject, b"{}")
    await settled(nc)
    await nc.close()
    assert len(refused) == len(lies)


async def test_keys_outlive_a_restart_of_the_server(cluster: Cluster) -> None:
    before = (cluster.directory / "credentials" / "operator.nk").read_bytes()
    cluster.kill_server()

    async def connected() -> nats.NATS | None:
        try:
            return await nats.connect(
                cluster.nats, nkeys_seed=cluster.config().nkey_seed_file, allow_reconnect=False
            )
        except (OSError, nats.errors.Error):
            return None

    async def answered() -> bool:
        try:
            await cluster.generate(nc, prompt="after", max_tokens=3)
        except nats.errors.NoRespondersError:  # the frontend is not back yet
            return False
        return True

    nc = await eventually(connected, "the server is back", every_s=0.05)
    assert nc is not None
    await eventually(answered, "a frontend is back", every_s=0.05)
    await nc.close()
    assert (cluster.directory / "credentials" / "operator.nk").read_bytes() == before
    with pytest.raises(BusUnreachable, match="Authorization Violation"):
        await Bus.connect(BusConfig(url=cluster.nats), name="stranger")


async def test_the_supervisor_alone_tells_of_the_deaths_of_others(cluster: Cluster) -> None:
    """A worker that is killed is announced by `up`, with a key of its own."""
    after = (await cluster.events())[-1].seq
    cluster.kill("prefill-0")

    async def left() -> list[WorkerLeft]:
        return [s.event for s in await cluster.events(after) if isinstance(s.event, WorkerLeft)]

    said = await eventually(left, "WorkerLeft", every_s=0.1)
    assert [event.worker_id for event in said] == ["prefill-0"]
