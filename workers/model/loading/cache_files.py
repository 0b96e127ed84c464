"""The per-user cache folder: files that can be computed again, and are only kept to save time.

A file appears whole or not at all (written beside, then renamed). Nothing here is trusted: the reader of a file checks
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_folder(part: str) -> Path:
    """`$XDG_CACHE_HOME/halfmoon/<part>`; not created before something is written."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "halfmoon" / part


def replace_file(path: Path, write: Callable[[Path], object]) -> bool:
    """Puts the file that `write` makes at `path` in one step; False when the folder takes no files."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(number)
    except OSError:
        return False
    try:
        write(Path(name))
        os.replace(name, path)
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


@contextlib.contextmanager
def held_lock(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees it when the process dies. No lock where the folder takes no
    files.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
