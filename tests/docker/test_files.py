"""The files of docker/ as far as they can be checked without an engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfmoon.cli.commands import COMMANDS, parser_of
from halfmoon.cli.options import PREFIX
from halfmoon.schemas.roles import ROLES, WORKER_ROLES, WorkerRole
from tests.lengths import sizes

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "docker" / "kubernetes"
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
COMPOSE = ROOT / "docker" / "compose.yaml"


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_fits_kubernetes_schema(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in documents(path):
        validate(document, "1.29", strict=True)


def test_the_schema_check_can_fail() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    document = next(each for each in documents(MANIFESTS[0]) if each["kind"] == "StatefulSet")
    document["spec"]["replicaz"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.29", strict=True)


COMPOSE_COMMANDS = [["docker", "compose"], ["docker-compose"]]
OVERLAYS = {
    "plain": [],
    "gpu": ["-f", "docker/compose.gpu.yaml"],
    "small": ["-f", "docker/compose.small.yaml"],
    "vllm": ["-f", "docker/compose.vllm.yaml"],
    "observability": ["--profile", "observability"],
}


#: Unmodified, so what they write to is their own.
ENGINES = {"vllm-0", "vllm-1"}
SCALES = {"small": (1, 2), "vllm": (0, 3)}


@pytest.mark.parametrize("overlay", [*sizes("plain", "gpu"), *sizes("observability", "small"), "vllm"])
def test_compose_takes_the_files_without_a_word(overlay: str) -> None:
    """Each compose that is here, of version 1 or 2; it needs no engine for that."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("HALFMOON_", "COMPOSE_"))
    }
    clean["HALFMOON_MODEL_DIR"] = "/models/any"  # compose.vllm.yaml wants one
    seen = 0
    for command in COMPOSE_COMMANDS:
        if shutil.which(command[0]) is None or _run([*command, "version"], clean).returncode:
            continue
        done = _run([*command, "-f", "docker/compose.yaml", *OVERLAYS[overlay], "config"], clean)
        assert (done.returncode, done.stderr) == (0, ""), command
        services = yaml.safe_load(done.stdout)["services"]
        assert {"secrets", "nats-0", "nats-1", "nats-2", "conductor", "prefill", "decode", "frontend-0"} <= {
            *services
        }
        for name, service in services.items():
            # What is on top takes nothing away.
            assert (service.get("read_only") is True) == (name not in ENGINES), name
        scales = SCALES.get(overlay, (2, 3))
        assert (services["prefill"]["scale"], services["conductor"]["scale"]) == scales
        if overlay != "gpu":  # its GPUs are for prefill and decode nodes
            for part in ("mem_limit", "shm_size", "cpus"):
                assert len({str(services[role][part]) for role in WORKER_ROLES}) == 1, part
        seen += 1
    if not seen:
        pytest.skip("no docker compose here")


def _run(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_every_variable_of_the_compose_files_is_explained() -> None:
    """Those of GPU nodes in their own file."""
    explained = (ROOT / "docs" / "docker.md").read_text()
    for path in sorted((ROOT / "docker").glob("compose*.yaml")):
        text = path.read_text()
        comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        names = set(re.findall(r"\$\{([A-Z0-9_]+)", text))
        missing = {name for name in names if f"`{name}`" not in explained and name not in comments}
        assert missing == set(), path.name


def workloads() -> dict[str, dict[str, Any]]:
    """Kubernetes' StatefulSets and Deployments by name: each its pod's spec."""
    found = {}
    for path in MANIFESTS:
        for document in documents(path):
            if "template" in document.get("spec", {}):
                found[document["metadata"]["name"]] = document["spec"]["template"]["spec"]
    return found


def _options_of_processes() -> set[str]:
    """By their names in the environment, without the prefix and in small letters."""
    names: set[str] = set()
    for command in COMMANDS:
        if command.name in (*ROLES, "container"):
            names |= {action.dest for action in parser_of(command.name)._actions if action.option_strings}
    return names


def test_compose_and_kubernetes_run_the_same_processes() -> None:
    """Every role that there is; same image, same settings by name, every setting one that the process knows."""
    compose = yaml.safe_load(COMPOSE.read_text())["services"]
    commands = {tuple(service["command"]) for service in compose.values() if "command" in service}
    # A node's container has its store agent.
    assert {words[-1] for words in commands if words[:2] == ("halfmoon", "container")} == {*ROLES} - {
        "store",
        "adapt",
    }
    found: dict[str, set[str]] = {}
    for pod in workloads().values():
        for container in pod["containers"]:
            assert container["image"] == "halfmoon:0.1.0"
            found[container["name"]] = {each["name"] for each in container["env"]}
    # An adapter stands beside an engine of another's, wherever that is.
    assert set(found) == {"nats", *ROLES} - {"adapt"}
    known = {f"{PREFIX}{name.upper()}" for name in _options_of_processes()}
    # By the table of roles, and of adapters.
    of_secrets = {"HALFMOON_ATTENTION", "HALFMOON_MIXED", "HALFMOON_ADAPT"}
    ours = [service for service in compose.values() if "profiles" not in service]
    settings = {name for service in ours for name in service.get("environment") or {}}
    used = {
        name
        for name in {*settings, *(name for names in found.values() for name in names)}
        if "HALFMOON" in name
    }
    assert used - known == of_secrets
    assert settings - set().union(*found.values()) <= of_secrets | {
        "GOMEMLIMIT",
        "GOMAXPROCS",
        "HALFMOON_DTYPE",
        "HALFMOON_NUMERICS",
        "HALFMOON_API_KEYS_FILE",
        "HALFMOON_POLICY",
        "HALFMOON_ADMISSION",
        "HALFMOON_LOG_MIB_MAX",
        "HALFMOON_METRICS_PORT",
    }


@pytest.mark.parametrize("role", WORKER_ROLES)
def test_every_kind_of_node_has_its_keys_its_ports_and_its_pool(role: WorkerRole) -> None:
    """In the compose file, in the image that its volumes begin as, and in Kubernetes."""
    text = yaml.safe_load(COMPOSE.read_text())
    service, secrets = text["services"][role], text["services"]["secrets"]
    assert f"secrets-{role}:/secrets/{role}" in secrets["volumes"]
    assert f"secrets-{role}:/run/secrets:ro" in service["volumes"]
    assert {f"secrets-{role}", f"cache-{role}"} <= {*text["volumes"]}
    if not ROLES[role].nodes:  # none where nobody asks for it, and then with credentials
        assert service["scale"] == secrets["environment"][f"HALFMOON_{role.upper()}"]
    (made,) = re.findall(
        r"for d in ([a-z0-9 -]+); do mkdir -p /secrets", (ROOT / "docker" / "Dockerfile").read_text()
    )
    assert {volume.rpartition("/")[2] for volume in secrets["volumes"]} == {*made.split()}

    pod, peer = workloads()[role], workloads()["decode"]
    assert {each["name"]: each for each in pod["volumes"]}["secrets"]["secret"][
        "secretName"
    ] == f"halfmoon-{role}"
    assert pod["securityContext"] == peer["securityContext"]
    for container, its in zip(pod["containers"], peer["containers"], strict=True):
        for part in ("startupProbe", "readinessProbe", "livenessProbe", "securityContext", "volumeMounts"):
            assert container[part] == its[part], (container["name"], part)
    (sets,) = [each for path in MANIFESTS for each in documents(path) if _is(each, "StatefulSet", role)]
    assert sets["spec"]["replicas"] == ROLES[role].nodes
    listens = {
        port["containerPort"] for container in pod["containers"] for port in container.get("ports", [])
    }
    (headless,) = [each for path in MANIFESTS for each in documents(path) if _is(each, "Service", role)]
    assert {port["port"] for port in headless["spec"]["ports"]} == listens
    policies = [each["spec"] for each in documents(KUBERNETES / "network.yaml")]
    reached = {
        port["port"]
        for spec in policies
        if _selects(spec, role)
        for rule in spec["ingress"]
        for port in rule["ports"]
    }
    assert reached == listens


VLLM = yaml.safe_load((ROOT / "docker" / "compose.vllm.yaml").read_text())


def test_an_adapter_is_bounded_and_without_rights_and_an_engine_is_alone_with_it() -> None:
    for number in (0, 1):
        engine, adapter = VLLM["services"][f"vllm-{number}"], VLLM["services"][f"adapt-{number}"]
        assert engine["networks"] == [f"engine-{number}"]
        assert adapter["networks"] == ["inside", f"engine-{number}"]
        assert VLLM["networks"][f"engine-{number}"] == {"internal": True}
        for service in (engine, adapter):
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert "ports" not in service
            assert service["mem_limit"]
            assert service["healthcheck"]["test"]
        assert adapter["read_only"] is True
        assert adapter["pids_limit"]
        assert adapter["cpus"]


def test_an_adapter_is_started_with_words_that_it_knows() -> None:
    parser = parser_of("adapt")
    known = {f"{PREFIX}{action.dest.upper()}" for action in parser._actions if action.option_strings}
    for number in (0, 1):
        service = VLLM["services"][f"adapt-{number}"]
        args = parser.parse_args(service["command"][2:])
        assert (args.id, args.url) == (f"vllm-{number}", f"http://vllm-{number}:8000")
        assert args.nats_nkey_file == f"/run/secrets/{args.id}.nk"
        assert {name for name in service["environment"] if name.startswith(PREFIX)} <= known


def _is(document: dict[str, Any], kind: str, name: str) -> bool:
    return bool(document["kind"] == kind and document["metadata"]["name"] == name)


def _selects(spec: dict[str, Any], app: str) -> bool:
    """Whether a network policy names these pods."""
    selector = spec["podSelector"]
    listed = [each["values"] for each in selector.get("matchExpressions", []) if each["key"] == "app"]
    return selector.get("matchLabels", {}).get("app") == app or any(app in values for values in listed)


def test_every_service_is_bounded_checked_and_without_rights() -> None:
    for name, service in yaml.safe_load(COMPOSE.read_text())["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["mem_limit"], name
        if name == "secrets":
            assert service["network_mode"] == "none"
            continue
        assert service["healthcheck"]["test"], name
        assert service["stop_grace_period"] == "30s", name
        assert service["cpus"], name
        assert service["pids_limit"], name
        published = name.startswith("frontend") or name == "grafana"
        assert ("ports" in service) == published, name
        assert service["networks"] == (["inside", "edge"] if published else ["inside"]), name
