"""`make lock`: the hashes of the lock files anew, of all files that the index has of each version.

    python docker/lock.py UV FILE...

A hash that stood in the file before stays while its version stays: torch's builds without CUDA come from another index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def requirements(text: str) -> dict[str, set[str]]:
    """Name, version and marker, and the hashes."""
    found = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if "==" in line and not line.startswith("#"):
            name, *hashes = line.split(" --hash=")
            found[name.strip()] = set(hashes)
    return found


def main() -> None:
    uv, *files = sys.argv[1:]
    compiling = [uv, "pip", "compile", "-", "--no-deps", "--generate-hashes", "--universal", "--no-header"]
    for file in map(Path, files):
        before = file.read_text()
        known = requirements(before)
        done = subprocess.run(
            [*compiling, "--no-annotate"], input="\n".join(known), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{file}: {done.stderr}")
        # A file that is included has its own turn.
        out = [line for line in before.splitlines(keepends=True) if line.startswith(("#", "-r "))]
        for name, hashes in requirements(done.stdout).items():
            every = sorted(hashes | known.get(name, set()))
            out.append(name + "".join(f" \\\n    --hash={each}" for each in every) + "\n")
        file.write_text("".join(out))


if __name__ == "__main__":
    main()
