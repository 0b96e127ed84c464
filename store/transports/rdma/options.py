"""Options of the RDMA transport."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.schemas.numbers import SECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaOptions:
    """Which device to use, and for how long to wait. The fields are those of `StoreConfig`."""

    node_id: str
    cluster_secret: str
    #: "auto", "off", or DEVICE, DEVICE:PORT, DEVICE:PORT:GID.
    device: str = "auto"
    #: A peer from which nothing comes for this long is unreachable.
    stall_ns_max: int = 3 * SECOND_NS
