"""The list of what an image contains, as CycloneDX 1.5 JSON: every Python distribution that this interpreter finds, and
every package of the Debian that it runs on.

    python docker/sbom.py NAME VERSION > sbom.cdx.json

It is made from what is installed, by the build itself, and lies in the image at /usr/share/doc/halfmoon/sbom.cdx.json.
The same image gives the same list, byte for byte.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from typing import Any
from urllib.parse import quote


def python_components() -> list[dict[str, Any]]:
    found = {}
    for installed in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", installed.metadata["Name"]).lower()
        purl = f"pkg:pypi/{name}@{quote(installed.version, safe='')}"
        found[purl] = _component(purl, name, installed.version, _license(installed.metadata))
    return list(found.values())


def _license(metadata: Any) -> str:
    """As the distribution says it: an SPDX expression, a text of one line, or a classifier; "" when it does not."""
    said = metadata.get("License-Expression") or metadata.get("License") or ""
    if not said or "\n" in said or len(said) > 100:
        classifiers = metadata.get_all("Classifier") or []
        said = next((each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")), "")
    return str(said)


def debian_components() -> list[dict[str, Any]]:
    """[] on another kind of system."""
    if shutil.which("dpkg-query") is None:
        return []
    form = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"
    listed = subprocess.run(
        ["dpkg-query", "-W", "-f", form], check=True, capture_output=True, text=True
    ).stdout
    components = []
    for line in listed.splitlines():
        status, name, version, architecture = line.split("\t")
        if status.startswith("ii"):
            purl = f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={architecture}"
            components.append(_component(purl, name, version, ""))
    return components


def _component(purl: str, name: str, version: str, license_name: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    if license_name:
        component["licenses"] = [{"license": {"name": license_name}}]
    return component


def sbom(name: str, version: str) -> dict[str, Any]:
    components = [*python_components(), *debian_components()]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": sorted(components, key=lambda component: component["bom-ref"]),
    }


if __name__ == "__main__":
    json.dump(sbom(*sys.argv[1:]), sys.stdout, indent=1)
    sys.stdout.write("\n")
