"""A policy as a plug-in: the prefill worker with the fewest orders, and of those the one that computes least."""

from __future__ import annotations

from halfmoon.conductor.core.placement.measures import ORDERS, Candidate, CandidateMeasure
from halfmoon.conductor.core.placement.policies import SHORTEST_STEP, Least, PolicyRules
from halfmoon.conductor.plugins import Plugin

TO_COMPUTE = CandidateMeasure[Candidate]("blocks to compute", lambda candidate: candidate.uncached_blocks)

POLICY = Plugin(
    name="fewest-orders",
    version="1",
    rules=PolicyRules(prefill=Least((ORDERS, TO_COMPUTE)), decode=SHORTEST_STEP, fetch="cheapest"),
)
