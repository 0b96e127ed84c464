"""The time of the log: the clock of the server that stamps its events, without the steps of that clock.

An operator, a clock daemon or a virtual machine that wakes up sets a clock by hours, and a leader elsewhere has another
clock. Timers, heartbeats and predictions measure how long something lasts; so a step counts as no time at all.
"""

from __future__ import annotations

from halfmoon.conductor.core.state.core_state import Members


def log_time_ns(state: Members, stamped_ns: int) -> int:
    """The time of the log at an event that the server stamped so; the state notes the step, if there is one."""
    at_ns = state.log_ns(stamped_ns)
    limit_ns = state.policy.clock_step_ns_max
    if not limit_ns or state.seq == 0:
        return at_ns
    gap_ns = at_ns - state.at_ns
    # Servers of one cluster differ by milliseconds, and events of several publishers are stamped out of order.
    if -state.policy.heartbeat_ns <= gap_ns <= limit_ns:
        return at_ns
    state.clock_lead_ns -= gap_ns
    return state.at_ns
