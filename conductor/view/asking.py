"""The status of a conductor that has read the log, whichever it is."""

from __future__ import annotations

import asyncio
import time

from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.status import ConductorStatus, StatusRequest

_EVERY_S = 0.02


async def caught_up_status(bus: Bus, *, answer_s: float, reading_s: float) -> ConductorStatus:
    """Asks until one answers that has read the log. Before that a conductor knows neither policy nor members, and may
    be the first to answer all the same. After `reading_s` seconds its answer is the result.

    Raises PeerUnreachable where none answers within `answer_s` seconds.
    """
    deadline = time.monotonic() + reading_s
    while True:
        status = await bus.request(
            subjects.status(subjects.CONDUCTORS), StatusRequest(), ConductorStatus, timeout_s=answer_s
        )
        if status.caught_up or time.monotonic() > deadline:
            return status
        await asyncio.sleep(_EVERY_S)
