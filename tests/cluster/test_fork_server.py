"""Workers of `halfmoon up` are forked from a process that has the model: one copy of the weights, and back at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.cli.local.forked import ForkServer, ForkServerLost
from tests.cluster.harness import PATIENT, Cluster, children, command_of, running
from tests.cluster.prompts import prompt
from tests.cluster.test_up import ask

#: Of the model that comes along, in f32; what is packed of it is more.
WEIGHTS_MIB = 513
SMALL = (
    "--prefill",
    "1",
    "--decode",
    "1",
    "--pool-mib",
    "192",
    "--kv-blocks",
    "6",
    "--dtype",
    "float32",
    *PATIENT,
)
FORK_SERVER = "halfmoon.cli.local.fork_server"


def private_mib(pid: int) -> int:
    """Memory that no other process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) // 1024


def fork_servers(cluster: Cluster) -> list[int]:
    return [pid for pid in children(cluster.process.pid) if FORK_SERVER in command_of(pid)]


async def back(cluster: Cluster, name: str, before: int) -> int:
    """The worker's process id, once there is another one that the conductor gives orders to."""

    def pid() -> int:
        try:
            return cluster.pid(name)
        except AssertionError:  # at the moment there is none
            return before

    async with asyncio.timeout(60):
        while pid() == before:
            await asyncio.sleep(0.02)
        while True:
            nodes = (await cluster.status())["nodes"]
            if {"ready"} == {each["state"] for each in nodes if each["role"] != "store"} and len(nodes) == 5:
                return pid()
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_workers_share_their_weights_and_are_forked_again_or_load_by_themselves(tmp_path: Path) -> None:
    with running(tmp_path, *SMALL) as cluster:
        question = {"tokens": 12, "prompt": prompt(300)}
        text = (await ask(cluster, **question))["choices"][0]["text"]
        workers = [cluster.pid(name) for name in ("prefill-0", "decode-0")]
        assert [private_mib(pid) < WEIGHTS_MIB // 2 for pid in workers] == [True, True]
        (server,) = fork_servers(cluster)

        # A worker that dies: what is forked in its place is like it.
        cluster.kill("prefill-0")
        again = await back(cluster, "prefill-0", workers[0])
        assert again in children(cluster.process.pid)
        assert (await ask(cluster, **question))["choices"][0]["text"] == text
        assert private_mib(again) < WEIGHTS_MIB // 2

        # The process that it is forked from dies, which no worker notices before it has to be started again.
        os.kill(server, signal.SIGKILL)
        cluster.kill("decode-0")
        alone = await back(cluster, "decode-0", workers[1])
        assert (await ask(cluster, **question))["choices"][0]["text"] == text
        assert private_mib(alone) > WEIGHTS_MIB
        assert fork_servers(cluster) == []
        said = (cluster.directory.parents[1] / f"{cluster.name}.out").read_text()
        assert (
            said.count("decode-0: warning: there is nothing to fork it from: it loads its model by itself")
            == 1
        )


async def test_a_fork_server_that_cannot_load_is_lost_and_says_why(tmp_path: Path) -> None:
    log = tmp_path / "fork-server.out"
    server = ForkServer.start(
        ["--model=none", f"--layout-file={tmp_path / 'none.json'}", "--form=whole"], log
    )
    for _ in range(2):
        with pytest.raises(ForkServerLost):
            await server.fork(["decode", "--node", "n"], {})
    server.close()
    assert "none.json" in log.read_text()


async def test_who_waits_for_a_fork_is_told_that_the_fork_server_was_closed(tmp_path: Path) -> None:
    pipe = tmp_path / "never-written"
    os.mkfifo(pipe)  # it waits for its layout
    flags = ["--model=none", f"--layout-file={pipe}", "--form=whole"]
    server = ForkServer.start(flags, tmp_path / "fork-server.out")
    waiting = asyncio.create_task(server.fork(["decode", "--node", "n"], {}))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    server.close()
    with pytest.raises(ForkServerLost):
        await waiting


@pytest.mark.slow
def test_what_is_forked_draws_other_numbers() -> None:
    program = f"""
import os, random
import numpy, torch
from {FORK_SERVER} import _draw_anew
for _ in range(2):
    if not os.fork():
        _draw_anew()
        print(random.random(), numpy.random.random(), float(torch.rand(1)), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = (line.split() for line in done.stdout.splitlines())
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, False, False]


@pytest.mark.parametrize("words", [["decode", "--node", "n"], ["w" * 5000, "cut"]])
def test_a_process_shows_the_words_that_it_is_given(words: list[str]) -> None:
    """As far as there is room for them."""
    program = (
        "import json, sys; from halfmoon.cli.local.shown_command import show_command; "
        "show_command(json.loads(sys.stdin.read())); print(open('/proc/self/cmdline').read(), end='')"
    )
    command = [sys.executable, "-c", program, "." * 1000]
    done = subprocess.run(command, input=json.dumps(words), capture_output=True, text=True, check=True)
    whole = "\0".join(words)
    room = len("\0".join(command))
    assert done.stdout.rstrip("\0") == whole[:room]
    assert (len(whole) > room) == (words[1] == "cut")
