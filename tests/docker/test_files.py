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

from tests.lengths import sizes

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "docker" / "kubernetes").glob("*.yaml"))
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
    "observability": ["--profile", "observability"],
}


@pytest.mark.parametrize("overlay", [*sizes("plain", "gpu"), *sizes("observability", "small")])
def test_compose_takes_the_files_without_a_word(overlay: str) -> None:
    """Each compose that is here, of version 1 or 2; it needs no engine for that."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("HALFMOON_", "COMPOSE_"))
    }
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
            assert service["read_only"] is True, name  # what is on top takes nothing away
        small = overlay == "small"
        assert (services["prefill"]["scale"], services["conductor"]["scale"]) == ((1, 2) if small else (2, 3))
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


def test_compose_and_kubernetes_run_the_same_processes() -> None:
    """Same image, same settings by name, every setting one that the process knows."""
    compose = yaml.safe_load(COMPOSE.read_text())["services"]
    found: dict[str, set[str]] = {}
    for path in MANIFESTS:
        for document in documents(path):
            if document["kind"] == "StatefulSet":
                for container in document["spec"]["template"]["spec"]["containers"]:
                    assert container["image"] == "halfmoon:0.1.0"
                    found[container["name"]] = {each["name"] for each in container["env"]}
    assert set(found) == {"nats", "conductor", "store", "prefill", "decode", "mixed", "frontend"}
    sources = ("options.py", "processes/options.py", "processes/mixed.py", "metrics.py", "container.py")
    options = "".join((ROOT / "cli" / name).read_text() for name in sources)
    known = {
        f"HALFMOON_{flag.replace('-', '_').upper()}"
        for flag in re.findall(r'add_argument\(\s*"--([a-z-]+)"', options)
    }
    known.add("HALFMOON_MIXED")  # of `halfmoon secrets`, by the table of roles
    ours = [service for service in compose.values() if "profiles" not in service]
    settings = {name for service in ours for name in service.get("environment") or {}}
    used = {
        name
        for name in {*settings, *(name for names in found.values() for name in names)}
        if "HALFMOON" in name
    }
    assert used - known == set()
    assert settings - set().union(*found.values()) <= {
        "GOMEMLIMIT",
        "GOMAXPROCS",
        "HALFMOON_DTYPE",
        "HALFMOON_NUMERICS",
        "HALFMOON_API_KEYS_FILE",
        "HALFMOON_POLICY",
        "HALFMOON_ADMISSION",
        "HALFMOON_LOG_MIB_MAX",
        "HALFMOON_METRICS_PORT",
        "HALFMOON_MIXED",
    }


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
