"""Opens the tier that an agent is configured with."""

from __future__ import annotations

import sys

from halfmoon.store.agent.context import AgentContext
from halfmoon.store.tiers.base import Tier
from halfmoon.store.tiers.ssd import SsdTier


def open_tier(context: AgentContext) -> Tier | None:
    """None: this agent has the pool's memory alone."""
    options = context.config.ssd_options
    if options is None:
        return None

    def lost(why: str) -> None:
        print(
            f"store agent {options.node_id}: the SSD tier is out of use: {why}", file=sys.stderr, flush=True
        )
        context.announcer.tier_lost(SsdTier.name, why)

    return SsdTier(
        options,
        context.guard,
        view=lambda: context.view,
        announce=context.announcer.add,
        counters=context.counters,
        lost=lost,
    )
