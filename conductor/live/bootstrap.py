"""Bootstrap of a conductor: from the newest usable snapshot, else from the event that began the log.

Where neither is left, a conductor that is alone appends another `ClusterConfigured`, and the processes announce
themselves again.
"""

from __future__ import annotations

import logging

from halfmoon.bus.connection import Bus
from halfmoon.bus.errors import PeerUnreachable
from halfmoon.conductor.code_version import LOG_VERSION, code_version
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.log_reading import LogUnreadable, log_start_seq, usable_snapshot
from halfmoon.conductor.view.asking import caught_up_status
from halfmoon.schemas import subjects
from halfmoon.schemas.events import ClusterConfigured
from halfmoon.schemas.policy import Policy

log = logging.getLogger(__name__)

#: How long a running conductor has to say that it is there.
OTHERS_S = 1.0
#: For the event that begins a log: a server that does not store it in this time is not worth waiting for.
BEGIN_S = 30.0


async def bootstrap_core(
    bus: Bus, conductor_id: str, policy: Policy, *, checked: bool = False
) -> tuple[Core, int]:
    """A core, and the sequence after which it reads on. Appends the event that begins a log where there is none.

    Raises LogUnreadable, BusError.
    """
    while True:
        core = await usable_snapshot(bus, checked=checked)
        if core is not None:
            return core, core.seq
        started_seq = await log_start_seq(bus)
        if started_seq:
            return Core(checked=checked), started_seq - 1
        first, _ = await bus.held(subjects.EVENTS_STREAM)
        if first > 1 and await _others(bus):
            raise LogUnreadable(
                f"the log before event {first} is gone, and other conductors have saved no snapshot"
            )
        if first > 1:
            log.warning(
                "the log before event %d is gone, and there is no snapshot: what it said is forgotten", first
            )
        event = ClusterConfigured(code_version=code_version(), log_version=LOG_VERSION, policy=policy)
        # The message id lets only one of several conductors append it.
        message_id = f"begin-{first}"
        await bus.append(event, source_id=conductor_id, message_id=message_id, within_s=BEGIN_S)


async def _others(bus: Bus) -> bool:
    """True when a conductor that has read the log answers."""
    try:
        return (await caught_up_status(bus, answer_s=OTHERS_S, reading_s=OTHERS_S)).caught_up
    except PeerUnreachable:
        return False
