"""A Docker engine for the tests: the one that is there, or one of Debian's that is installed and started for
them.

An engine of our own keeps everything in one folder, and ends with the tests. Where no registry can be reached
its base image is made with debootstrap. `Unavailable` says why there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.eventually import Late, eventually_here

BASE = "debian:12.11-slim"
OWN_BASE = "halfmoon-base:bookworm"
#: Commands, and Debian's packages that have them.
PACKAGES = {
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
}
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Unavailable(Exception):
    """Why there is no engine here."""


def run(
    *words: str, timeout: float = 120, check: bool = True, **more: object
) -> subprocess.CompletedProcess[str]:
    """Raises AssertionError with what the command said."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **more)  # type: ignore[call-overload]
    said = (done.stdout + done.stderr)[-3000:]
    assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.returncode}\n{said}"
    return done  # type: ignore[no-any-return]


@contextmanager
def engine() -> Iterator[None]:
    """`docker` works within. Raises Unavailable."""
    if _answers():
        yield
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable("no Docker engine answers, and only root on Debian could install one")
    _install()
    place = Path(os.environ.get("HALFMOON_DOCKER_DIR") or tempfile.mkdtemp(prefix="halfmoon-docker-"))
    place.mkdir(parents=True, exist_ok=True)
    os.environ["DOCKER_HOST"] = f"unix://{place}/docker.sock"
    words = ["dockerd", "--ip6tables=false", "--data-root", f"{place}/data", "--exec-root", f"{place}/exec"]
    with (place / "dockerd.log").open("ab") as log:
        server = subprocess.Popen(
            [*words, "-H", os.environ["DOCKER_HOST"], "-p", f"{place}/pid"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        with suppress(Late):
            eventually_here(lambda: server.poll() is not None or _answers(), "dockerd answers", every_s=0.5)
        if not _answers():
            tail = (place / "dockerd.log").read_text()[-600:]
            raise Unavailable(f"this machine lets no Docker engine run: {tail}")
        yield
    finally:
        server.terminate()
        server.wait(60)
        del os.environ["DOCKER_HOST"]
        if not os.environ.get("HALFMOON_DOCKER_DIR"):
            shutil.rmtree(place, ignore_errors=True)


def base_image() -> str:
    """An image of Debian 12 to build from. Raises Unavailable."""
    for image in (BASE, OWN_BASE, "debian:bookworm-slim"):
        if run("docker", "image", "inspect", image, check=False).returncode == 0:
            return image
    if run("docker", "pull", "-q", BASE, timeout=300, check=False).returncode == 0:
        return BASE
    if shutil.which("debootstrap") is None:
        raise Unavailable(f"no registry gives {BASE}, and there is no debootstrap to make it with")
    root = Path(tempfile.mkdtemp(prefix="halfmoon-base-"))
    try:
        run(
            "debootstrap",
            "--variant=minbase",
            "--include=ca-certificates",
            "bookworm",
            str(root),
            timeout=600,
        )
        if CERTIFICATES.exists():  # so that the build reaches what this host reaches
            shutil.copy(CERTIFICATES, root / "etc/ssl/certs/ca-certificates.crt")
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        run("sh", "-c", f"tar -C {root} -c . | docker import - {OWN_BASE}", timeout=300)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return OWN_BASE


def _answers() -> bool:
    return shutil.which("docker") is not None and run("docker", "info", check=False).returncode == 0


def _install() -> None:
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if missing:
        run("apt-get", "update", "-q", timeout=300, check=False)
        install = ("apt-get", "install", "-y", "-q", "--no-install-recommends", *missing)
        done = run(
            *install, timeout=900, check=False, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        )
        if done.returncode:
            raise Unavailable(f"apt-get installs no {', '.join(missing)}: {done.stderr[-300:]}")
