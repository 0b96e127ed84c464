"""`--profile observability`: a Prometheus in the cluster's network finds every container by Docker's DNS.

The image is Debian's Prometheus over the tests' base, as no registry need be there; configuration, rules and
the compose file are the users'. It comes after the other tests' faults, and sees the nodes that were added.
"""

from __future__ import annotations

import json
import os
import time
import urllib.parse
from pathlib import Path
from typing import Any

from halfmoon.schemas.subjects import STREAMS
from tests.docker.engine import run
from tests.docker.stack import Stack
from tests.eventually import eventually_here, noted_where_late

IMAGE = "halfmoon-prometheus:test"
DOCKERFILE = """
FROM {base}
RUN apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends prometheus wget \
    && mkdir /prometheus && chown nobody:nogroup /prometheus
USER nobody
ENTRYPOINT ["/usr/bin/prometheus"]
"""


def query(stack: Stack, expr: str) -> list[dict[str, Any]]:
    """The samples, asked for from within: the port is not published."""
    url = f"http://127.0.0.1:9090/api/v1/query?query={urllib.parse.quote(expr)}"
    (name,) = stack.containers("prometheus")
    found: list[dict[str, Any]] = json.loads(stack.docker("exec", name, "wget", "-qO-", url))["data"][
        "result"
    ]
    return found


def test_prometheus_finds_every_container(stack: Stack, report: list[str], tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.format(base=stack.base))
    run("docker", "build", "-q", "--network", "host", "-t", IMAGE, str(tmp_path), timeout=900)
    os.environ["HALFMOON_PROMETHEUS_IMAGE"] = IMAGE
    wanted = {role: len(stack.containers(role)) for role in ("conductor", "prefill", "decode")}
    wanted |= {"store": wanted["prefill"] + wanted["decode"], "frontend": 2}
    names = {f"{role}-{n}" for role, count in wanted.items() if role != "store" for n in range(count)}
    names |= {f"store-{role}-{n}" for role in ("prefill", "decode") for n in range(wanted[role])}
    try:
        stack.command(
            "--profile", "observability", "up", "-d", "--no-recreate", "--no-deps", "prometheus", timeout=300
        )
        started = time.monotonic()
        (prometheus,) = stack.containers("prometheus")
        eventually_here(lambda: stack.health(prometheus) == "healthy", "Prometheus is healthy", every_s=2)
        found: dict[str, int] = {}
        seen: list[object] = []

        def all_there() -> bool:
            nonlocal found
            jobs = query(stack, "sum by (job) (up)")
            found = {each["metric"]["job"]: int(each["value"][1]) for each in jobs}
            shown = {each["metric"]["id"] for each in query(stack, "halfmoon_process_info")}
            streams = {each["metric"]["stream"] for each in query(stack, "halfmoon:stream_fill:ratio")}
            seen[:] = [found, wanted, shown ^ names, streams]
            return found == wanted and shown == names and streams == set(STREAMS)

        with noted_where_late(lambda: seen):
            eventually_here(all_there, "Prometheus scrapes them all", every_s=2)
        report.append(f"Prometheus scrapes them all after {time.monotonic() - started:.0f} s: {found}")
        (members,) = query(stack, 'max(halfmoon_members{role="store",state="ready"})')
        assert int(members["value"][1]) == wanted["store"]
        assert query(stack, 'ALERTS{alertname="HalfmoonTargetDown"}') == []
        bindings = stack.docker(
            "inspect", "-f", "{{json .HostConfig.PortBindings}}", stack.containers("prometheus")[0]
        )
        assert not json.loads(bindings)
    finally:
        stack.command("rm", "-s", "-f", "-v", "prometheus")
        del os.environ["HALFMOON_PROMETHEUS_IMAGE"]
