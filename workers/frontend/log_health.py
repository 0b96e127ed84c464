"""Whether the event log takes what a request needs stored, and its disk has room for more.

A server that accepts and does not store (its disk is full, its stream is gone) answers nothing at all. What it was
told is sent again until it is stored, so requests that were accepted only wait; new ones are better off elsewhere.
"""

from __future__ import annotations

import math
import shutil
import time

from halfmoon.bus.connection import Bus
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.workers.frontend.config import FrontendConfig

#: The disk is looked at no more often: a look for each request would cost a system call, and its space is watched
#: far ahead of need.
DISK_LOOK_S = 0.1


class LogHealth:
    """`refusal` is asked for each new request: it looks at a clock and at the disk, and waits for nobody."""

    def __init__(self, bus: Bus, config: FrontendConfig) -> None:
        self._bus = bus
        self._config = config
        self._free_bytes: int | None = None
        self._looked_s = -math.inf

    @property
    def free_bytes(self) -> int | None:
        """Free where the log is; None: not known, or not to be seen from here."""
        if not self._config.log_directory:
            return None
        now_s = time.monotonic()
        if now_s - self._looked_s >= DISK_LOOK_S:
            self._looked_s = now_s
            try:
                self._free_bytes = shutil.disk_usage(self._config.log_directory).free
            except OSError:
                self._free_bytes = None
        return self._free_bytes

    def refusal(self) -> ApiError | None:
        """503, and the reason; None when all is well."""
        unstored_s = self._bus.unstored_s
        if unstored_s * SECOND_NS > self._config.unstored_ns_max:
            message = f"the event log has stored nothing for {unstored_s:.0f} s"
            return ApiError(503, message, code="log_not_stored", retry_after_ns=SECOND_NS)
        free_bytes = self.free_bytes
        if free_bytes is not None and free_bytes < self._config.log_free_mib_min << 20:
            message = f"the disk of the event log has {free_bytes >> 20} MiB left"
            return ApiError(503, message, code="log_disk_full", retry_after_ns=SECOND_NS)
        return None
