"""What the processes of a live cluster write and hold while they are told nonsense."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from tests.chaos.live_watch import kind_of
from tests.cluster.harness import Cluster, children

#: Of all processes together: lines that somebody provokes are few, and say how many were left out.
LINES_MAX = 2_000
#: By how much each process may grow, once it has been told nonsense for a while.
GROWTH_MAX = {"rss_bytes": 64 << 20, "files": 12, "threads": 12}
#: Go gives memory back late, and the server keeps the streams' newest messages in it, some of which are large here.
SERVER_GROWTH_MAX = {**GROWTH_MAX, "rss_bytes": 512 << 20}
#: An engine's cache and buffers fill as they are used first.
ENGINE_GROWTH_MAX = {**GROWTH_MAX, "rss_bytes": 256 << 20}
_GROWTH_MAX = {"nats-server": SERVER_GROWTH_MAX, "prefill": ENGINE_GROWTH_MAX, "decode": ENGINE_GROWTH_MAX}
#: What no output may hold: Python's last words, Go's, and what `halfmoon up` says of a process that ended.
_LAST_WORDS = re.compile(
    r"Traceback \(most recent call last\)|^panic: |^fatal error: |AssertionError|starts? it again", re.M
)


class Outputs:
    """The output of every process, of nats-server and of `halfmoon up`, from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self._files = [
            cluster.directory.parents[1] / f"{cluster.name}.out",
            cluster.directory / "nats" / "nats.log",
            *(cluster.directory / "output").glob("*.log"),
        ]
        self._read = {file: file.stat().st_size if file.exists() else 0 for file in self._files}
        self.lines: Counter[str] = Counter()

    def problem(self) -> str:
        """What stands there since the last look that must not; "" for nothing."""
        for file in self._files:
            new = self._new(file)
            if found := _LAST_WORDS.search(new):
                return f"{file.name}: {new[max(0, found.start() - 300) : found.start() + 3000]}"
            # The server tells of each connection that breaks its protocol.
            self.lines[file.name] += new.count("\n")
        ours = self.lines.total() - self.lines["nats.log"]
        return f"{ours} lines were written: {dict(self.lines)}" if ours > LINES_MAX else ""

    def _new(self, file: Path) -> str:
        size = file.stat().st_size if file.exists() else 0
        begin = self._read[file] if size >= self._read[file] else 0  # it was rotated
        self._read[file] = size
        if size == begin:
            return ""
        with file.open("rb") as content:
            content.seek(begin)
            return content.read(size - begin).decode(errors="replace")


class Grown:
    """What each process holds, when it is warm and later."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._warm: dict[int, dict[str, int]] = {}

    def warm(self) -> None:
        """From now on nothing may grow."""
        self._warm = self._held()

    def problem(self) -> str:
        """Who holds too much more; "" for nobody."""
        now = self._held()
        return "; ".join(
            f"{kind_of(pid)}: {name} grew from {before[name]} to {now[pid][name]}"
            for pid, before in self._warm.items()
            for name, most in _GROWTH_MAX.get(kind_of(pid), GROWTH_MAX).items()
            if pid in now and now[pid][name] - before[name] > most
        )

    def figures(self) -> dict[str, list[dict[str, int]]]:
        """By kind of process: what each held when it was warm, and now."""
        now = self._held()
        return {f"{kind_of(pid)} {pid}": [before, now.get(pid, {})] for pid, before in self._warm.items()}

    def _held(self) -> dict[int, dict[str, int]]:
        return {pid: _held_by(pid) for pid in (self._top, *children(self._top))}


def _held_by(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_bytes": int(status["RssAnon"].split()[0]) << 10,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }
