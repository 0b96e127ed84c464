"""A bound on the lines that a process writes to its log, however they are provoked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RateLimit(logging.Filter):
    """Lets `burst` lines through at once and then one each `every_s`; the next line has the number left out."""

    def __init__(self, *, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._burst = burst
        self._every_s = every_s
        self._allowed = float(burst)
        self._at_s = clock()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        self._allowed = min(self._burst, self._allowed + (now_s - self._at_s) / self._every_s)
        self._at_s = now_s
        if self._allowed < 1:
            self._left_out += 1
            return False
        self._allowed -= 1
        if self._left_out:
            record.msg, record.args = f"{record.getMessage()} ({self._left_out} lines before it left out)", ()
            self._left_out = 0
        return True
