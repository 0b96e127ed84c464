"""Workers of `halfmoon up` that are forked from one process which has loaded the model (`fork_server.py`).

Where that process cannot be had, or has died, workers are started as any other process: slower, with weights of their
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halfmoon.bus.embedded import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET = 1
_ANSWER_BYTES_MAX = 4096
#: A worker's command is shown in this room, by `ps` and to whoever looks for it.
_WORDS_ROOM = "." * 8192


class ForkServerLost(OSError):
    """It has ended, or never came up."""


class ForkedProcess:
    """A child of this process that somebody else started; as far as is needed what asyncio's own processes are."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        """Raises OSError where it has no descriptor."""
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._collect)

    def _collect(self) -> None:
        """It has ended: its status is taken, and the kernel forgets it."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Its id is nobody else's before `_collect`."""
        if self.returncode is None:
            os.kill(self.pid, number)


def end(pid: int) -> None:
    """Kills a child that nobody watches yet."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class ForkServer:
    """Loads while other processes start: the first fork waits for it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self._turn = asyncio.Lock()

    @classmethod
    def start(cls, flags: Sequence[str], log: Path) -> ForkServer:
        """`flags`: options of `fork_server`. Raises OSError where this kernel or machine cannot."""
        os.close(os.pidfd_open(os.getpid()))
        # What it forks and leaves becomes a child of this process.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, _PR_SET):
            raise OSError("this process cannot adopt others")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        module = "halfmoon.cli.local.fork_server"
        with theirs, log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, f"--channel={theirs.fileno()}", *flags, _WORDS_ROOM],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A library that starts threads when it is imported could not be forked.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
        return cls(process, ours)

    async def fork(self, command: list[str], environment: dict[str, str]) -> ForkedProcess:
        """One that runs this command of `halfmoon`. Raises ForkServerLost, OSError."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            read_end, write_end = os.pipe()
            try:
                answer = await self._asked({"command": command, "environment": environment}, write_end)
                stdout = asyncio.StreamReader()
                pipe = os.fdopen(read_end, "rb", buffering=0)
            except BaseException:
                os.close(read_end)
                raise
            pid = json.loads(answer)["pid"]
            try:
                await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), pipe)
                return ForkedProcess(pid, stdout)
            except BaseException:
                pipe.close()
                end(pid)
                raise

    async def _asked(self, request: dict[str, Any], output: int) -> bytes:
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [output])
        except ConnectionError:
            raise ForkServerLost from None
        finally:
            os.close(output)
        try:
            answer = await asyncio.get_running_loop().sock_recv(self._channel, _ANSWER_BYTES_MAX)
        except ConnectionError:
            answer = b""
        if not answer:
            raise ForkServerLost
        return answer

    def close(self) -> None:
        """Ends it; what it forked goes on. Whoever waits for a fork has ForkServerLost."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if not self._turn.locked():
            self._channel.close()
