"""`make audit ADVISORIES=DIR`: known vulnerabilities of what the locks name, where no index can be asked.

    python docker/audit_offline.py DIR FILE...

DIR is a checkout of github.com/pypa/advisory-database, whose `vulns/NAME/ID.yaml` are in the format of OSV
(ossf.github.io/osv-schema). Exit status 1 when a locked version is affected. Old advisories say nothing of what was
found since, so the age of the newest is printed; `make audit` alone asks the index.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


def locked(text: str) -> dict[str, Version]:
    """Versions by canonical name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in found}


def _in_range(version: Version, events: list[dict[str, str]]) -> bool:
    affected = False
    for event in events:
        ((kind, text),) = event.items()
        try:
            at = Version(text)
        except InvalidVersion:
            continue
        if kind == "introduced" and version >= at:
            affected = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            affected = False
    return affected


def affects(advisory: dict[str, Any], name: str, version: Version) -> bool:
    """Whether the advisory names this version of this package, and was not withdrawn."""
    if "withdrawn" in advisory:
        return False
    for affected in advisory.get("affected", ()):
        package = affected.get("package", {})
        if package.get("ecosystem") != "PyPI" or canonicalize_name(package.get("name", "")) != name:
            continue
        if str(version) in affected.get("versions", ()):
            return True
        ranges = [one for one in affected.get("ranges", ()) if one["type"] == "ECOSYSTEM"]
        if any(_in_range(version, one["events"]) for one in ranges):
            return True
    return False


def main() -> int:
    folder, *files = map(Path, sys.argv[1:])
    if not (folder / "vulns").is_dir():
        sys.exit(f"{folder}: no vulns/ in it: not a checkout of the advisory database")
    read, newest, found = 0, "", []
    for file in files:
        for name, version in locked(file.read_text()).items():
            for path in sorted((folder / "vulns" / name).glob("*.yaml")):
                advisory = yaml.safe_load(path.read_text())
                read, newest = read + 1, max(newest, str(advisory["modified"]))
                if affects(advisory, name, version):
                    found.append(f"{file}: {name} {version}: {path.stem} {advisory.get('summary', '')}")
    print("\n".join(found or ["no known vulnerability"]))
    print(f"{read} advisories on what is locked, the newest of {newest}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
