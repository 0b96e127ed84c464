"""Units of time as factors: durations are integers of nanoseconds."""

from __future__ import annotations

MS_NS = 1_000_000
SECOND_NS = 1_000_000_000
