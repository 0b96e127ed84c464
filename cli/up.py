"""`halfmoon up`: a whole cluster on this machine, from one command, gone without a trace at its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import IO

from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer, free_port
from halfmoon.bus.errors import BusUnreachable
from halfmoon.cli import model as models
from halfmoon.cli.metrics import Targets
from halfmoon.cli.options import (
    OptionInvalid,
    add_bus,
    add_config,
    add_model,
    add_secret,
    bus_config,
    state_directory,
    stream_limits,
)
from halfmoon.cli.output import say
from halfmoon.cli.processes.options import add_frontend, add_policy, add_store, add_worker, policy_of
from halfmoon.cli.supervisor import Child, Supervisor
from halfmoon.cli.tracing import add_tracing, check_endpoint
from halfmoon.conductor.live.bootstrap import bootstrap_core
from halfmoon.conductor.log_reading import LogUnreadable
from halfmoon.schemas import subjects
from halfmoon.schemas.events import (
    ClusterConfigured,
    FrontendJoined,
    FrontendLeft,
    StoreJoined,
    StoreLeft,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import Layout
from halfmoon.store.pool.segment import remove_stale

START_S_MAX = 300.0
DRAIN_S = 8.0
#: Between two looks at nats-server, and between two attempts to start it again.
SERVER_PAUSE_S = 0.1
#: A process that dies more often before the cluster is ready will not come up.
START_DEATHS_MAX = 3


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", type=int, default=2, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=2, help="decode nodes")
    parser.add_argument("--conductors", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="HTTP port (default: 8000, or a free one)")
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="serve metrics at ports from this on (default: no)"
    )
    parser.add_argument(
        "--nats-port", type=int, default=0, help="of our nats-server (default: 4222, or a free one)"
    )
    add_model(parser)
    add_worker(parser)
    add_store(parser)
    add_frontend(parser)
    add_policy(parser)
    add_bus(parser, default="")
    add_secret(parser)
    add_config(parser)
    add_tracing(parser)


class Cluster:
    """Everything that `up` has started."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.directory = directory
        self.server: EmbeddedServer | None = None
        self.server_watcher: asyncio.Task[None] | None = None
        self.bus: Bus | None = None
        self.supervisor = Supervisor(self._on_death, self._on_line)
        self.http_port = 0
        self.targets = Targets(args.metrics_port)
        self.joined: set[str] = set()
        self.ready = False
        self.started_at = time.monotonic()

    # --- what the user sees ---------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        say(f"[{time.monotonic() - self.started_at:5.1f}s] {text}")

    def _on_line(self, child: Child, line: str) -> None:
        if not self.ready or "error" in line.lower() or "warning" in line.lower():
            self.say(line if child.name in line else f"{child.name}: {line}")

    def _on_death(self, child: Child, status: int) -> None:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self.say(f"{child.name} died ({how}); it is started again. Its output: {child.log}")
        self.joined.discard(child.name)
        if self.bus is None:
            return
        name = child.name
        role = child.command[0]
        if role in ("prefill", "decode"):
            self.bus.append_soon(
                WorkerLeft(worker_id=name, reason=f"died: {how}"), source_id=subjects.SUPERVISOR
            )
        elif role == "store":
            left = StoreLeft(node_id=name.removeprefix("store-"), reason=f"died: {how}")
            self.bus.append_soon(left, source_id=subjects.SUPERVISOR)
        elif role == "frontend":
            self.bus.append_soon(
                FrontendLeft(frontend_id=name, reason=f"died: {how}"), source_id=subjects.SUPERVISOR
            )

    # --- start ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        args = self.args
        layout = models.layout_of(args)
        self.http_port = _wanted("--port", args.port, args.http_host)
        if not self.http_port and args.http_port != 8000:
            self.http_port = _wanted("--http-port", args.http_port, args.http_host)
        removed = remove_stale(args.cluster)
        if removed:
            self.say(f"removed what an earlier cluster left: {', '.join(map(str, removed))}")
        shutil.rmtree(self.directory / "output", ignore_errors=True)
        (self.directory / "layout.json").write_bytes(_layout_json(layout))
        if not args.nats:
            self._keep_one_old_log()
            port = _wanted("--nats-port", args.nats_port, "127.0.0.1") or _port_or_free(4222)
            self.server = EmbeddedServer.start(self.directory / "nats", port=port)
            self.server_watcher = asyncio.create_task(self._keep_server(self.server))
            args.nats = self.server.url
            self.say(f"nats-server at {self.server.url}")
        if not args.secret_file:
            args.secret_file = str(self.directory / "secret")
            _write_secret(Path(args.secret_file))
        self.bus = await Bus.connect(bus_config(args), name="up", limits=stream_limits(args))
        after = await self.bus.last_seq()
        watcher = asyncio.create_task(self._watch(after))
        try:  # before anybody joins: conductors read the log from its ClusterConfigured on
            await bootstrap_core(self.bus, "up", policy_of(args))
        except LogUnreadable as problem:
            raise OptionInvalid(str(problem)) from None
        expected = await self._start_children(layout)
        self.say(f"starting {len(self.supervisor.children)} processes; the model is {layout.model}")
        async with asyncio.timeout(START_S_MAX):
            while not expected <= self.joined:
                await asyncio.sleep(0.02)
                if watcher.done():
                    watcher.result()
                for child in self.supervisor.children.values():
                    if child.restarts > START_DEATHS_MAX:
                        raise OptionInvalid(f"{child.name} dies again and again; see {child.log}")
        self.ready = True

    async def _start_children(self, layout: Layout) -> set[str]:
        args = self.args
        for number in range(args.conductors):
            await self._child(
                f"conductor-{number}", "conductor", ["--id", f"conductor-{number}", *_policy_flags(args)]
            )
        nodes = [("prefill", n) for n in range(args.prefill)] + [("decode", n) for n in range(args.decode)]
        names = {"frontend-0"}
        for role, number in nodes:
            node = f"{role}-{number}"
            if layout.block_bytes:
                await self._child(f"store-{node}", "store", ["--node", node, *_store_flags(args)])
                names.add(f"store-{node}")
            await self._child(node, role, ["--node", node, "--id", node, *_worker_flags(args)])
            names.add(node)
        http_port = self.http_port or _port_or_free(8000)
        self.http = f"http://{args.http_host}:{http_port}"
        flags = ["--id", "frontend-0", "--http-host", args.http_host, "--http-port", str(http_port)]
        if args.api_keys_file:
            flags += ["--api-keys-file", args.api_keys_file]
        self.targets.add("frontend", self.http.removeprefix("http://"))
        await self._child(
            "frontend-0", "frontend", [*flags, "--open-requests-max", str(args.open_requests_max)]
        )
        return names

    async def _child(self, name: str, command: str, flags: list[str]) -> None:
        args = self.args
        common = ["--nats", args.nats, "--cluster", args.cluster, "--secret-file", args.secret_file]
        for flag in ("user", "password", "token", "nkey_file", "credentials", "ca", "cert", "key"):
            if value := getattr(args, f"nats_{flag}"):
                common += [f"--nats-{flag.replace('_', '-')}", value]
        if args.otlp:
            common += ["--otlp", args.otlp]
        for flag in ("nats_replicas", "log_mib_max", "log_hours_max"):
            common += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
        common += ["--drain-s", str(DRAIN_S)]
        common += self.targets.flags(command)
        if command != "conductor":
            common += ["--layout-file", str(self.directory / "layout.json"), "--model", args.model]
            common += [
                "--engine",
                args.engine,
                "--device",
                args.device,
                "--block-tokens",
                str(args.block_tokens),
            ]
        log = self.directory / "output" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text("")
        await self.supervisor.start(Child(name, [command, *flags, *common], log))

    async def _watch(self, after: int) -> None:
        assert self.bus is not None
        async for stamped in self.bus.events(after=after):
            match stamped.event:
                case ClusterConfigured():
                    self.joined.clear()
                case WorkerJoined(worker_id=name) | FrontendJoined(frontend_id=name):
                    self.joined.add(name)
                case StoreJoined(node_id=node):
                    self.joined.add(f"store-{node}")
                case _:
                    pass

    async def _keep_server(self, server: EmbeddedServer) -> None:
        """nats-server dies: it is started again at the same address, and everybody reconnects by himself."""
        while True:
            await asyncio.sleep(SERVER_PAUSE_S)
            if (status := server.process.poll()) is not None:
                how = signal.Signals(-status).name if status < 0 else f"status {status}"
                self.say(
                    f"nats-server died ({how}); it is started again. Its output: {server.directory / 'nats.log'}"
                )
                server.launch_again()
                try:
                    await asyncio.to_thread(server.wait)
                except BusUnreachable as problem:
                    self.say(str(problem))

    def _keep_one_old_log(self) -> None:
        """The log of the last cluster stays readable until the one after the next start."""
        current, previous = self.directory / "nats", self.directory / "nats-previous"
        if current.exists():
            shutil.rmtree(previous, ignore_errors=True)
            current.rename(previous)

    # --- end ------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Drain in the order of the request's way, so that nothing waits for what is gone already."""
        names = list(self.supervisor.children)
        roles = {name: self.supervisor.children[name].command[0] for name in names}
        for group in (("frontend",), ("prefill", "decode"), ("store",), ("conductor",)):
            await self.supervisor.stop([n for n in names if roles[n] in group], within_s=DRAIN_S + 2)
        if self.bus is not None:
            await self.bus.close()
        if self.server_watcher is not None:
            self.server_watcher.cancel()
            await asyncio.wait([self.server_watcher])

    def kill(self) -> None:
        self.supervisor.kill()

    def clean(self) -> None:
        if self.server is not None:
            self.server.stop()
        remove_stale(self.args.cluster)
        for name in ("cluster.json", "layout.json", "prometheus.json", "secret"):
            (self.directory / name).unlink(missing_ok=True)


async def run(args: argparse.Namespace) -> int:
    for option in ("prefill", "decode", "conductors"):
        if getattr(args, option) < 1:
            raise OptionInvalid(f"--{option}: at least 1")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", args.cluster):
        raise OptionInvalid(f"--cluster {args.cluster}: letters, digits, - and _, at most 64")
    check_endpoint(args)
    directory = state_directory(args.cluster)
    directory.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory, args.cluster)
    for name in ("cluster.json", "prometheus.json"):
        (directory / name).unlink(missing_ok=True)  # of one that was killed
    cluster = Cluster(args, directory)
    stop = asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:
            cluster.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        starting = asyncio.ensure_future(cluster.start())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _print_addresses(cluster, directory)
            await stop.wait()
        else:
            starting.cancel()
        cluster.say("draining; press Ctrl-C again to stop at once")
        return 0
    finally:
        cluster.ready = True
        try:
            await cluster.stop()
        finally:
            cluster.clean()
            lock.close()
        if cluster.bus is not None:
            cluster.say("stopped")


def _print_addresses(cluster: Cluster, directory: Path) -> None:
    args = cluster.args
    metrics = cluster.targets.write(directory / "prometheus.json")
    addresses = {"nats": args.nats, "http": cluster.http, "pid": os.getpid()}
    (directory / "cluster.json").write_text(json.dumps(addresses))
    where = "" if args.cluster == "local" else f" --nats {args.nats}"
    cluster.say(f"ready: {args.prefill} prefill and {args.decode} decode nodes")
    print(
        f"\n  NATS  {args.nats}\n  HTTP  {cluster.http}\n{metrics}\n"
        f'Try, in another terminal:\n\n  halfmoon generate "The moon is"{where}\n\n'
        f"Processes write to {directory / 'output'}. Ctrl-C stops the cluster.",
        flush=True,
    )


def _lock(directory: Path, cluster: str) -> IO[str]:
    lock = (directory / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OptionInvalid(
            f"a cluster named {cluster!r} runs already; name another with --cluster"
        ) from None
    return lock


def _write_secret(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def _wanted(option: str, port: int, host: str) -> int:
    """The port, 0 when none was named. Raises OptionInvalid when it cannot be had."""
    if port:
        try:
            with socket.create_server((host, port)):
                pass
        except (OSError, OverflowError) as problem:
            raise OptionInvalid(f"{option} {port}: {getattr(problem, 'strerror', None) or problem}") from None
    return port


def _port_or_free(port: int) -> int:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return port
    return free_port()


def _layout_json(layout: Layout) -> bytes:
    import msgspec

    return msgspec.json.encode(layout)


def _policy_flags(args: argparse.Namespace) -> list[str]:
    return [
        "--policy",
        args.policy,
        "--admission",
        args.admission,
        "--ttft-slo-ms",
        str(args.ttft_slo_ms),
        "--tbt-slo-ms",
        str(args.tbt_slo_ms),
    ]


def _store_flags(args: argparse.Namespace) -> list[str]:
    return [
        "--pool-mib",
        str(args.pool_mib),
        "--bind",
        args.bind,
        "--transport",
        args.transport,
        "--encryption",
        args.encryption,
        "--eviction",
        args.eviction,
        "--rdma",
        args.rdma,
        "--ssd",
        args.ssd,
        "--ssd-bytes",
        str(args.ssd_bytes),
        "--ssd-hits",
        str(args.ssd_hits),
        *(flag for quota in args.quota for flag in ("--quota", quota)),
    ]


def _worker_flags(args: argparse.Namespace) -> list[str]:
    flags = [
        "--kv-blocks",
        str(args.kv_blocks),
        "--batch-max",
        str(args.batch_max),
        "--threads",
        str(args.threads),
    ]
    flags += ["--attention", args.attention, "--chunk-tokens", str(args.chunk_tokens)]
    return [*flags, "--no-stream-layers"] if args.no_stream_layers else flags


__all__ = ["add", "run"]
if sys.platform != "linux":  # the shared memory segments and the parent's death signal are Linux's
    raise RuntimeError("halfmoon runs on Linux")
