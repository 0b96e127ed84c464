"""The stall meter: for how long the machine stood still while a test ran.

A thread ticks every TICK_S and keeps the largest gap between two ticks. Beside it stands the time that the hypervisor
gave to other machines ("steal" of /proc/stat). tests/reruns.py asks both where a test was late.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep  # by name: a test may put another clock in their place

TICK_S = 0.01
#: A gap from here on is a stall: a worker gives a sign of life each second (`Policy.heartbeat_ns`), so a shorter one
#: lets it miss none. Neighbours that compute are no stall: twelve busy processes on two cores made gaps of 0.08 s at
#: most in four minutes, and a wait's bound has room for them.
STALL_S = 1.0
#: So much of the machine's time that was stolen is a stall, too, in thousandths: it ran at half its speed or less.
STOLEN_PERMILLE = 500


@dataclass(frozen=True)
class Stall:
    """Of a span of time: its largest gap in s, and the share of the machine's time that was stolen, in thousandths."""

    gap_s: float = 0.0
    stolen_permille: int = 0

    def __bool__(self) -> bool:
        return self.gap_s >= STALL_S or self.stolen_permille >= STOLEN_PERMILLE

    def __str__(self) -> str:
        return f"largest stall {self.gap_s:.2f} s, {self.stolen_permille / 10:.1f} % stolen"


class StallMeter:
    """One for a process. `begin` starts a span, `so_far` reads it; the thread starts with the first span."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        #: A tick that a new span interrupts would leave the gap of the span before in it.
        self._lock = threading.Lock()
        self._last_s = 0.0
        self._gap_s = 0.0
        self._times = (0, 0)

    def begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._tick_always, name="stall meter", daemon=True)
            self._thread.start()
        with self._lock:
            self._last_s, self._gap_s = monotonic(), 0.0
        self._times = cpu_times(_proc_stat())

    def tick(self, now_s: float) -> None:
        with self._lock:
            self._gap_s = max(self._gap_s, now_s - self._last_s)
            self._last_s = now_s

    def so_far(self) -> Stall:
        # The thread may not have run again after the gap that the caller has just left.
        gap_s = max(self._gap_s, monotonic() - self._last_s)
        all_of_it, stolen = (
            now - then for now, then in zip(cpu_times(_proc_stat()), self._times, strict=True)
        )
        return Stall(gap_s, stolen * 1_000 // all_of_it if all_of_it > 0 else 0)

    def _tick_always(self) -> None:
        while True:
            sleep(TICK_S)
            self.tick(monotonic())


def cpu_times(text: str) -> tuple[int, int]:
    """All time of all cores and what was stolen of it, from the text of /proc/stat; zeros where it does not say."""
    words = text.partition("\n")[0].split()
    # user, nice, system, idle, iowait, irq, softirq, steal; guests' time, which follows, is in the first two already.
    times = [int(word) for word in words[1:9]] if words[:1] == ["cpu"] else []
    return (sum(times), times[7]) if len(times) == 8 else (0, 0)


def _proc_stat() -> str:
    try:
        return Path("/proc/stat").read_text()
    except OSError:
        return ""


METER = StallMeter()
