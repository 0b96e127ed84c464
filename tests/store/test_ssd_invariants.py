"""Each invariant of an SSD tier, and a change of a real one that it refuses. The numbers are those of
`docs/invariants.md`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from store_harness import Cluster
from test_ssd import KEYS, put_through, start, tell, tier

from halfmoon.store.tiers.ssd import SsdTier


def free_twice(tier: SsdTier) -> None:
    tier._free.append(tier._free[0])


def free_and_in_use(tier: SsdTier) -> None:
    tier._free.append(tier._records[KEYS[0]])


def found_at_another_record(tier: SsdTier) -> None:
    tier._records[KEYS[0]] = tier._records[KEYS[1]]


def key_of_no_record(tier: SsdTier) -> None:
    tier._records[KEYS[150]] = tier._records[KEYS[0]]


def evicted_while_it_is_read(tier: SsdTier) -> None:
    tier._readers[tier._records[KEYS[0]]] += 1


def record_of_nobody(tier: SsdTier) -> None:
    tier._free.pop()


PLANTED: list[tuple[str, Callable[[SsdTier], None]]] = [
    ("I111", free_twice),
    ("I111", free_and_in_use),
    ("I112", found_at_another_record),
    ("I112", key_of_no_record),
    ("I113", evicted_while_it_is_read),
    ("I114", record_of_nobody),
]


@pytest.mark.pure
def test_a_tier_that_was_changed_is_refused_by_number(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier")
        await put_through(agent, client, range(4))
        found = tier(agent)
        for number, change in PLANTED:
            found.check()
            before = copy.copy(found._free), copy.copy(found._records), copy.copy(found._readers)
            change(found)
            with pytest.raises(AssertionError, match=re.escape(number) + " "):
                found.check()
            found._free, found._records, found._readers = before
        found.check()

    tell(nats_url, story)
