"""Copies of this checkout that a test may change."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copy_tree(folder: Path, *patterns: str) -> Path:
    """What git has or would add, links as links; with `patterns` (git's), only what one of them matches.

    Bytecode comes along: each process of a cluster that starts there would compile all modules at the same time.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source, target = ROOT / name, folder / name
        if not source.exists() and not source.is_symlink():
            continue  # removed, and not yet committed
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            shutil.copy2(source, target)  # with its time, which bytecode is told by
            if name.endswith(".py") and (compiled := Path(cache_from_source(str(source)))).exists():
                kept = Path(cache_from_source(str(target)))
                kept.parent.mkdir(exist_ok=True)
                shutil.copy2(compiled, kept)
    return folder
