"""`halfmoon frontend` as a process, with few files that it may open, among clients that mean it ill."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.eventually import BOUND_S, eventually

FILES, FILES_MAX = 100, 500
CONNECTIONS = 700
KEY = "secret-key-0123456789"


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES_MAX))


@asynccontextmanager
async def frontend(nats_url: str, output: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "halfmoon.cli.main", "frontend", "--nats", nats_url, "--id", "f-process",
            "--http-port", "0", "--drain-s", "1", *flags,
            stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=few_files,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def key_file(folder: Path, mode: int) -> Path:
    file = folder / "keys"
    file.write_text(f"acme {KEY}\n")
    file.chmod(mode)
    return file


def seen(process: asyncio.subprocess.Process, name: str) -> str:
    """What anybody on this machine sees of the process."""
    return Path(f"/proc/{process.pid}/{name}").read_text()


def written(output: Path) -> str:
    return output.read_text()


async def url_of(output: Path) -> str:
    await eventually(lambda: "http://" in written(output), "the frontend says its URL")
    return "http://" + written(output).partition("http://")[2].split()[0]


async def ask(url: str, method: str, path: str, key: str = "", body: Any = None) -> tuple[int, Any]:
    """(status, JSON)."""
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http,
        http.request(method, url + path, json=body) as answer,
    ):
        return answer.status, await answer.json()


async def test_half_requests_beyond_the_limit_of_files_lock_nobody_out(nats_url: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    output, keys = tmp_path / "output", key_file(tmp_path, 0o600)
    try:
        async with frontend(nats_url, output, "--http-head-s", "60", "--api-keys-file", str(keys)) as process:
            url = await url_of(output)
            assert f"Max open files            {FILES_MAX} " in seen(process, "limits"), (
                "raised to what is allowed"
            )
            assert KEY not in seen(process, "cmdline")
            host, _, port = url.removeprefix("http://").partition(":")
            halves = []
            for number in range(CONNECTIONS):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(
                    b"GET /health HTTP/1.1\r\nhost: loc" if number % 2 else b"\x16\x03\x01 nonsense\r\n\r\n"
                )
                halves.append(writer)
            assert (await ask(url, "GET", "/health"))[0] == 200
            assert (await ask(url, "GET", "/v1/models"))[0] == 401
            assert (await ask(url, "GET", "/v1/models", KEY))[0] == 200
            status, answer = await ask(
                url, "POST", "/v1/completions", KEY, {"prompt": "x", "tenant": "globex"}
            )
            assert (status, answer["error"]["param"]) == (403, "tenant")
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < FILES_MAX
            for writer in halves:
                writer.close()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), BOUND_S) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Traceback" not in written(output)
    assert KEY not in written(output)
    assert written(output).count("sent no valid HTTP") <= 30


async def test_a_key_file_that_others_may_read_ends_the_start_in_one_line(
    nats_url: str, tmp_path: Path
) -> None:
    output, keys = tmp_path / "output", key_file(tmp_path, 0o644)
    async with frontend(nats_url, output, "--api-keys-file", str(keys)) as process:
        assert await asyncio.wait_for(process.wait(), BOUND_S) == os.EX_CONFIG
    (line,) = written(output).splitlines()
    assert line == f"halfmoon: --api-keys-file: {keys}: mode 0644: not for others to read or write (0600)"
