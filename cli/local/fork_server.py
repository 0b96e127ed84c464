"""`python -m halfmoon.cli.local.fork_server`: is forked for each process of a cluster that is wanted.

There is one for workers, with torch, and one for the others. What is forked has its modules already. The first worker
that is wanted has its server load the model, which all workers then have in shared memory
(`workers/model/preloaded.py`). `halfmoon up` asks for a process by a message on a socket, with the descriptor that it
is to write to. The new process itself answers, with its process id, once it is a child of `halfmoon up`: so there is
none that nobody knows of.

Rules: this process has one thread, since a fork takes no other along; it holds no connection and no lock, and draws no
number that two processes must not have alike. It is started with the environment, the limits and the umask of
`halfmoon up`, so modules read the same values of these when they are imported as in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from halfmoon.bus.embedded import die_with_parent
from halfmoon.cli.local.fork_messages import (
    REQUEST_BYTES_MAX,
    CommonModel,
    ForkAnswer,
    ForkedKind,
    ForkRequest,
)
from halfmoon.cli.local.shown_command import show_command
from halfmoon.cli.main import import_when_used
from halfmoon.cli.main import main as halfmoon

#: Modules that the processes import when they run, beside those that these import.
MODULES: dict[ForkedKind, tuple[str, ...]] = {
    "worker": (
        "halfmoon.cli.processes.worker",
        "halfmoon.store.agent_client",
        "halfmoon.workers.attention.worker",
        "halfmoon.workers.decode.worker",
        "halfmoon.workers.mixed.worker",
        "halfmoon.workers.model.attention.choice",
        "halfmoon.workers.model.engine",
        "halfmoon.workers.model.grammar_masks",
        "halfmoon.workers.model.self_test",
        "halfmoon.workers.prefill.worker",
        "halfmoon.workers.profiler",
        "halfmoon.workers.worker",
        "uvloop",
    ),
    "other": (
        "halfmoon.cli.processes.conductor",
        "halfmoon.cli.processes.frontend",
        "halfmoon.cli.processes.store",
        "halfmoon.conductor.live.metrics",
        "halfmoon.conductor.live.shell",
        "halfmoon.store.agent.agent",
        "halfmoon.store.agent.metrics",
        "halfmoon.workers.frontend.frontend",
        "halfmoon.workers.model.text.tokenizer",
        "uvloop",
    ),
}
#: Longest wait of a process for the one between it and `halfmoon up` to be gone.
ADOPTED_S_MAX = 10.0


def load_modules(kind: ForkedKind) -> None:
    for name in MODULES[kind]:
        # A process that needs the module reports its absence itself.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _settle()


def load_model(common: CommonModel) -> None:
    from halfmoon.cli import model as models
    from halfmoon.schemas.policy import Layout

    layout = msgspec.json.decode(Path(common.layout_file).read_bytes(), type=Layout)
    models.preload_model(common.model, layout, common.query_first)
    _settle()


def _settle() -> None:
    """Make ready to be forked. Counts of references are written all the time: memory that the collector goes over would
    not stay shared.
    """
    if threads := len(os.listdir("/proc/self/task")) - 1:
        print(f"not forked: {threads} threads of a library are running", flush=True)
        sys.exit(1)
    gc.collect()
    gc.freeze()


def serve(channel: socket.socket, supervisor: int) -> bool:
    """Forks for each message until `halfmoon up` closes its end. True: this is a process that was forked, and its words
    are in `sys.argv`.
    """
    loaded = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 1)
        if not message:
            return False
        request = msgspec.json.decode(message, type=ForkRequest)
        if request.model is not None and request.model != loaded:
            load_model(request.model)
            loaded = request.model
        between = -1
        try:
            between = os.fork()
            wanted = between == 0 and os.fork() == 0
        except OSError as problem:
            # The machine gives no process now.
            _answer(channel, ForkAnswer(error=str(problem)))
            wanted = False
        if between:
            os.close(descriptors[0])
            if between > 0:
                os.waitpid(between, 0)
        elif not wanted:
            os._exit(0)  # the wanted process becomes a child of `halfmoon up`
        else:
            _become(channel, supervisor, request, descriptors[0])
            return True


def _become(channel: socket.socket, supervisor: int, request: ForkRequest, output: int) -> None:
    """In the new process: make anew the state that an exec would have made anew."""
    os.setsid()
    deadline = time.monotonic() + ADOPTED_S_MAX
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    die_with_parent()
    if os.getppid() != supervisor:  # it died before it was to take this process along
        os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(request.environment)
    sys.argv = ["halfmoon", *request.command]
    show_command([sys.executable, "-m", "halfmoon.cli.main", *request.command])
    _draw_anew()
    with channel:
        _answer(channel, ForkAnswer(pid=os.getpid()))


def _answer(channel: socket.socket, answer: ForkAnswer) -> None:
    with contextlib.suppress(ConnectionError):  # nobody waits any more
        channel.send(msgspec.json.encode(answer))


def _draw_anew() -> None:
    """Generators that every fork would go on with from the same place."""
    import numpy as np

    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4)))  # the one that libraries share
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8)) >> 1)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="the socket's descriptor")
    parser.add_argument("kind", choices=MODULES)
    parser.add_argument("room", help="for the words of the commands")
    args = parser.parse_args()
    supervisor = os.getppid()
    show_command([sys.executable, "-m", "halfmoon.cli.local.fork_server", args.kind])
    import_when_used()
    load_modules(args.kind)
    if serve(socket.socket(fileno=args.channel), supervisor):
        halfmoon()
    sys.exit(0)


if __name__ == "__main__":
    main()
