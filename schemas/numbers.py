"""Times: durations are integers of nanoseconds. Units as factors, and the measure of a request's time between tokens
(TBT) that an SLO is held against.
"""

from __future__ import annotations

from collections.abc import Sequence

MS_NS = 1_000_000
SECOND_NS = 1_000_000_000
#: TBT is the mean over this share of a request's token intervals, the longest ones. A mean over all would hide a stall;
#: the maximum is noise.
TBT_WORST_PERCENT = 10


def tbt_ns(intervals_ns: Sequence[int]) -> int:
    """Mean of the longest 10 % of token intervals (at least one); 0 when there are none."""
    worst = sorted(intervals_ns, reverse=True)[: max(1, len(intervals_ns) * TBT_WORST_PERCENT // 100)]
    return sum(worst) // len(worst) if worst else 0
