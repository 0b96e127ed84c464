"""The cluster of docker/compose.yaml, from a clean checkout, as the tests drive it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docker.engine import base_image, run
from tests.eventually import eventually_here, noted_where_late
from tests.ports import HeldPorts

ROOT = Path(__file__).parents[2]
WHOLE = {"prefill": 2, "decode": 2, "store": 4, "frontend": 2}
CONDUCTORS = 3
#: Until nodes that share a busy machine have measured themselves.
WHOLE_S = 600.0


@dataclass
class Stack:
    """`up` before anything else; `down` leaves neither container, network nor volume."""

    checkout: Path
    project: str = field(default_factory=lambda: f"hm{uuid.uuid4().hex[:6]}")
    #: Of the frontends, whose containers come and go.
    held: HeldPorts = field(default_factory=lambda: HeldPorts(count=2))
    image: str = "halfmoon:test"
    build_s: float = 0.0
    compose: list[str] = field(default_factory=lambda: [*_compose()])
    base: str = ""
    #: Of the compose file, from the next `up` on.
    settings: dict[str, str] = field(default_factory=dict)
    #: Compose files on top of compose.yaml.
    overlays: tuple[str, ...] = ()
    #: Members that are ready when the cluster is whole, and conductors that answer.
    whole: dict[str, int] = field(default_factory=lambda: dict(WHOLE))
    conductors: int = CONDUCTORS

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "HALFMOON_TAG": self.image.partition(":")[2],
            "HALFMOON_BASE": self.base,
            "HALFMOON_BUILD_NETWORK": "host",
            "HALFMOON_HTTP_PORT": str(self.ports[0]),
            "HALFMOON_HTTP_PORT_1": str(self.ports[1]),
            "HALFMOON_POOL_MIB": "192",
            "HALFMOON_SHM": "256m",
            # Twelve containers on two cores take their time; what is asked for here is an answer, not a fast
            # one.
            "HALFMOON_TTFT_SLO_MS": "120000",
            "HALFMOON_TBT_SLO_MS": "20000",
            **self.settings,
        }

    @property
    def ports(self) -> tuple[int, int]:
        return self.held.first, self.held.first + 1

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def command(self, *words: str, timeout: float = 300) -> str:
        named = ("compose.yaml", *self.overlays)
        files = [word for name in named for word in ("-f", str(self.checkout / "docker" / name))]
        return run(
            *self.compose, "-p", self.project, *files, *words, timeout=timeout, env=self.environment
        ).stdout

    def build(self) -> None:
        """The image, out of the checkout alone (and the wheels that this machine has at hand)."""
        self.base = base_image()
        for folder in os.environ.get("PIP_FIND_LINKS", "").split():
            for wheel in Path(folder).glob("torch-*.whl"):
                shutil.copy(wheel, self.checkout / "docker" / "wheels")
        started = time.monotonic()
        self.command("build", "secrets", timeout=1800)
        self.build_s = time.monotonic() - started

    def another(self) -> Stack:
        """A cluster of the same image, beside this one."""
        return Stack(self.checkout, image=self.image, base=self.base, build_s=self.build_s)

    @contextlib.contextmanager
    def running(self) -> Iterator[Stack]:
        """What is up within is down afterwards; its output is kept in HALFMOON_DOCKER_LOGS where that is set."""
        try:
            yield self
        finally:
            if kept := os.environ.get("HALFMOON_DOCKER_LOGS"):
                with Path(kept).open("a") as file:
                    file.write(self.command("logs", "--no-color"))
            self.down()

    def up(self, *more: str) -> None:
        self.command("up", "-d", *more, timeout=600)

    def down(self) -> None:
        left = run("docker", "ps", "-aq", "--filter", f"label=test={self.project}").stdout.split()
        if left:
            run("docker", "rm", "-f", *left)
        self.command("down", "-v", "-t", "30", "--remove-orphans", timeout=300)

    def left(self) -> list[str]:
        """Containers, networks and volumes that are there."""
        label = f"label=com.docker.compose.project={self.project}"
        listings = (["ps", "-aq"], ["network", "ls", "-q"], ["volume", "ls", "-q"])
        return [each for words in listings for each in self.docker(*words, "--filter", label).splitlines()]

    # --- containers -----------------------------------------------------------------------------------------

    def containers(self, service: str = "") -> list[str]:
        """Names, of those that run or did; not of `secrets`, which ends."""
        label = f"label=com.docker.compose.project={self.project}"
        columns = '{{.Names}} {{.Label "com.docker.compose.service"}}'
        shown = run("docker", "ps", "-a", "--filter", label, "--format", columns)
        pairs = [line.split() for line in shown.stdout.splitlines()]
        return sorted(name for name, of in pairs if of == service or (not service and of != "secrets"))

    def health(self, container: str) -> str:
        return run("docker", "inspect", "-f", "{{.State.Health.Status}}", container).stdout.strip()

    def docker(self, *words: str, timeout: float = 120) -> str:
        return run("docker", *words, timeout=timeout).stdout

    # --- how it is ------------------------------------------------------------------------------------------

    def get(self, path: str, port: int = 0, timeout: float = 3) -> tuple[int, dict[str, Any]]:
        """(0, {}) when nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port or self.ports[0]}{path}", timeout=timeout
            ) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as problem:
            return problem.code, {}
        except (OSError, ValueError):
            return 0, {}

    def ready(self, role: str) -> list[str]:
        """Nodes of that role that take orders, as the first frontend knows them."""
        _, status = self.get("/status")
        nodes = status.get("nodes", [])
        return [node["id"] for node in nodes if node["role"] == role and node["state"] == "ready"]

    def missing(self) -> str:
        """What is not there yet; "" when all is."""
        for name in self.containers():
            if (health := self.health(name)) != "healthy":
                return f"{name} is {health}"
        for port in self.ports[: self.whole["frontend"]]:
            _, status = self.get("/status", port)
            roles = [node["role"] for node in status.get("nodes", []) if node["state"] == "ready"]
            found = {role: roles.count(role) for role in self.whole}
            if found != self.whole:
                return f"the frontend at {port} knows {found}"
            if len(status["conductors"]) < self.conductors:
                return f"{len(status['conductors'])} conductors answer"
        return ""

    def wait_whole(self) -> float:
        """Seconds that it took."""
        started = time.monotonic()
        with noted_where_late(self.missing):
            eventually_here(lambda: not self.missing(), "the cluster is whole", every_s=0.25, bound_s=WHOLE_S)
        return time.monotonic() - started

    # --- as an operator -------------------------------------------------------------------------------------

    def as_role(
        self, role: str, key: str, *words: str, timeout: float = 120, check: bool = True
    ) -> tuple[int, str]:
        """A command in a container of its own, with the credentials of a role; status and output."""
        server = "tls://nats-0:4222,tls://nats-1:4222,tls://nats-2:4222"
        settings = {"NATS": server, "NATS_CA": "/run/secrets/ca.pem", "NATS_REPLICAS": "0"}
        if key:
            settings["NATS_NKEY_FILE"] = f"/run/secrets/{key}.nk"
        options = [word for name, value in settings.items() for word in ("-e", f"HALFMOON_{name}={value}")]
        options += [
            "--network",
            f"{self.project}_inside",
            "-v",
            f"{self.project}_secrets-{role}:/run/secrets:ro",
        ]
        options += ["--init", "--label", f"test={self.project}"]
        done = run("docker", "run", "--rm", "-i", *options, self.image, *words, timeout=timeout, check=check)
        return done.returncode, done.stdout + done.stderr

    def saved_log(self) -> str:
        """As `halfmoon events save` writes it."""
        words = "halfmoon events save /tmp/run.jsonl >&2 && cat /tmp/run.jsonl"
        _, output = self.as_role("operator", "operator", "sh", "-c", words)
        return "".join(f"{line}\n" for line in output.splitlines() if line.startswith("{"))

    def log(self) -> list[dict[str, Any]]:
        """Every event, in order."""
        return [_event(line) for line in self.saved_log().splitlines() if '"event"' in line]

    def decisions(self, kind: str) -> list[dict[str, Any]]:
        """Every decision of that type, in order."""
        found = [json.loads(line).get("decision", {}) for line in self.saved_log().splitlines()]
        return [each for each in found if each.get("type") == kind]

    def replayed(self) -> str:
        """The event log, saved and stepped over again: what `halfmoon replay` says. Raises when it differs."""
        save = "halfmoon events save /tmp/run.jsonl.zst >&2 && halfmoon replay /tmp/run.jsonl.zst --json"
        _, output = self.as_role("operator", "operator", "sh", "-c", save)
        found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        assert found["identical"], output
        assert found["decisions"] > 0, output
        return f"{found['events']:,} events, {found['decisions']:,} decisions, identical"


def _event(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line).get("event", {})
    return found


def clean_checkout(place: Path) -> Path:
    """Of what is committed here."""
    run("git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(place))
    return place


def _compose() -> list[str]:
    for words in (["docker", "compose"], ["docker-compose"]):
        with contextlib.suppress(FileNotFoundError):
            if run(*words, "version", check=False).returncode == 0:
                return words
    raise AssertionError("neither docker compose nor docker-compose is there")
