"""Three real nats-servers as one cluster, with the certificates and permissions that `halfmoon secrets`
makes.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import die_with_parent, find_server
from halfmoon.bus.streams import StreamLimits
from halfmoon.cli import secrets
from tests.eventually import Late, eventually_here
from tests.ports import HeldPorts

NAMES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@dataclass
class ServerCluster:
    """`stop` ends what `start` began."""

    place: Path
    #: Of each server: for clients, for the other servers, for its health. A server that ends comes back to its own.
    held: dict[str, tuple[HeldPorts, HeldPorts, HeldPorts]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def start(cls, place: Path, names: Sequence[str] = NAMES) -> ServerCluster:
        """`names`: addresses of this machine, one for each server."""
        places = ("--seen-at", "HERE", "--store-dir", "HERE/streams")
        tenants = ("--tenants", "acme,globex")
        secrets.make(
            secrets_options(
                place,
                *("--servers", ",".join(names), "--attention", "2", "--mixed", "2", "--adapt", "2"),
                *("--engines", "2"),
                *places,
                *tenants,
            )
        )
        cluster = cls(place, {name: (HeldPorts(name), HeldPorts(name), HeldPorts()) for name in names})
        for name in names:
            file = place / name / "nats.conf"
            text = file.read_text().replace("HERE", str(place / name)).replace("0.0.0.0", name)
            clients, _, health = cluster.ports[name]
            text = text.replace(":4222", f":{clients}").replace(":8222", f":{health}")
            for other in names:
                text = text.replace(f"{other}:6222", f"{other}:{cluster.ports[other][1]}")
            file.write_text(text)
            cluster.launch(name)
        cluster.wait()
        return cluster

    def launch(self, name: str) -> None:
        with (self.place / name / "nats.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [find_server(), "-c", str(self.place / name / "nats.conf")],
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )

    def wait(self) -> None:
        """Until every server has a leader and is current."""
        for name in self.ports:
            try:
                eventually_here(functools.partial(self._healthy, name), f"{name} is current")
            except Late as late:
                late.add_note((self.place / name / "nats.log").read_text()[-2000:])
                raise

    def _healthy(self, name: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name][2]}/healthz") as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for held in self.held.values():
            for one in held:
                one.close()

    @property
    def ports(self) -> dict[str, tuple[int, int, int]]:
        return {name: (one.first, two.first, three.first) for name, (one, two, three) in self.held.items()}

    @property
    def url(self) -> str:
        return ",".join(f"tls://{name}:{self.ports[name][0]}" for name in self.ports)

    def config(self, name: str) -> BusConfig:
        """As the process of that name."""
        key = next(self.place.glob(f"*/{name}.nk"), self.place / f"{name}.nk")
        return BusConfig(
            url=self.url,
            tls_ca_file=str(key.parent / "ca.pem"),
            nkey_seed_file=str(key),
            connect_timeout_s=60,
        )

    async def connect(self, name: str) -> Bus:
        replicas = 3 if name.startswith("conductor") else 0
        return await Bus.connect(self.config(name), name=name, limits=StreamLimits(replicas=replicas))

    async def leader(self, bus: Bus, stream: str) -> str:
        answer = await bus.jetstream.ask(f"STREAM.INFO.{stream}")
        return str(answer["cluster"]["leader"])


def secrets_options(place: Path, *more: str) -> argparse.Namespace:
    """As the command line has them."""
    parser = argparse.ArgumentParser()
    secrets.add(parser)
    return parser.parse_args([str(place), *more])
