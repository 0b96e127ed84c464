"""What is installed is what was meant: exact versions with the hashes of their files, and a list of all in an image."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(ROOT.glob("requirements*.lock"))


def requirements(lock: str) -> dict[str, list[str]]:
    """Name with version, and its hashes."""
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", lock).splitlines():
        if line.startswith(("#", "-r ")):
            continue
        name, *hashes = line.split(" --hash=")
        found[name.split(" ;")[0].strip()] = hashes
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_each_requirement_is_one_version_and_the_hashes_of_its_files(lock: Path) -> None:
    found = requirements(lock.read_text())
    assert found
    for name, hashes in found.items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^,<>=*]+", name), name
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), name
        assert len(set(hashes)) == len(hashes), name


def test_nothing_is_installed_from_a_lock_without_its_hashes() -> None:
    for file in ("Makefile", "docker/Dockerfile", "docker/install-torch"):
        for line in (ROOT / file).read_text().splitlines():
            if re.search(r"\binstall\b.* -r \S+\.lock", line):
                assert "--require-hashes" in line, f"{file}: {line}"


@pytest.mark.realtime
@pytest.mark.slow
def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    """pip itself, on a wheel of our own: its hash in a lock, then another one."""
    wheel = tmp_path / "sample-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        folder = "sample-1.dist-info"
        packed.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: sample\nVersion: 1\n")
        packed.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{folder}/RECORD", "")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated"]
    own = subprocess.run([*pip, "hash", str(wheel)], capture_output=True, text=True, check=True).stdout
    digest = re.search(r"sha256:[0-9a-f]{64}", own)
    assert digest is not None
    for text, status in ((digest[0], 0), ("sha256:" + "0" * 64, 1)):
        (tmp_path / "sample.lock").write_text(f"sample==1 --hash={text}\n")
        command = [*pip, "install", "--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "to"),
                   "--require-hashes", "-r", str(tmp_path / "sample.lock")]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr


def test_the_images_lock_is_what_runs_and_what_sends_traces(tmp_path: Path) -> None:
    for file in (*LOCKS, ROOT / "docker" / "left-out.txt"):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        [str(ROOT / "docker" / "image-lock"), str(tmp_path)], capture_output=True, text=True, check=True
    )
    image = requirements(done.stdout)
    runs = requirements((ROOT / "requirements.lock").read_text())
    tools = requirements((ROOT / "requirements-dev.lock").read_text())
    left_out = [
        line.strip("^=\n").lower() for line in (ROOT / "docker" / "left-out.txt").read_text().splitlines()
    ]
    expected = {name: hashes for name, hashes in runs.items() if name.split("==")[0].lower() not in left_out}
    sends = re.compile("googleapis|opentelemetry|protobuf")
    expected |= {name: hashes for name, hashes in tools.items() if sends.match(name)}
    assert image == expected
    assert len(left_out) == len(runs) - len(image) + sum(bool(sends.match(name)) for name in tools)


def made() -> dict[str, Any]:
    """The list of this very machine."""
    command = [sys.executable, str(ROOT / "docker" / "sbom.py"), "here", "1"]
    outputs = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(outputs) == 1, "the same machine, another list"
    found: dict[str, Any] = json.loads(outputs.pop())
    return found


def test_the_list_of_what_is_installed_is_complete() -> None:
    bom = made()
    assert (bom["bomFormat"], bom["specVersion"], bom["version"]) == ("CycloneDX", "1.5", 1)
    refs = [component["bom-ref"] for component in bom["components"]]
    assert len(set(refs)) == len(refs)
    python = {(c["name"], c["version"]) for c in bom["components"] if c["purl"].startswith("pkg:pypi/")}
    installed = {
        (re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(), each.version)
        for each in importlib.metadata.distributions()
    }
    assert python == installed
    assert ("halfmoon", importlib.metadata.version("halfmoon")) in python
    if shutil.which("dpkg-query"):
        debian = {(c["name"], c["version"]) for c in bom["components"] if c["purl"].startswith("pkg:deb/")}
        form = "${Package} ${Version} ${db:Status-Status}\n"
        listed = subprocess.run(
            ["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(" ") for line in listed.splitlines()]
        assert debian == {(name, version) for name, version, status in rows if status == "installed"}


@pytest.mark.parametrize(
    ("fields", "version", "found"),
    [
        (
            {"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.8.5"}]}]},
            "3.8.4",
            True,
        ),
        (
            {"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.8.5"}]}]},
            "3.8.5",
            False,
        ),
        (
            {"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "2"}, {"last_affected": "3"}]}]},
            "3.0",
            True,
        ),
        (
            {"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "2"}, {"last_affected": "3"}]}]},
            "1.9",
            False,
        ),
        ({"ranges": [{"type": "GIT", "events": [{"introduced": "0"}, {"fixed": "abc"}]}]}, "3.8.4", False),
        ({"versions": ["3.8.3", "3.8.4"]}, "3.8.4", True),
        ({"versions": ["3.8.3"], "package": {"ecosystem": "npm", "name": "some-server"}}, "3.8.3", False),
    ],
)
def test_a_locked_version_that_an_advisory_names_is_found(
    fields: dict[str, Any], version: str, found: bool, tmp_path: Path
) -> None:
    affected = {"package": {"ecosystem": "PyPI", "name": "Some_Server"}, **fields}
    advisory = {"id": "PYSEC-1", "modified": "2026-01-01", "affected": [affected], "summary": "smuggling"}
    (tmp_path / "vulns" / "some-server").mkdir(parents=True)
    file = tmp_path / "vulns" / "some-server" / "PYSEC-1.yaml"
    lock = tmp_path / "x.lock"
    lock.write_text(f"other==1.0\nsome-server=={version} \\\n    --hash=sha256:00\n")
    for withdrawn in (False, True):
        file.write_text(json.dumps(advisory | ({"withdrawn": "2026-02-01"} if withdrawn else {})))
        done = subprocess.run(
            [sys.executable, ROOT / "docker/audit_offline.py", tmp_path, lock],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (found and not withdrawn), done.stderr
        assert ("PYSEC-1 smuggling" in done.stdout) == (found and not withdrawn)
