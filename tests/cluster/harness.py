"""A real cluster for a test: `halfmoon up` as a child process, its API, log, processes, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import nats
import orjson

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerUnreachable
from halfmoon.bus.streams import StreamLimits
from halfmoon.cli.local.credentials import credentials_of
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import decode, encode
from halfmoon.schemas.decisions import Ordered
from halfmoon.schemas.events import Event, Stamped
from halfmoon.schemas.kv import KvMessage
from halfmoon.schemas.status import ConductorStatus, StatusRequest
from halfmoon.schemas.store import StoreStatus, StoreStatusRequest
from tests.cluster.profiles import PROFILES
from tests.eventually import BOUND_S, SCENARIO_S, eventually, eventually_here
from tests.guardian import cluster_name
from tests.ports import HeldPorts

#: A question that its process has taken along when it died is sent again.
ASKED_AGAIN_S = 2.0
#: No request is refused for its time on a machine that has other things to do.
PATIENT = ("--ttft-slo-ms", "200000", "--tbt-slo-ms", "100000")

#: What `halfmoon up` forks its processes from.
FORK_SERVER = "halfmoon.cli.local.fork_server"


@dataclass
class Cluster:
    """A running cluster; `stop()` ends it as Ctrl-C does."""

    process: subprocess.Popen[bytes]
    name: str
    nats: str
    http: str
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    #: Of its API, where it was not named. Held for as long as this is known: it may be killed and started again.
    port: HeldPorts | None = None

    # --- asking ---------------------------------------------------------------------------------------------

    def config(self, name: str = subjects.OPERATOR) -> BusConfig:
        """How the process `name` reaches the cluster's server."""
        key = credentials_of(self.directory) / f"{name}.nk"
        return BusConfig(url=self.nats, nkey_seed_file=str(key) if key.exists() else "")

    async def bus(self, name: str = subjects.OPERATOR) -> Bus:
        """As the process `name`; the streams are there."""
        return await Bus.connect(self.config(name), name=name, limits=StreamLimits(replicas=0))

    async def connect(self, name: str = "client") -> nats.NATS:
        """A plain client's connection, with the credentials of `name`."""
        # Processes may answer into the inboxes of `name`, and frontends alone into those of clients.
        inbox = b"_INBOX" if name == "client" else subjects.inbox(name).encode()
        return await nats.connect(
            self.nats, nkeys_seed=self.config(name).nkey_seed_file or None, inbox_prefix=inbox
        )

    async def generate(self, nc: nats.NATS, timeout: float = BOUND_S, **fields: Any) -> dict[str, Any]:
        """One request over NATS, not streamed; raises AssertionError with the body of an error,
        NoRespondersError where no frontend listens.
        """
        inbox = f"_INBOX.{uuid.uuid4().hex}"  # a client's, whoever asks: frontends answer at no other
        answers = await nc.subscribe(inbox, max_msgs=1)
        await nc.publish(f"{subjects.API}.generate", orjson.dumps(fields), reply=inbox)
        reply = await answers.next_msg(timeout=timeout)
        if (reply.headers or {}).get("Status") == "503":
            raise nats.errors.NoRespondersError
        body: dict[str, Any] = orjson.loads(reply.data)
        assert "error" not in body, body
        return body

    async def events(self, after: int = 0) -> list[Stamped]:
        """The log as it stands."""
        return [
            Stamped(seq=seq, at_ns=at_ns, event=decode(payload, Event))
            for seq, at_ns, payload in await self._stream(subjects.EVENTS_STREAM, subjects.EVENTS_ALL, after)
        ]

    async def decisions(self) -> list[Ordered]:
        return [
            decode(payload, Ordered)
            for _, _, payload in await self._stream(subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL, 0)
        ]

    async def kv(self) -> list[tuple[int, KvMessage]]:
        """(server time in ns, message) of KV progress."""
        return [
            (at_ns, decode(payload, KvMessage))
            for _, at_ns, payload in await self._stream(subjects.KV_STREAM, subjects.KV_ALL, 0)
        ]

    async def raw(self, stream: str) -> list[tuple[int, int, bytes]]:
        """(sequence, server time in ns, bytes) of everything that a stream holds."""
        return await self._stream(stream, ">", 0)

    async def _stream(self, stream: str, subject: str, after: int) -> list[tuple[int, int, bytes]]:
        bus = await self.bus()
        try:
            last = await bus.last_seq(stream)
            found: list[tuple[int, int, bytes]] = []
            if last <= after:
                return found
            async with asyncio.timeout(BOUND_S):
                async for message in bus.read(stream, subject, after=after):
                    found.append((message.seq, message.at_ns, message.payload))
                    if message.pending == 0 or message.seq >= last:
                        return found
            return found
        finally:
            await bus.close()

    async def status(self) -> dict[str, Any]:
        """`nodes` and `index_blocks` as a conductor that has read the log knows them; nothing while none answers."""
        nothing: dict[str, Any] = {"nodes": [], "index_blocks": 0}
        bus = await self.bus()
        try:
            answer = await bus.request(
                subjects.status(subjects.CONDUCTORS), StatusRequest(), ConductorStatus, timeout_s=2
            )
            if not answer.caught_up:
                return nothing
            return {
                "nodes": [msgspec.to_builtins(node) for node in answer.nodes],
                "index_blocks": answer.index_blocks,
            }
        except PeerUnreachable:
            return nothing
        finally:
            await bus.close()

    async def conductors(self, count: int) -> list[ConductorStatus]:
        """One look: the status of `count` conductors that have read the log, of fewer where no more listen.

        One that stands still is waited for; one that dies with the question is asked again until nobody listens.
        """
        nc = await self.connect(subjects.OPERATOR)
        asked = [asyncio.ensure_future(_conductor(nc, name)) for name in self.names("conductor-")]
        found: list[ConductorStatus] = []
        try:
            for answer in asyncio.as_completed(asked):
                state = await answer
                if state is not None and state.caught_up:
                    found.append(state)
                if len(found) >= count:
                    break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await nc.close()
        return found

    async def all_conductors(self, count: int) -> list[ConductorStatus]:
        """The status of `count` conductors; waits until so many have read the log."""

        async def enough() -> list[ConductorStatus]:
            found = await self.conductors(count)
            return found if len(found) >= count else []

        return await eventually(enough, f"{count} conductors answer", every_s=0.05)

    async def stores(self) -> dict[str, StoreStatus]:
        """The status of each store agent."""
        bus = await self.bus()
        try:
            found = {}
            for name in self.names("store-"):
                node = name.removeprefix("store-")
                found[node] = await bus.request(
                    subjects.store(node, "status"), StoreStatusRequest(), StoreStatus, timeout_s=BOUND_S
                )
            return found
        finally:
            await bus.close()

    # --- processes ------------------------------------------------------------------------------------------

    def names(self, prefix: str = "") -> list[str]:
        return sorted(p.stem for p in (self.directory / "output").glob("*.log") if p.stem.startswith(prefix))

    def pid(self, name: str) -> int:
        """Process id of a child by its name on the bus."""
        wanted = name.removeprefix("store-")
        role = "store" if name.startswith("store-") else name.rsplit("-", 1)[0]
        for pid in children(self.process.pid):
            words = command_of(pid)
            named = [words[i + 1 : i + 2] for i, word in enumerate(words) if word in ("--id", "--node")]
            if role in words[:5] and [wanted] in named:
                return pid
        raise AssertionError(f"no process {name} among {[command_of(p) for p in children(self.process.pid)]}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Its process id. Who is started again measures nothing: what the busy machine made doubtful counts again."""
        pid = self.pid(name)
        PROFILES.settle()
        os.kill(pid, number)
        return pid

    def kill_server(self, number: signal.Signals = signal.SIGKILL) -> int:
        """nats-server's process id."""
        pid = self.server_pid()
        os.kill(pid, number)
        return pid

    def server_pid(self) -> int:
        """Of nats-server. Raises StopIteration where it does not run at the moment."""
        # A process that has just ended has no words left.
        return next(
            pid for pid in children(self.process.pid) if "".join(command_of(pid)[:1]).endswith("nats-server")
        )

    def output(self, name: str) -> str:
        return (self.directory / "output" / f"{name}.log").read_text()

    def stop(self, timeout: float = BOUND_S) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def left_behind(self) -> list[str]:
        """Segments and processes of this cluster that still exist."""
        left = [str(p) for p in Path("/dev/shm").glob(f"halfmoon-{self.name}-*")]
        for entry in Path("/proc").iterdir():
            if (
                entry.name.isdigit()
                and (words := command_of(int(entry.name)))
                and self.name in " ".join(words)
            ):
                left.append(" ".join(words))
        return left


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(p) for p in (task / "children").read_text().split()]
    return found


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


async def _conductor(nc: nats.NATS, name: str) -> ConductorStatus | None:
    """What a conductor says of itself; None where nobody listens."""
    question = encode(StatusRequest(digest=True))
    while True:
        with contextlib.suppress(nats.errors.TimeoutError):  # it may have died with the question
            try:
                reply = await nc.request(subjects.status(name), question, timeout=ASKED_AGAIN_S)
            except nats.errors.NoRespondersError:
                return None
            return decode(reply.data, ConductorStatus)


def start(state: Path, *flags: str, name: str = "") -> Cluster:
    """`halfmoon up` with ports of its own; returns when it is ready. Raises AssertionError with its output when it
    is not.
    """
    port = None
    if "--port" not in flags and "--config" not in flags:
        # Its default is 8000 or a free one: another cluster that starts at the same time may take the same.
        port = HeldPorts()
        flags = (*flags, "--port", str(port.first))
    name = name or cluster_name()
    PROFILES.settle()
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "XDG_CACHE_HOME": str(PROFILES.home)}
    output = state / f"{name}.out"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "halfmoon.cli.main", "up", "--cluster", name, *flags],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    directory = state / "halfmoon" / name

    def ready() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            addresses: dict[str, Any] = json.loads((directory / "cluster.json").read_text())
            if addresses["pid"] == process.pid:  # not those of a cluster of this name that was killed
                return addresses
        assert process.poll() is None, f"the cluster did not start:\n{output.read_text()[-4000:]}"
        return None

    try:
        # The first cluster of a checkout that has such a model measures what it takes.
        addresses = eventually_here(ready, "the cluster is ready", every_s=0.05, bound_s=SCENARIO_S)
    except BaseException:
        process.kill()
        raise
    assert addresses is not None
    return Cluster(process, name, addresses["nats"], addresses["http"], directory, environment, port)


@contextlib.contextmanager
def running(state: Path, *flags: str) -> Iterator[Cluster]:
    """A cluster for a `with` block; at its end it must stop by itself and leave nothing."""
    state.mkdir(parents=True, exist_ok=True)
    cluster = start(state, *flags)
    try:
        yield cluster
    finally:
        status = cluster.stop()
    assert status == 0, status
    assert cluster.left_behind() == []
    # A process that asks for what its key does not allow is told nothing, and goes on as if nobody were there.
    assert [name for name in cluster.names() if "permissions violation" in cluster.output(name)] == []


async def all_ready(cluster: Cluster) -> None:
    """Waits until every process of two and two nodes is there (again), by the conductor's word."""

    async def ready() -> bool:
        state = await cluster.status()
        roles = sorted(node["role"] for node in state["nodes"] if node["state"] == "ready")
        return roles == ["decode"] * 2 + ["frontend"] + ["prefill"] * 2 + ["store"] * 4

    await eventually(ready, "two and two nodes are ready", every_s=0.2)
