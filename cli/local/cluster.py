"""The processes of `halfmoon up`: started, watched until all have joined, drained in order."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

from halfmoon.bus.connection import Bus
from halfmoon.bus.credentials import key_file, write_private
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.bus.tasks import end_tasks
from halfmoon.cli import model as models
from halfmoon.cli.local.credentials import credentials_of, make_credentials
from halfmoon.cli.local.engines import adapted_engines
from halfmoon.cli.local.flags import DRAIN_S, process_flags, secret_environment, worker_flags
from halfmoon.cli.local.forked import ForkServers, layout_file
from halfmoon.cli.local.log_server import LogServer, begin_log
from halfmoon.cli.local.ports import PreferredPorts, wanted_port
from halfmoon.cli.local.supervisor import Child, Supervisor
from halfmoon.cli.metrics import Targets
from halfmoon.cli.options import (
    OptionInvalid,
    bus_config,
    stream_limits,
)
from halfmoon.cli.output import say
from halfmoon.cli.processes.attention import check_attention
from halfmoon.cli.processes.options import policy_of
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
from halfmoon.schemas.roles import ROLES, WORKER_ROLES, ProcessRole
from halfmoon.store.pool.segment import remove_stale

START_S_MAX = 300.0
#: A process that dies more often before the cluster is ready will not come up.
START_DEATHS_MAX = 3


class LocalCluster:
    """Everything that `halfmoon up` has started."""

    def __init__(self, args: argparse.Namespace, directory: Path, fork_servers: ForkServers) -> None:
        self.args = args
        self.directory = directory
        self.server: EmbeddedServer | None = None
        self.log_server: LogServer | None = None
        self.server_watcher: asyncio.Task[None] | None = None
        self.bus: Bus | None = None
        self.supervisor = Supervisor(self._on_death, self._on_line, fork_servers)
        self.http_port = 0
        self._ports = PreferredPorts()
        self.targets = Targets(args.metrics_port)
        self.joined: set[str] = set()
        #: Processes that refused their options or the model, with the words of each: a restart mends neither.
        self.refusals: dict[str, str] = {}
        self._last_lines: dict[str, str] = {}
        self.ready = False
        self.started_at = time.monotonic()

    # --- for the user ---------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        say(f"[{time.monotonic() - self.started_at:5.1f}s] {text}")

    def _on_line(self, child: Child, line: str) -> None:
        self._last_lines[child.name] = line
        if not self.ready or "error" in line.lower() or "warning" in line.lower():
            self.say(line if child.name in line else f"{child.name}: {line}")

    def _on_death(self, child: Child, status: int) -> None:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        if status == os.EX_CONFIG and not self.ready:
            self.refusals[child.name] = self._last_lines.get(child.name, "").removeprefix("halfmoon: ")
            return
        self.say(f"{child.name} died ({how}); it is started again. Its output: {child.log}")
        self.joined.discard(child.name)
        if self.bus is None or child.role == "conductor":  # conductors neither join nor leave
            return
        self.bus.append_soon(_left(child, f"died: {how}"), source_id=subjects.SUPERVISOR)

    # --- start ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        args = self.args
        await asyncio.to_thread(models.check_texts, args.model)
        layout = models.layout_of(args)
        check_attention(args, layout)
        self.http_port = wanted_port("--port", args.port, args.http_host)
        if not self.http_port and args.http_port != 8000:
            self.http_port = wanted_port("--http-port", args.http_port, args.http_host)
        removed = remove_stale(args.cluster)
        if removed:
            self.say(f"removed what an earlier cluster left: {', '.join(map(str, removed))}")
        shutil.rmtree(self.directory / "output", ignore_errors=True)
        layout_file(self.directory).write_bytes(_layout_json(layout))
        if not args.nats:
            self._keep_one_old_log()
            port = wanted_port("--nats-port", args.nats_port, "127.0.0.1") or self._ports.take(4222)
            permissions = make_credentials(args, self.directory)
            self.server = EmbeddedServer.start(self.directory / "nats", port=port, extra_config=permissions)
            self.log_server = LogServer(self.server, self.say, free_bytes_min=args.log_free_mib_min << 20)
            args.nats = self.server.url
            self.say(f"nats-server at {self.server.url}")
        if not args.secret_file:
            args.secret_file = str(self.directory / "secret")
            write_private(Path(args.secret_file), secrets.token_hex(32).encode())
        self.bus = await Bus.connect(
            bus_config(self._as(subjects.SUPERVISOR)), name=subjects.SUPERVISOR, limits=stream_limits(args)
        )
        self.bus.keep_streams()
        if self.log_server is not None:
            self.server_watcher = asyncio.create_task(self.log_server.run(self.bus))
        after = await self.bus.last_seq()
        watcher = asyncio.create_task(self._watch(after))
        # Before anybody joins: conductors read the log from its ClusterConfigured on.
        await begin_log(self.bus, policy_of(args))
        expected = await self._start_children(layout)
        self.say(f"starting {len(self.supervisor.children)} processes; the model is {layout.model}")
        await self._all_joined(expected, watcher)
        self.ready = True
        if self.log_server is not None:
            self.log_server.expects_events = True

    async def _all_joined(self, expected: set[str], watcher: asyncio.Task[None]) -> None:
        """Raises OptionInvalid when one refuses or dies again and again, TimeoutError after START_S_MAX."""
        try:
            async with asyncio.timeout(START_S_MAX):
                while not expected <= self.joined:
                    await asyncio.sleep(0.02)
                    if watcher.done():
                        watcher.result()
                    for name, words in self.refusals.items():
                        raise OptionInvalid(f"{name}: {words or 'it refuses its options'}")
                    for child in self.supervisor.children.values():
                        if child.restarts > START_DEATHS_MAX:
                            raise OptionInvalid(f"{child.name} dies again and again; see {child.log}")
        except TimeoutError:
            missing = ", ".join(sorted(expected - self.joined))
            raise TimeoutError(
                f"these have not joined within {START_S_MAX:g} s: {missing}; see {self.directory / 'output'}"
            ) from None

    async def _start_children(self, layout: Layout) -> set[str]:
        args = self.args
        for number in range(args.conductors):
            await self._child(f"conductor-{number}", "conductor", {"id": f"conductor-{number}"})
        nodes = [(f"{role}-{n}", role) for role in WORKER_ROLES for n in range(getattr(args, role))]
        names = {"frontend-0"}
        for count, (node, _) in enumerate(nodes if layout.block_bytes else []):
            await self._child(f"store-{node}", "store", {"node": node}, node_number=count)
            names.add(f"store-{node}")
        for name, kind, role, url in adapted_engines(args):
            await self._child(name, "adapt", {"id": name, "role": role, "url": url}, words=(kind,))
            names.add(name)
        http_port = self.http_port or self._ports.take(8000)
        scheme = "https" if args.ssl_certfile else "http"
        self.http = f"{scheme}://{args.http_host}:{http_port}"
        log_dir = str(self.server.directory) if self.server is not None else ""
        self.targets.add("frontend", self.http.partition("://")[2])
        await self._child(
            "frontend-0", "frontend", {"id": "frontend-0", "http_port": http_port, "log_dir": log_dir}
        )
        for count, (node, role) in enumerate(nodes):
            own = {"node": node, "id": node, **worker_flags(args, role)}
            await self._child(node, role, own, node_number=count)
            names.add(node)
        return names

    def _as(self, name: str) -> argparse.Namespace:
        """The options with the credentials of the process `name`, where the server is our own."""
        if self.server is None:
            return self.args
        key = key_file(credentials_of(self.directory), name)
        stated = {"nats_nkey_file": str(key), "nats_user": "", "nats_password": "", "nats_token": ""}
        return argparse.Namespace(**{**vars(self.args), **stated})

    async def _child(
        self,
        name: str,
        command: ProcessRole,
        own: Mapping[str, Any],
        *,
        node_number: int = 0,
        words: Sequence[str] = (),
    ) -> None:
        args = self._as(name)
        if self.server is not None and command != "conductor":
            args.nats_replicas = 0  # conductors make the streams; the others may not
        own = {"layout_file": layout_file(self.directory), "drain_s": DRAIN_S, **own}
        flags = process_flags(args, command, own, node_number=node_number) + self.targets.flags(command)
        log = self.directory / "output" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text("")
        environment = secret_environment(args)
        await self.supervisor.start(Child(name, [command, *words, *flags], log, environment))

    async def _watch(self, after: int) -> None:
        assert self.bus is not None
        # Not the whole log: that would cost this process, and the server, as much as a conductor's reading.
        kinds = (ClusterConfigured, WorkerJoined, FrontendJoined, StoreJoined)
        async for stamped in self.bus.events(after=after, kinds=kinds):
            match stamped.event:
                case ClusterConfigured():
                    self.joined.clear()
                case WorkerJoined(worker_id=name) | FrontendJoined(frontend_id=name):
                    self.joined.add(name)
                case StoreJoined(node_id=node):
                    self.joined.add(f"store-{node}")
                case _:
                    pass

    def _keep_one_old_log(self) -> None:
        """The log of the last cluster stays readable until the one after the next start."""
        current, previous = self.directory / "nats", self.directory / "nats-previous"
        if current.exists():
            shutil.rmtree(previous, ignore_errors=True)
            current.rename(previous)

    # --- end ------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Drains rank after rank of `ROLES`."""
        if self.log_server is not None:
            self.log_server.expects_events = False
        self.supervisor.end_launches()
        ranks = {name: ROLES[child.role].drain_rank for name, child in self.supervisor.children.items()}
        for rank in sorted(set(ranks.values())):
            await self.supervisor.stop([name for name in ranks if ranks[name] == rank], within_s=DRAIN_S + 2)
        if self.bus is not None:
            await self.bus.close()
        if self.server_watcher is not None:
            await end_tasks([self.server_watcher])

    def kill(self) -> None:
        self.supervisor.kill()

    def clean(self) -> None:
        if self.server is not None:
            self.server.stop()
        self._ports.close()
        remove_stale(self.args.cluster)
        for name in ("cluster.json", "layout.json", "prometheus.json", "secret"):
            (self.directory / name).unlink(missing_ok=True)
        shutil.rmtree(credentials_of(self.directory), ignore_errors=True)


def _left(child: Child, reason: str) -> WorkerLeft | StoreLeft | FrontendLeft:
    """The event that a process would have announced, had it ended in order."""
    member = ROLES[child.role].member
    match member:
        case "worker":
            return WorkerLeft(worker_id=child.name, reason=reason)
        case "store":
            return StoreLeft(node_id=child.name.removeprefix("store-"), reason=reason)
        case "frontend":
            return FrontendLeft(frontend_id=child.name, reason=reason)
        case "none":
            raise AssertionError(f"{child.name} is not a member of the cluster")
        case _:
            assert_never(member)


def _layout_json(layout: Layout) -> bytes:
    import msgspec

    return msgspec.json.encode(layout)
