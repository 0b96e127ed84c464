"""Options of the SSD tier."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.schemas.policy import Layout
from halfmoon.store.pool.eviction import EvictionName


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdOptions:
    """Which file, and how it is filled. The fields are those of `StoreConfig`."""

    node_id: str
    layout: Layout
    #: Slots of the pool in front of the tier.
    slots: int
    path: str
    file_bytes: int
    eviction: EvictionName
    #: Blocks go to the file once they were hit this many times; 0: all.
    hits_min: int
    #: This share of the pool's slots, in percent, is kept free or saved ahead of its eviction.
    ahead_percent: int
    #: Time limit for saving blocks at an orderly end.
    stop_s: float
    threads: int
