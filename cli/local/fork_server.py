"""`python -m halfmoon.cli.local.fork_server`: loads torch and a model, and is forked for each worker that is wanted.

A worker that is forked has the modules and the model already, and shares their memory with all the others
(`workers/model/preloaded.py`). `halfmoon up` asks for one by a message on a socket, with the descriptor that the worker
is to write to. The worker itself answers, with its process id, once it is a child of `halfmoon up`: so there is none
that nobody knows of.

Rules: this process has one thread, since a fork takes no other along; it holds no connection and no lock, and draws no
number that two workers must not have alike. It is started with the environment, the limits and the umask of
`halfmoon up`, so modules read the same values of these when they are imported as in a worker of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from halfmoon.bus.embedded import die_with_parent
from halfmoon.cli.local.shown_command import show_command

#: Of one message: a worker's words and its environment.
REQUEST_BYTES_MAX = 1 << 17
#: Modules that workers import, beside those that these import.
MODULES = (
    "halfmoon.cli.main",
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
)
#: Longest wait of a worker for the process between it and `halfmoon up` to be gone.
ADOPTED_S_MAX = 10.0


def load(args: argparse.Namespace) -> None:
    """Load the modules and the model that all workers have in common."""
    import msgspec

    from halfmoon.cli import model as models
    from halfmoon.schemas.policy import Layout

    layout = msgspec.json.decode(Path(args.layout_file).read_bytes(), type=Layout)
    for name in MODULES:
        # A worker that needs the module reports its absence itself.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    models.preload_model(args, layout, [form == "query-first" for form in args.form])
    # Counts of references are written all the time: memory that the collector goes over would not stay shared.
    gc.collect()
    gc.freeze()


def serve(channel: socket.socket, supervisor: int) -> list[str] | None:
    """Forks for each message until `halfmoon up` closes its end. In a worker: the words of its command; else None."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 1)
        if not message:
            return None
        request = json.loads(message)
        between = -1
        try:
            between = os.fork()
            worker = between == 0 and os.fork() == 0
        except OSError as problem:
            # The machine gives no process now.
            _answer(channel, {"error": str(problem)})
            worker = False
        if between:
            os.close(descriptors[0])
            if between > 0:
                os.waitpid(between, 0)
        elif not worker:
            os._exit(0)  # the worker becomes a child of `halfmoon up`
        else:
            _become(channel, supervisor, request, descriptors[0])
            words: list[str] = request["command"]
            return words


def _become(channel: socket.socket, supervisor: int, request: dict[str, Any], output: int) -> None:
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
    os.environ.update(request["environment"])
    sys.argv = ["halfmoon", *request["command"]]
    show_command([sys.executable, "-m", "halfmoon.cli.main", *request["command"]])
    _draw_anew()
    with channel:
        _answer(channel, {"pid": os.getpid()})


def _answer(channel: socket.socket, told: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # nobody waits any more
        channel.send(json.dumps(told).encode())


def _draw_anew() -> None:
    """Generators that every fork would go on with from the same place."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4)))  # the one that libraries share
    torch.manual_seed(int.from_bytes(os.urandom(8)) >> 1)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="the socket's descriptor")
    parser.add_argument("--model", required=True)
    parser.add_argument("--layout-file", required=True)
    parser.add_argument("--form", choices=("whole", "query-first"), action="append", required=True)
    parser.add_argument("room", help="for the words of the workers' commands")
    args = parser.parse_args()
    supervisor = os.getppid()
    load(args)
    if threads := len(os.listdir("/proc/self/task")) - 1:
        print(f"not forked: {threads} threads of a library are running", flush=True)
        sys.exit(1)
    command = serve(socket.socket(fileno=args.channel), supervisor)
    if command is not None:
        from halfmoon.cli.main import main as halfmoon

        halfmoon()
    sys.exit(0)


if __name__ == "__main__":
    main()
