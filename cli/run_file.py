"""The run file `cluster.json` of a cluster on this machine: where it is reached, and the keys to it.

`halfmoon up` writes it into its state directory, which its user alone can look into; so that user's commands find
the cluster and are let in without an option, and nobody else's are.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

NAME = "cluster.json"
#: Held by the cluster's `halfmoon up` from its first step to its last.
LOCK = "lock"
#: Of a process, as Linux counts them at most; 0 and less would mean groups of processes.
PID_MAX = 1 << 22
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


# No message class: msgspec would be imported for this file alone by commands that send and read plain JSON.
@dataclass(frozen=True, kw_only=True)
class RunFile:
    """`credentials`: the directory with the key of each process (`NAME.nk`); "" where the server is the user's own."""

    nats: str
    http: str
    pid: int
    credentials: str = ""

    def write(self, directory: Path) -> None:
        # Imported here, not above: it imports the making of keys, which no reader needs, and `halfmoon status` is one.
        from halfmoon.bus.credentials import write_private

        write_private(directory / NAME, orjson.dumps(self))

    @property
    def runs(self) -> bool:
        """False for the file of a cluster that was killed: its port may be anybody's by now."""
        if not 0 < self.pid <= PID_MAX:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def is_held(directory: Path) -> bool:
    """Whether a `halfmoon up` holds the lock of this state directory.

    It is read from Linux's list of locks. A process that tried the lock itself would hold it for an instant, and turn
    away a cluster that starts at that instant.
    """
    try:
        file = (directory / LOCK).stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any("FLOCK" in line and f":{file} " in line for line in locks.splitlines())


def read(directory: Path) -> RunFile | None:
    """The run file in this state directory; None where no cluster runs."""
    try:
        found = _checked(orjson.loads((directory / NAME).read_bytes()))
    except (OSError, orjson.JSONDecodeError):
        return None
    return found if found is not None and found.runs else None


def _checked(content: Any) -> RunFile | None:
    """None where a field lacks or has another type; fields of other versions are passed over."""
    match content:
        case {"nats": str(nats), "http": str(http), "pid": int(pid)} if not isinstance(pid, bool):
            credentials = content.get("credentials", "")
            if isinstance(credentials, str):
                return RunFile(nats=nats, http=http, pid=pid, credentials=credentials)
    return None


def at(base: Path, url: str) -> RunFile | None:
    """The run file of the cluster that is reached at `url`, of all whose state directories are in `base`."""
    wanted = {_place(each) for each in url.split(",")}
    for file in sorted(base.glob(f"*/{NAME}")):
        found = read(file.parent)
        # One whose addresses are none is passed over: the file may be of another version.
        with contextlib.suppress(ValueError):
            if found is not None and wanted & {_place(each) for each in found.nats.split(",")}:
                return found
    return None


def _place(url: str) -> tuple[str, int]:
    """Host and port. Raises ValueError where the port is no number."""
    parts = urlsplit(url.strip() if "//" in url else f"nats://{url.strip()}")
    host = parts.hostname or ""
    return "loopback" if host in _LOOPBACK else host, parts.port or 4222
