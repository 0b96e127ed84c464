"""`halfmoon container ROLE`: the command of a container of docker/compose.yaml.

Replicas of a service are equal, but a process of the cluster has a name and credentials of its own. So each
takes the first free name of its role, ROLE-0 upwards, by a lock on a file in a folder that all containers of
the host share; the kernel gives it back when the process ends, however it ends. A conductor or a frontend
then takes this process's place; a node is its store agent and its worker, watched, and ended in that order:
worker, store agent.

All other options come from the environment, as for the processes themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
from pathlib import Path

from halfmoon.cli.local.supervisor import Child, Supervisor
from halfmoon.cli.options import OptionInvalid, add_config
from halfmoon.cli.output import say
from halfmoon.schemas.roles import ROLES as PROCESS_ROLES
from halfmoon.schemas.roles import WORKER_ROLES

SINGLE = ("conductor", "frontend")
ROLES = (*SINGLE, *WORKER_ROLES)
STORE_STOP_S = 5.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=ROLES)
    parser.add_argument(
        "--names-dir", default="/run/names", help="shared by the host's containers: locks on names"
    )
    parser.add_argument(
        "--secrets-dir", default="/run/secrets", help="the role's part of what `secrets` made"
    )
    parser.add_argument(
        "--health-dir", default="/run/halfmoon", help="a file here is fresh while a process is well"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="serve metrics there, a node's store one above"
    )
    parser.add_argument(
        "--drain-s", type=float, default=20.0, help="how long to finish what runs, when stopped"
    )
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    name, lock = take_name(args.role, Path(args.names_dir), Path(args.secrets_dir))
    common = ["--drain-s", str(args.drain_s)]
    if not PROCESS_ROLES[args.role].metrics_at_own_port:
        common += _metrics(args, 0)
    if args.role in SINGLE:
        os.set_inheritable(lock, True)
        words = [args.role, "--id", name, *common, *_known_as(args, name)]
        os.execv(sys.executable, [sys.executable, "-m", "halfmoon.cli.main", *words])  # noqa: S606 (words of ours)
    worker = [args.role, "--node", name, "--id", name, *common, *_known_as(args, name)]
    store = ["store", "--node", name, *common, *_metrics(args, 1), *_known_as(args, f"store-{name}")]
    if not os.environ.get("HALFMOON_ADVERTISE"):
        store += ["--advertise", socket.gethostname()]
    if not os.environ.get("HALFMOON_CHANNEL_ADVERTISE"):
        worker += ["--channel-advertise", socket.gethostname()]
    return await _node(name, store, worker, drain_s=args.drain_s)


def take_name(role: str, names: Path, secrets: Path) -> tuple[str, int]:
    """The first free name that there are credentials for, and the lock that keeps it. Raises OptionInvalid,
    OSError.
    """
    number = 0
    while (secrets / f"{role}-{number}.nk").exists():
        name = f"{role}-{number}"
        lock = os.open(names / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return name, lock
        os.close(lock)
        number += 1
    taken = (
        f"all {number} names are taken: make more with `halfmoon secrets --{role}`"
        if number
        else "there are none"
    )
    raise OptionInvalid(f"credentials of a {role} in {secrets}: {taken}")


def _metrics(args: argparse.Namespace, above: int) -> list[str]:
    return ["--metrics", f"0.0.0.0:{args.metrics_port + above}"] if args.metrics_port else []


def _known_as(args: argparse.Namespace, name: str) -> list[str]:
    return [
        "--nats-nkey-file",
        f"{args.secrets_dir}/{name}.nk",
        "--nats-ca",
        f"{args.secrets_dir}/ca.pem",
        "--health-file",
        f"{args.health_dir}/{name}",
        *(("--secret-file", f"{args.secrets_dir}/secret") if PROCESS_ROLES[args.role].has_secret else ()),
    ]


async def _node(name: str, store: list[str], worker: list[str], *, drain_s: float) -> int:
    def died(child: Child, status: int) -> None:
        say(f"{child.name} ended (status {status}); it is started again")

    supervisor = Supervisor(died, lambda _, line: say(line))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    nowhere = Path(os.devnull)  # each line goes to our own output
    await supervisor.start(Child(f"store-{name}", store, nowhere))
    await supervisor.start(Child(name, worker, nowhere))
    await stop.wait()
    await supervisor.stop([name], within_s=drain_s + 2)
    await supervisor.stop([f"store-{name}"], within_s=STORE_STOP_S)
    return 0
