"""What a live cluster uses, sampled over time: memory, file descriptors and threads of every process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.cluster.harness import FORK_SERVER, Cluster, children, command_of

SAMPLE_S = 5.0
#: A process is measured from this age on: until then it loads its model and fills its caches.
SETTLED_S = 60.0
#: In a short run that is so much of it, and there are so many samples, or the check would come too late to look.
SETTLED_PART, SAMPLES_MIN = 0.25, 120
#: In each third of a run, or growth is not told from chance.
THIRD_MIN = 10
#: In the last third of a run a kind of process may use so much more than in the first, at most.
GROWTH_MAX = 1.25
RSS_GROWTH_MIN, FDS_GROWTH_MIN = 48 << 20, 24


@dataclass
class Sample:
    """One process at one time. `rss`: its own memory; pages of files, which it may drop, do not count."""

    at_s: float
    rss: int
    fds: int
    threads: int


@dataclass
class Watch:
    """Samples by kind of process, those of young processes left out. `seconds`: how long the run is."""

    cluster: Cluster
    seconds: float
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    _born_s: dict[int, float] = field(default_factory=dict)

    @property
    def settled_s(self) -> float:
        return min(SETTLED_S, self.seconds * SETTLED_PART)

    @property
    def sample_s(self) -> float:
        return min(SAMPLE_S, self.seconds / SAMPLES_MIN)

    async def run(self) -> None:
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(self.sample_s)

    def look(self, now_s: float) -> None:
        top = self.cluster.process.pid
        for pid in [top, *children(top)]:
            born_s = self._born_s.setdefault(pid, now_s)
            if now_s - born_s < self.settled_s:
                continue
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                sample = _sample(pid, now_s)
                self.samples[kind_of(pid)].append(sample)

    def grown(self) -> list[str]:
        """Kinds of processes that use more and more, or that nothing can be said of."""
        found = [] if self.samples else ["no process was old enough to be looked at"]
        for kind, samples in self.samples.items():
            third = len(samples) // 3
            if third < THIRD_MIN:
                found.append(f"{kind} was looked at {len(samples)} times only: whether it grew is not known")
                continue
            first, last = samples[:third], samples[-third:]
            for what, least in (("rss", RSS_GROWTH_MIN), ("fds", FDS_GROWTH_MIN)):
                before = median(getattr(sample, what) for sample in first)
                after = median(getattr(sample, what) for sample in last)
                if after > before * GROWTH_MAX and after > before + least:
                    found.append(f"{what} of {kind} grew from {before:,.0f} to {after:,.0f}")
        return found

    def figures(self) -> dict[str, Any]:
        """By kind: medians of the thirds of the run, and the largest."""
        return {
            kind: {
                "rss_mib_thirds": [
                    round(median(s.rss for s in third) / 2**20, 1) for third in _thirds(samples)
                ],
                "rss_mib_max": round(max(s.rss for s in samples) / 2**20, 1),
                "fds_max": max(s.fds for s in samples),
                "threads_max": max(s.threads for s in samples),
            }
            for kind, samples in sorted(self.samples.items())
        }


def _thirds(samples: list[Sample]) -> list[list[Sample]]:
    third = max(1, len(samples) // 3)
    return [some for some in (samples[:third], samples[third : 2 * third], samples[2 * third :]) if some]


def _sample(pid: int, at_s: float) -> Sample:
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]).split()
    return Sample(
        at_s=at_s,
        rss=_anonymous_bytes(pid),
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(fields[17]),
    )


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} has ended")


def kind_of(pid: int) -> str:
    words = command_of(pid)
    if words and words[0].endswith("nats-server"):
        return "nats-server"
    if FORK_SERVER in words[2:3]:
        return "fork-server"
    return next((word for word in words[2:4] if word and not word.startswith(("-", "halfmoon."))), "?")
