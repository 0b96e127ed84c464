"""Processes of `halfmoon up` that are forked from one which has their modules, and of workers the model
(`fork_server.py`).

Where that process cannot be started, or has died, they are started as programs of their own: slower, and workers with
weights of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from halfmoon.bus.embedded import die_with_parent
from halfmoon.cli import model as models
from halfmoon.cli.local.fork_messages import (
    ANSWER_BYTES_MAX,
    CommonModel,
    ForkAnswer,
    ForkedKind,
    ForkRequest,
)
from halfmoon.cli.processes.attention import decode_attention

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET = 1
#: Room for a process's command, which `ps` shows.
_WORDS_ROOM = "." * 8192


class ForkServerLost(OSError):
    """It has ended, or never came up."""


class ForkedProcess:
    """A child of this process that another process started, with the needed part of asyncio's own interface."""

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
    """Kills a child that nobody watches."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class _Output(asyncio.StreamReaderProtocol):
    """The words of a process. `over`: nobody can write any more."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.reader = reader
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.over.done():
            self.over.set_result(None)


class ForkServer:
    """Imports and loads on its own: a fork waits for what it needs of it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process, self._channel = process, channel
        self._turn = asyncio.Lock()

    @classmethod
    def start(cls, kind: ForkedKind, log: Path) -> ForkServer:
        """Raises OSError where this kernel or machine cannot."""
        os.close(os.pidfd_open(os.getpid()))
        # An orphan of its forks becomes a child of this process.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, _PR_SET):
            raise OSError("this process cannot adopt others")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        module = "halfmoon.cli.local.fork_server"
        with theirs, log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, f"--channel={theirs.fileno()}", kind, _WORDS_ROOM],
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

    async def fork(self, request: ForkRequest) -> ForkedProcess:
        """Raises ForkServerLost, and OSError where the machine gives no process, memory or descriptor now."""
        message = msgspec.json.encode(request)
        async with self._turn:
            output = _Output(asyncio.StreamReader())
            read_end, write_end = os.pipe()
            try:
                transport = await _opened(read_end, output)
                try:
                    _send(self._channel, message, write_end)
                except OSError:
                    transport.close()
                    raise
            finally:
                os.close(write_end)
            try:
                pid = await self._answer(output.over)
            except BaseException:
                transport.close()
                raise
            try:
                return ForkedProcess(pid, output.reader)
            except BaseException:
                transport.close()
                end(pid)
                raise

    async def _answer(self, over: asyncio.Future[None]) -> int:
        """The new process's id. One that is killed before its answer leaves an output that nobody writes to."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._channel, readable.set)
        waiting: asyncio.Future[Any] = loop.create_task(readable.wait())
        try:
            await asyncio.wait({waiting, over}, return_when=asyncio.FIRST_COMPLETED)
            answer = self._channel.recv(ANSWER_BYTES_MAX)
        except BlockingIOError:
            raise OSError("it was killed before it began") from None
        except ConnectionError:
            raise ForkServerLost from None
        finally:
            waiting.cancel()
            loop.remove_reader(self._channel)
        if not answer:
            raise ForkServerLost
        told = msgspec.json.decode(answer, type=ForkAnswer)
        if told.error:
            raise OSError(told.error)
        return told.pid

    def close(self) -> None:
        """Ends the server; its forks go on. A caller that waits for a fork gets ForkServerLost."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if not self._turn.locked():
            self._channel.close()


class ForkServers:
    """Those of one cluster."""

    def __init__(self) -> None:
        #: Processes of a kind that has none are programs of their own.
        self.running: dict[ForkedKind, ForkServer] = {}
        #: That workers are forked with.
        self.model: CommonModel | None = None

    def start(self, args: argparse.Namespace, directory: Path) -> None:
        """For the cluster that these options of `halfmoon up` tell of, whose state is kept in `directory`."""
        self.model = _common_model(args, directory)
        kinds: tuple[ForkedKind, ...] = ("worker", "other") if self.model else ("other",)
        for kind in kinds:
            with contextlib.suppress(OSError):  # its processes are programs of their own then
                self.running[kind] = ForkServer.start(kind, directory / f"fork-server-{kind}.out")

    def close(self, *kinds: ForkedKind) -> None:
        """All, where none is named."""
        for kind in kinds or tuple(self.running):
            if (server := self.running.pop(kind, None)) is not None:
                server.close()


def layout_file(directory: Path) -> Path:
    """Where the layout of the cluster stands whose state is kept in `directory`."""
    return directory / "layout.json"


def _common_model(args: argparse.Namespace, directory: Path) -> CommonModel | None:
    """None for a GPU, whose memory a fork does not share, and where workers compute in several threads: how weights are
    packed may depend on their number.
    """
    elsewhere = decode_attention(args, attention_workers=args.attention) == "remote"
    whole = args.prefill or args.mixed or (args.decode and not elsewhere)
    query_first = (*[False] * bool(whole), *[True] * bool(args.decode and elsewhere))
    none = not query_first or args.engine == "null"
    if none or args.threads != 1 or models.device_of(args) != "cpu":
        return None
    return CommonModel(args.model, str(layout_file(directory)), query_first)


async def _opened(read_end: int, output: _Output) -> asyncio.ReadTransport:
    """Raises OSError, RuntimeError."""
    pipe = os.fdopen(read_end, "rb", buffering=0)
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, pipe)
    except BaseException:
        pipe.close()
        raise
    return transport


def _send(channel: socket.socket, request: bytes, output: int) -> None:
    """Raises ForkServerLost where nobody is there."""
    try:
        socket.send_fds(channel, [request], [output])
    except ConnectionError:
        raise ForkServerLost from None
