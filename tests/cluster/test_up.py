"""`halfmoon up` from start to end: what stops it, what dies under it, what it leaves, what it says to wrong
options.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.cli.local.forked import ForkServers
from halfmoon.cli.main import main
from halfmoon.workers import hold_points
from tests.cluster.harness import Cluster, children, command_of, running, start
from tests.cluster.holding import Holds
from tests.cluster.prompts import prompt
from tests.eventually import BOUND_S, eventually, eventually_here
from tests.ports import HeldPorts
from tests.workers.made_models import directory

#: One node of each role, nothing computed.
SMALL = ("--prefill", "1", "--decode", "1")
NULL = (*SMALL, "--engine", "null")
#: Tokens of an answer whose worker holds in the middle of it.
LONG = 20


def said(cluster: Cluster) -> str:
    return (cluster.directory.parents[1] / f"{cluster.name}.out").read_text()


def sockets(state: Path) -> list[str]:
    return [str(path) for path in state.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]


def nothing_left(cluster: Cluster) -> None:
    assert cluster.left_behind() == []
    assert sockets(cluster.directory.parents[1]) == []
    assert [p.name for p in Path("/tmp").glob(f"*{cluster.name}*") if stat.S_ISSOCK(p.lstat().st_mode)] == []
    assert not (cluster.directory / "cluster.json").exists()
    assert not (cluster.directory / "secret").exists()


async def ask(cluster: Cluster, tokens: int, **fields: Any) -> dict[str, Any]:
    """One answer over HTTP: its client loses nothing when nats-server dies."""
    body = {"prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=BOUND_S)) as http,
        http.post(f"{cluster.http}/v1/completions", json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == tokens
        return answer


def under_way(asked: asyncio.Future[dict[str, Any]]) -> bool:
    """Raises what ended it, if it was an error."""
    return not (asked.done() and asked.result())


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters; those that a failed test left running are killed at its end."""
    started: list[Cluster] = []

    def begin(*flags: str, name: str = "") -> Cluster:
        started.append(start(tmp_path, *flags, name=name))
        return started[-1]

    yield begin
    for cluster in started:
        if cluster.process.poll() is None:
            cluster.process.kill()
            cluster.process.wait()


@pytest.fixture
def held(tmp_path: Path, begun: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster of null engines whose decode worker will hold in the middle of the first answer."""
    (tmp_path / "holds").mkdir()
    monkeypatch.setenv(hold_points.VARIABLE, str(tmp_path / "holds"))
    cluster = begun(*NULL)
    Holds(cluster).arm(hold_points.DECODE_STEP, LONG // 2)
    return cluster


async def drains(cluster: Cluster) -> bool:
    async with aiohttp.ClientSession() as http, http.get(f"{cluster.http}/ready") as response:
        return response.status == 503


# --- the end ------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_ctrl_c_lets_an_open_request_finish_and_leaves_nothing(held: Cluster) -> None:
    cluster = held
    asked = asyncio.ensure_future(ask(cluster, LONG))
    await Holds(cluster).held(hold_points.DECODE_STEP)
    cluster.process.send_signal(signal.SIGINT)
    await eventually(lambda: drains(cluster), "it drains")
    assert under_way(asked)
    Holds(cluster).go_on()
    await asked
    assert await asyncio.to_thread(cluster.stop) == 0
    nothing_left(cluster)
    assert "Traceback" not in said(cluster)


@pytest.mark.slow
async def test_a_second_ctrl_c_stops_at_once(held: Cluster) -> None:
    cluster = held
    asked = asyncio.ensure_future(ask(cluster, LONG))
    await Holds(cluster).held(hold_points.DECODE_STEP)
    cluster.process.send_signal(signal.SIGINT)
    await eventually(lambda: drains(cluster), "it drains")
    assert under_way(asked)
    assert cluster.process.poll() is None
    assert await asyncio.to_thread(cluster.stop) == 0
    # At the end of a drain its client would be told so; nobody has told it anything.
    with pytest.raises(aiohttp.ClientError):
        await asked
    nothing_left(cluster)


# --- kill -9 ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["conductor-0", "prefill-0", "decode-0", "frontend-0", "nats-server"])
def test_a_process_is_killed_and_the_cluster_stopped_before_it_is_back(
    begun: Callable[..., Cluster], victim: str
) -> None:
    cluster = begun(*NULL)
    os.kill(cluster.server_pid() if victim == "nats-server" else cluster.pid(victim), signal.SIGKILL)
    eventually_here(lambda: f"{victim} died (SIGKILL)" in said(cluster), "it is missed")
    assert cluster.stop() == 0
    nothing_left(cluster)
    assert "Traceback" not in said(cluster)


@pytest.mark.slow
async def test_kill_9_of_up_takes_the_children_along_and_the_next_up_removes_the_segments(
    begun: Callable[..., Cluster],
) -> None:
    first = begun(*SMALL, "--pool-mib", "128")
    below = children(first.process.pid)
    assert len(below) == 9  # nats-server, two fork servers, conductor, two stores, two workers, frontend
    first.process.kill()
    first.process.wait()
    eventually_here(lambda: not any(command_of(pid) not in ([], [""]) for pid in below), "all have ended")
    segments = [f"/dev/shm/halfmoon-{first.name}-{node}" for node in ("decode-0", "prefill-0")]
    assert sorted(first.left_behind()) == segments
    second = begun(*SMALL, "--pool-mib", "128", name=first.name)
    assert f"removed what an earlier cluster left: {', '.join(Path(s).name for s in segments)}" in said(
        second
    )
    await ask(second, 3, prompt=prompt(600))
    store = second.kill("store-decode-0")  # and while it is away, the end
    eventually_here(lambda: command_of(store) in ([], [""]), "the store has ended")
    assert segments[0] in second.left_behind()
    assert await asyncio.to_thread(second.stop) == 0
    nothing_left(second)
    third = begun(*NULL, name=first.name)
    await ask(third, 3)
    assert third.stop() == 0
    nothing_left(third)


@pytest.mark.slow
async def test_nats_server_is_started_again_under_open_requests(held: Cluster) -> None:
    cluster = held
    before = asyncio.ensure_future(ask(cluster, LONG))
    await Holds(cluster).held(hold_points.DECODE_STEP)
    old = cluster.server_pid()
    os.kill(old, signal.SIGKILL)
    during = asyncio.ensure_future(ask(cluster, 5))
    assert under_way(before)
    Holds(cluster).go_on()
    await asyncio.gather(before, during)
    await ask(cluster, 5)
    assert cluster.server_pid() != old
    nc = await cluster.connect()  # the same address
    await cluster.generate(nc, prompt="after", max_tokens=3)
    await nc.close()
    assert "nats-server died (SIGKILL); it is started again" in said(cluster)
    assert await asyncio.to_thread(cluster.stop) == 0
    nothing_left(cluster)


# --- a server of the user's, options from three places ------------------------------------------------------


@pytest.mark.slow
async def test_a_server_of_the_users_and_options_by_flag_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag before environment before file; a table before the top of the file."""
    held_port = HeldPorts()
    port = held_port.first
    file = tmp_path / "halfmoon.toml"
    file.write_text(
        "prefill = 4\nkv-blocks = 77\nprefill-kv-blocks = 33\nbatch-max = 5\nnode = 'of another command'\n"
        f"[up]\nbatch-max = 6\ndecode = 3\nprefill = 3\nport = {port}\nengine = 'torch'\n[store]\npool-mib = 9\n"
    )
    monkeypatch.setenv("HALFMOON_DECODE", "2")
    monkeypatch.setenv("HALFMOON_ENGINE", "null")
    monkeypatch.setenv("HALFMOON_PREFILL", "2")
    authorization = 'authorization { token: "full-moon" }'
    server = EmbeddedServer.start(tmp_path / "mine", extra_config=authorization)
    try:
        flags = ("--prefill", "1", "--nats", server.url, "--nats-token", "full-moon")
        with running(tmp_path, *flags, "--config", str(file)) as cluster:
            assert cluster.nats == server.url
            assert cluster.http == f"http://127.0.0.1:{port}"  # the file's
            assert cluster.names("prefill") == ["prefill-0"]  # the flag's
            assert cluster.names("decode") == ["decode-0", "decode-1"]  # the environment's
            assert cluster.names("store") == []  # the environment's engine
            words = command_of(cluster.pid("decode-0"))
            assert words[words.index("--kv-blocks") + 1] == "77"  # the top of the file
            assert words[words.index("--batch-max") + 1] == "6"  # its table
            words = command_of(cluster.pid("prefill-0"))
            assert words[words.index("--kv-blocks") + 1] == "33"
            await ask(cluster, 3)
        assert server.process.poll() is None  # not ours to stop
        nothing_left(cluster)
    finally:
        server.stop()
        held_port.close()


# --- what cannot be -----------------------------------------------------------------------------------------


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The words of `halfmoon up` on standard error; they must be one line, and status 1. Fork servers, which start
    beside these checks, are left out.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(ForkServers, "start", lambda *_: None)

    def ask_for(*flags: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["up", *flags])
        out, err = capsys.readouterr()
        assert (end.value.code, len(err.splitlines()), out) == (1, 1, ""), err
        assert err.startswith("halfmoon: ")
        return err.rstrip()

    return ask_for


def test_a_second_cluster_of_the_same_name_is_refused(small: Cluster) -> None:
    """By a process of its own: nothing of Python's is on standard error."""
    again = [sys.executable, "-m", "halfmoon.cli.main", "up", *NULL, "--cluster", small.name]
    second = subprocess.run(again, env=small.environment, capture_output=True, text=True, timeout=BOUND_S)
    line = f"halfmoon: a cluster named '{small.name}' runs already; name another with --cluster\n"
    assert (second.returncode, second.stdout, second.stderr) == (1, "", line)
    assert (small.directory / "cluster.json").exists()  # the first one's, untouched


@pytest.mark.pure
def test_options_that_mean_nothing_are_one_line_that_names_them(
    refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "wrong.toml"

    def config(text: str) -> str:
        file.write_text(text)
        return refusal("--config", str(file))

    assert "no model '/no/such.gguf'" in refusal("--model", "/no/such.gguf")
    assert "--block-tokens 7: from 16 to 512" in refusal("--block-tokens", "7")
    assert "--prefill: at least 1" in refusal("--prefill", "0")
    assert "--cluster ../x: letters" in refusal("--cluster", "../x")
    assert f"--config {file}: prefil: there is no such option" in config("prefil = 3\n")
    assert f"--config {file}: [up] prefil: there is no such option" in config("[up]\nprefil = 3\n")
    assert f"--config {file}: upp: there is no such command" in config("[upp]\nprefill = 3\n")
    assert f"{file}: --prefill: invalid" in config("prefill = 'many'\n")
    assert f"--config {file}: " in config("[up\n")
    for text in ("engine = '{}'\n", "prefill = '{}'\n", "{} = 3\n", "[up]\n{} = 3\n"):
        assert len(config(text.format("x" * 5_000))) < 1_000
    monkeypatch.setenv("HALFMOON_ENGINE", "steam")
    assert "environment: --engine: 'steam' is none of" in refusal()
    monkeypatch.setenv("HALFMOON_PREFILL", "many")
    monkeypatch.delenv("HALFMOON_ENGINE")
    assert "environment: --prefill: invalid" in refusal()


@pytest.mark.pure
def test_a_chat_template_that_is_none_is_refused_before_anything_is_started(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    """Nothing is said beside the refusal: there was no server, and no process."""
    made = directory()
    made.files["tokenizer_config.json"]["chat_template"] = "{% trans %}{{ messages }}{% endtrans %}"
    folder = made.write(tmp_path / "m")
    line = refusal("--model", str(folder))
    assert (
        f"{folder / 'tokenizer_config.json'}: chat_template is no template: Encountered unknown tag" in line
    )


@pytest.mark.pure
@pytest.mark.parametrize("command", [["frontend"], ["prefill", "--node", "n"], ["decode", "--node", "n"]])
def test_a_process_alone_reads_its_template_before_its_weights(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are broken too, and its server is nowhere."""
    made = directory()
    made.files["tokenizer_config.json"]["chat_template"] = "{% if %}"
    made.files["model.safetensors"] = b"none"
    folder = made.write(tmp_path / "m")
    with pytest.raises(SystemExit) as end:
        main([*command, "--model", str(folder), "--nats", "nats://127.0.0.1:1"])
    line = capsys.readouterr().err
    assert (end.value.code, line.count("\n")) == (os.EX_CONFIG, 1)
    assert f"{folder / 'tokenizer_config.json'}: chat_template is no template" in line


def test_what_a_process_refuses_ends_the_start_in_its_words_and_without_another_try(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme secret-key-0123456789\n")
    keys.chmod(0o644)
    command = [sys.executable, "-m", "halfmoon.cli.main", "up", *NULL, "--api-keys-file", str(keys)]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S)
    words = (
        f"halfmoon: frontend-0: --api-keys-file: {keys}: mode 0644: not for others to read or write (0600)"
    )
    assert (done.returncode, done.stderr.count(words)) == (1, 1), done.stderr
    assert "started again" not in done.stderr


def test_a_port_that_is_taken_is_named(refusal: Callable[..., str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}: Address already in use" in refusal(*NULL, "--port", port)
        assert f"--http-port {port}: Address already in use" in refusal(*NULL, "--http-port", port)
        assert f"--nats-port {port}: Address already in use" in refusal(*NULL, "--nats-port", port)
    assert "--nats-port 99999: " in refusal(*NULL, "--nats-port", "99999")
