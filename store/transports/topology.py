"""NUMA distances of this node's NICs from its memory, read from sysfs, overridable by a file.

A distance is as the kernel gives it: 10 on the same NUMA node, more between nodes. The agent announces the
distance of each of its endpoints (`Endpoint.distance`), so that the calling side can choose among them.

The file is TOML, and its values count instead of sysfs's::

    memory_node = 0
    [nics.eth0]
    numa_node = 1
    [distances]
    "0-1" = 21
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfmoon.store.transports.base import NEAR

SYSFS = Path("/sys")
_PAIR = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


class TopologyInvalid(ValueError):
    """The file cannot be used; names the field."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """NUMA nodes of the pool's memory and of the NICs by name; distances between NUMA nodes."""

    memory_node: int = 0
    nics: dict[str, int] = field(default_factory=dict)
    distances: dict[tuple[int, int], int] = field(default_factory=dict)

    def distance(self, nic: str) -> int:
        """The distance of a NIC ("": unknown) from the pool's memory; NEAR when nothing is known of either."""
        node = self.nics.get(nic, -1)
        if node < 0 or node == self.memory_node:
            return NEAR
        return self.distances.get((self.memory_node, node), 2 * NEAR)

    def distance_of_address(self, host: str) -> int:
        """The distance of the NIC that bears this address."""
        return self.distance(nic_of(host))


def read_topology(override: str = "", *, sysfs: Path = SYSFS) -> Topology:
    """This machine's topology, with the values in the file `override`. Raises TopologyInvalid."""
    nics = {}
    for folder in ("net", "infiniband"):
        for nic in sorted((sysfs / "class" / folder).glob("*")):
            nics[nic.name] = _number(nic / "device" / "numa_node", -1)
    distances = {}
    nodes = sorted((sysfs / "devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    for node in nodes:
        row = (node / "distance").read_text().split() if (node / "distance").exists() else []
        for other, distance in zip(nodes, row, strict=False):
            distances[int(node.name[4:]), int(other.name[4:])] = int(distance)
    if not override:
        return Topology(nics=nics, distances=distances)
    try:
        given = tomllib.loads(Path(override).read_text())
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as problem:
        # ValueError: of TOML, bytes, digits.
        raise TopologyInvalid(f"{override}: {problem}") from None
    memory_node = _checked(given.pop("memory_node", 0), f"{override}: memory_node")
    for name, nic in _table(given, "nics", override).items():
        nics[name] = _checked(
            nic.get("numa_node") if isinstance(nic, dict) else None, f"{override}: nics.{name}"
        )
    for pair, distance in _table(given, "distances", override).items():
        if (named := _PAIR.fullmatch(pair)) is None:
            raise TopologyInvalid(f"{override}: distances.{pair}: must be named like 0-1")
        distances[int(named[1]), int(named[2])] = _checked(distance, f"{override}: distances.{pair}")
    if given:
        raise TopologyInvalid(f"{override}: {next(iter(given))}: unknown field")
    return Topology(memory_node=memory_node, nics=nics, distances=distances)


def nic_of(host: str) -> str:
    """Name of the NIC that bears an IPv4 address, "" when none does (all of them, or another machine's)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return ""


def _number(path: Path, otherwise: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return otherwise


def _table(given: dict[str, Any], name: str, override: str) -> dict[str, Any]:
    table = given.pop(name, {})
    if not isinstance(table, dict):
        raise TopologyInvalid(f"{override}: {name}: must be a table")
    return table


def _checked(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TopologyInvalid(f"{name}: must be a number that is not negative")
    return value
