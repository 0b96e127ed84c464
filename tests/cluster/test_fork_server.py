"""Processes of `halfmoon up` are forked from one that has their modules, and workers from one that has the model: one
copy of the weights, and all are back at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.cli.local import fork_server, forked
from halfmoon.cli.local.fork_messages import REQUEST_BYTES_MAX, CommonModel, ForkRequest
from halfmoon.cli.local.forked import ForkServer, ForkServerLost
from tests.cluster.harness import FORK_SERVER, Cluster, children, command_of, running
from tests.eventually import eventually
from tests.workers.made_models import directory

#: Of the model that comes along, in f32; what is packed of it is more.
WEIGHTS_MIB = 513
TOKEN = "full-moon"
#: The made model has no room for more.
TINY = ("--block-tokens", "16", "--pool-mib", "16", "--dtype", "float32", "--prefill", "1", "--decode", "1")
ALONE = "warning: there is nothing to fork it from: it starts by itself"
DECODE = ForkRequest(["decode", "--node", "n"], {})
#: Whose processes are forked, in this order.
KINDS = "worker", "other"


def shared_weights_mib(pid: int) -> int:
    """Memory of no file that other processes have too. What the process itself computes with is its own."""
    shared_kib, of_no_file = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # a mapping: addresses, rights, offset, device, inode
            of_no_file = rest[3] == "0"
        elif of_no_file and name in ("Shared_Clean:", "Shared_Dirty:"):
            shared_kib += int(rest[0])
    return shared_kib // 1024


def fork_servers(cluster: Cluster) -> dict[str, int]:
    """Their process ids by the kind of what they fork."""
    commands = {pid: command_of(pid) for pid in children(cluster.process.pid)}
    return {kind: pid for kind in KINDS for pid, words in commands.items() if {FORK_SERVER, kind} <= {*words}}


def beginning(pid: int) -> bytes:
    """What an exec told the process: it has random addresses, which are the same in all that is forked."""
    return Path(f"/proc/{pid}/auxv").read_bytes()


async def answer(cluster: Cluster) -> str:
    body = {"prompt": "abcdefgh" * 4, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{cluster.http}/v1/completions", json=body) as response,
    ):
        answered: dict[str, Any] = await response.json()
        assert response.status == 200, answered
        return str(answered["choices"][0]["text"])


async def killed_and_back(cluster: Cluster, name: str, says: str = "takes orders") -> int:
    """The process id of its next life, once it says so."""
    lives = cluster.output(name).count(says)
    old = cluster.kill(name)
    await eventually(lambda: cluster.output(name).count(says) > lives, f"{name} is back")
    new = cluster.pid(name)
    assert new != old
    return new


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Cluster]:
    """A made model's workers, of whose environment alone the server's token comes."""
    model = directory().write(tmp_path / "model")
    server = EmbeddedServer.start(tmp_path / "nats", extra_config=f'authorization {{ token: "{TOKEN}" }}')
    try:
        flags = ("--model", str(model), "--nats", server.url, "--nats-token", TOKEN)
        with running(tmp_path / "state", *TINY, *flags) as cluster:
            yield cluster
    finally:
        server.stop()


async def test_processes_are_forked_and_forked_again_and_without_a_fork_server_start_by_themselves(
    tiny: Cluster,
) -> None:
    servers = fork_servers(tiny)
    text = await answer(tiny)
    forks = {"worker": ("prefill-0", "decode-0"), "other": ("conductor-0", "store-decode-0", "frontend-0")}
    begun = {kind: {beginning(tiny.pid(name)) for name in names} for kind, names in forks.items()}
    assert begun == {kind: {beginning(servers[kind])} for kind in KINDS}
    assert begun["worker"] != begun["other"]

    killed = {"decode-0": "takes orders", "store-decode-0": "blocks of"}
    for kind, (name, says) in zip(KINDS, killed.items(), strict=True):
        again = await killed_and_back(tiny, name, says)
        assert beginning(again) == beginning(servers[kind])
        assert again in children(tiny.process.pid)
    assert await answer(tiny) == text

    # Which nobody notices before one of its kind has to be started again.
    for server in servers.values():
        os.kill(server, signal.SIGKILL)
    for name, says in killed.items():
        alone = await killed_and_back(tiny, name, says)
        assert {beginning(alone)} not in begun.values()
    assert await answer(tiny) == text
    assert fork_servers(tiny) == {}
    said = (tiny.directory.parents[1] / f"{tiny.name}.out").read_text()
    assert [said.count(f"] {name}: {ALONE}") for name in killed] == [1, 1]


def test_workers_share_their_weights(small: Cluster) -> None:
    """Once in the machine's memory, whatever each has computed since."""
    assert sorted(fork_servers(small)) == sorted(KINDS)
    workers = [small.pid(name) for name in ("prefill-0", "prefill-1", "decode-0")]
    assert [shared_weights_mib(pid) > WEIGHTS_MIB for pid in workers] == [True, True, True]


@pytest.mark.slow
def test_workers_that_compute_in_several_threads_are_not_forked(tmp_path: Path) -> None:
    model = directory().write(tmp_path / "model")
    with running(tmp_path / "state", *TINY, "--model", str(model), "--threads", "2") as cluster:
        assert list(fork_servers(cluster)) == ["other"]
        assert beginning(cluster.pid("prefill-0")) != beginning(cluster.pid("decode-0"))


@pytest.fixture
def adopting() -> Iterator[None]:
    """Who starts a fork server adopts what is left alone; this process does not go on with it."""
    yield
    ctypes.CDLL(None).prctl(forked._PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.usefixtures("adopting")
async def test_a_fork_server_that_cannot_load_is_lost_and_says_why(tmp_path: Path) -> None:
    log = tmp_path / "fork-server.out"
    server = ForkServer.start("worker", log)
    without_layout = CommonModel("none", str(tmp_path / "none.json"), (False,))
    for _ in range(2):
        with pytest.raises(ForkServerLost):
            await server.fork(ForkRequest(DECODE.command, {}, without_layout))
    server.close()
    assert "none.json" in log.read_text()


@pytest.mark.usefixtures("adopting")
async def test_who_waits_for_a_fork_is_told_that_the_fork_server_was_closed(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    os.mkfifo(layout)
    server = ForkServer.start("worker", tmp_path / "fork-server.out")
    waiting = asyncio.create_task(
        server.fork(ForkRequest(DECODE.command, {}, CommonModel("none", str(layout), (False,))))
    )
    never_written = await eventually(lambda: _opened(layout), "it reads its layout")
    assert not waiting.done()
    server.close()
    with pytest.raises(ForkServerLost):
        await waiting
    os.close(never_written)


def _opened(pipe: Path) -> int:
    """A descriptor; 0: nobody reads."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return 0


@pytest.fixture
def ended() -> Iterator[tuple[ForkServer, socket.socket]]:
    """One whose process is not there, and the socket's other end, where a test is that process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    server = ForkServer(subprocess.Popen(["true"]), ours)
    yield server, theirs
    server.close()
    theirs.close()


async def test_a_worker_that_is_killed_before_it_has_answered_is_missed(
    ended: tuple[ForkServer, socket.socket],
) -> None:
    """It can be started again: the fork server is not lost."""
    server, theirs = ended
    asked = asyncio.create_task(server.fork(DECODE))
    _, (output,), _, _ = await asyncio.to_thread(socket.recv_fds, theirs, REQUEST_BYTES_MAX, 1)
    assert not asked.done()
    os.close(output)
    with pytest.raises(OSError, match="killed before it began") as told:
        await asked
    assert not isinstance(told.value, ForkServerLost)


async def test_a_fork_server_that_ends_with_a_request_in_its_hands_is_lost(
    ended: tuple[ForkServer, socket.socket],
) -> None:
    server, theirs = ended
    asked = asyncio.create_task(server.fork(DECODE))
    _, (output,), _, _ = await asyncio.to_thread(socket.recv_fds, theirs, REQUEST_BYTES_MAX, 1)
    theirs.close()
    os.close(output)
    with pytest.raises(ForkServerLost):
        await asked


async def test_a_fork_that_there_is_no_process_for_is_refused_and_the_next_one_is_heard(
    ended: tuple[ForkServer, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    server, theirs = ended
    serving = asyncio.create_task(asyncio.to_thread(fork_server.serve, theirs, os.getpid()))
    for _ in range(2):
        with pytest.raises(OSError, match="temporarily unavailable") as told:
            await server.fork(DECODE)
        assert not isinstance(told.value, ForkServerLost)
    server.close()
    assert await serving is False


@pytest.mark.slow
def test_what_is_forked_draws_other_numbers() -> None:
    program = f"""
import os, random
import numpy.random, torch
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
