"""The short way to the earliest first token finds what looking at every worker finds."""

from __future__ import annotations

from random_clusters import Cluster

from halfmoon.conductor.machine import Core
from halfmoon.conductor.placement import EARLIEST_POLICIES, candidates, earliest, match
from halfmoon.conductor.policy import choose_prefill
from halfmoon.schemas.events import RequestArrived


def compared(seed: int) -> int:
    """How many arrivals of a random cluster's log were looked at both ways."""
    cluster = Cluster(7_000 + seed, checked=False)
    cluster.run(chaos_s=30, calm_s=0)
    core, count = Core(), 0
    for stamped in cluster.log:
        state, event = core.state, stamped.event
        if isinstance(event, RequestArrived) and state.policy.name in EARLIEST_POLICIES:
            now_ns = max(state.at_ns, stamped.at_ns)
            matched = match(state, event, now_ns)
            every = candidates(state, event, matched, now_ns)
            short = earliest(state, event, matched, now_ns)
            assert short.best == choose_prefill(state, [c for c in every if not c.full], "")
            assert (short.found, short.full) == (len(every), sum(c.full for c in every))
            if short.full:
                assert short.place_free_ns == min(c.queue_ns // c.orders for c in every if c.full)
            count += len(every) > 1
        core.step(stamped)
    return count


def test_earliest_is_what_the_policy_takes_of_all() -> None:
    assert sum(compared(seed) for seed in range(20)) > 500
