"""Logs are bounded: those that `halfmoon up` writes, its server's, and lines that somebody provokes."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from halfmoon.bus import embedded
from halfmoon.bus.telemetry.logs import RateLimit
from halfmoon.cli.local import output_log
from halfmoon.cli.local.output_log import OutputLog, lines_of
from tests.eventually import eventually_here


def test_a_processs_output_is_two_files_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "FILE_BYTES_MAX", 1000)
    file = tmp_path / "frontend-0.log"
    file.write_text("of the process before it\n")
    log = OutputLog(file)
    for number in range(500):
        log.write(f"line {number} \ud800")
    log.close()
    assert {path.name for path in tmp_path.iterdir()} == {"frontend-0.log", "frontend-0.log.1"}
    assert all(path.stat().st_size < 1100 for path in tmp_path.iterdir())
    assert file.read_text().endswith("line 499 ?\n")


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    log = OutputLog(Path("/dev/full"))
    log.write("lost")
    log.write("lost too")
    log.close()


async def test_lines_are_cut_where_they_have_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "LINE_BYTES_MAX", 10)
    stream = asyncio.StreamReader()
    stream.feed_data("naïve\n\nb\n".encode() + b"x" * 35 + b"\nend \xff")
    stream.feed_eof()
    lines = [line async for line in lines_of(stream)]
    assert lines[:3] == ["naïve", "", "b"]
    assert "".join(lines[3:-1]) == "x" * 35
    assert len(lines) > 5
    assert lines[-1] == "end \ufffd"


@pytest.mark.realtime
def test_the_servers_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LOG_FILE_BYTES_MAX", 4096)
    server = embedded.EmbeddedServer.start(tmp_path, extra_config="trace: true")
    host, _, port = server.url.removeprefix("nats://").partition(":")
    try:
        with socket.create_connection((host, int(port))) as client:
            for _ in range(200):
                client.sendall(b"CONNECT {}\r\nPUB a 1\r\nx\r\nPING\r\n")
                client.recv(1 << 16)

        def few_logs() -> list[Path]:
            found = list(tmp_path.glob("nats.log*"))
            return found if 2 <= len(found) <= embedded.LOG_FILES_MAX else []

        # The next file is begun before the oldest one is removed.
        logs = eventually_here(few_logs, "there are some files and not too many")
        assert sum(log.stat().st_size for log in logs) < 4 * 4096
    finally:
        server.stop()


def test_lines_that_somebody_provokes_are_few_and_say_how_many_were_left_out(caplog: Any) -> None:
    now_s = [100.0]
    log = logging.getLogger("provoked")
    limit = RateLimit(burst=3, every_s=10, clock=lambda: now_s[0])
    log.addFilter(limit)
    try:
        for number in range(50):
            log.warning("attempt %s of %s", number, "many")
        now_s[0] += 11
        log.warning("100%% sure")
    finally:
        log.removeFilter(limit)
    messages = [record.getMessage() for record in caplog.records if record.name == "provoked"]
    assert messages == [
        *(f"attempt {number} of many" for number in range(3)),
        "100%% sure (47 lines before it left out)",
    ]
