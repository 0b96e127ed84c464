"""What a cluster writes is its user's alone, under any umask, and nothing that a user asked is in it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import aiohttp
import pytest

from halfmoon.schemas.events import RequestFinished
from tests.cluster.harness import Cluster, children, command_of
from tests.cluster.steering import last_seq, told

#: In a prompt. Its tokens' text is nowhere else, so a file that holds it was told the prompt.
SECRET = "zyzzyva-quokka-7731"


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    return small


def everything(cluster: Cluster) -> list[Path]:
    """Files, sockets and segments that the cluster's processes have, and the folders that they made."""
    state = cluster.directory
    found = [state, *state.rglob("*"), *Path("/dev/shm").glob(f"halfmoon-{cluster.name}-*")]
    tier = state.parents[1] / "ssd"
    return [*found, tier, *tier.rglob("*")]


def open_to_others(path: Path) -> bool:
    """Whether another user of the machine reaches it: each folder on the way must let it through."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode) or not mode & 0o007:
        return False
    return all(folder.stat().st_mode & 0o001 for folder in path.parents)


def test_no_other_user_reads_or_writes_what_the_cluster_wrote(cluster: Cluster) -> None:
    # pytest's own folder is its user's alone, and would hide what is found behind it.
    base = cluster.directory.parents[1]
    for folder in (base, *base.parents):
        if folder != Path("/") and folder.stat().st_uid == os.geteuid() and "pytest" in str(folder):
            folder.chmod(0o755)
    paths = everything(cluster)
    names = {path.name for path in paths}
    assert {"cluster.json", "secret", "nats.conf", "operator.nk", "frontend-0.log", "ssd"} <= names
    assert any(path.parent == Path("/dev/shm") for path in paths)
    assert [str(path) for path in paths if open_to_others(path)] == []


async def test_a_prompt_is_in_no_file_no_metric_and_no_words_of_a_process(
    cluster: Cluster,
) -> None:
    question = {"model": "smollm2-135m-instruct", "prompt": f"{SECRET} " * 3, "max_tokens": 2}
    before = await last_seq(cluster)
    groups = json.loads((cluster.directory / "prometheus.json").read_text())
    targets = [place for group in groups for place in group["targets"]]
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{cluster.http}/v1/completions", json=question) as answer:
            assert answer.status == 200, await answer.text()
        async with http.post(f"{cluster.http}/v1/completions", json={**question, "top_p": SECRET}) as answer:
            assert answer.status == 400
        # What comes later has been through all that the first one was: what they tell, they have told.
        async with http.post(f"{cluster.http}/v1/completions", json={**question, "prompt": "x"}) as answer:
            assert answer.status == 200, await answer.text()
        await told(cluster, before, RequestFinished, 2)
        metrics = ""
        for place in targets:
            async with http.get(f"http://{place}/metrics") as page:
                metrics += await page.text()
    assert len(targets) == 8
    assert "halfmoon_" in metrics
    assert SECRET not in metrics
    needle = SECRET.encode()
    holding = [str(path) for path in everything(cluster) if path.is_file() and needle in path.read_bytes()]
    assert holding == []
    for pid in (cluster.process.pid, *children(cluster.process.pid)):
        assert SECRET not in " ".join(command_of(pid))


def test_no_process_has_a_key_among_its_words(cluster: Cluster) -> None:
    secrets = [path.read_text().strip() for path in cluster.directory.glob("credentials/*.nk")]
    secrets.append((cluster.directory / "secret").read_text().strip())
    for pid in (cluster.process.pid, *children(cluster.process.pid)):
        words = " ".join(command_of(pid))
        assert words
        assert not [secret for secret in secrets if secret in words]
