"""Chooses RDMA device, port, GID and MTU from sysfs alone, so that the reason can be named when there is none.

`auto` takes the first active port in the order of names. Of a RoCE port's GIDs one of RoCE v2 is taken, an IPv4 one
before an IPv6 one before a link-local one; of an InfiniBand port, GID 0. The MTU is the largest that the
port's network interface can carry, as the kernel counts it; a queue pair takes the smaller one of its two
ends.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from halfmoon.store.transports.base import TransportAbsent

SYSFS = Path("/sys")
#: The path MTUs of InfiniBand, bytes.
MTUS = (256, 512, 1024, 2048, 4096)
#: Bytes that the kernel keeps free for headers of RoCE within an Ethernet frame's payload.
ROCE_HEADERS = 96
#: Entries of the table of GIDs that are read: it may be long, and is filled from its beginning.
GIDS_MAX = 256


class RdmaAbsent(TransportAbsent):
    """There is no RDMA here, or not the one asked for; one line for people."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port to use. `mtu` in bytes; `netdev` is "" and `lid` counts on InfiniBand."""

    device: str
    number: int
    ethernet: bool
    lid: int
    gid_index: int
    gid: str
    netdev: str
    mtu: int

    def __str__(self) -> str:
        return f"{self.device}:{self.number}:{self.gid_index} {self.gid} mtu {self.mtu}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """`auto`, `DEVICE`, `DEVICE:PORT` or `DEVICE:PORT:GID`; None: any."""

    device: str | None = None
    port: int | None = None
    gid_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Raises ValueError."""
        if text == "auto":
            return cls()
        device, *numbers = text.split(":")
        if not device or len(numbers) > 2 or not all(number.isdigit() for number in numbers):
            raise ValueError(f"rdma: {text!r} is none of auto, off, DEVICE, DEVICE:PORT, DEVICE:PORT:GID")
        port, gid_index = [*map(int, numbers), None, None][:2]
        return cls(device, port, gid_index)


def choose(wanted: Wanted, sysfs: Path = SYSFS) -> Port:
    """The port to use. Raises RdmaAbsent, with the ports that there are."""
    root = sysfs / "class/infiniband"
    devices = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not devices:
        raise RdmaAbsent(f"no RDMA device in {root}")
    if wanted.device is not None and wanted.device not in devices:
        raise RdmaAbsent(f"no RDMA device {wanted.device}; there is {', '.join(devices)}")
    reasons = []
    for device in devices if wanted.device is None else [wanted.device]:
        ports = sorted(int(path.name) for path in (root / device / "ports").glob("[0-9]*"))
        if wanted.port is not None and wanted.port not in ports:
            raise RdmaAbsent(
                f"{device} has no port {wanted.port}; it has {', '.join(map(str, ports)) or 'none'}"
            )
        for number in ports if wanted.port is None else [wanted.port]:
            try:
                return _port(device, number, wanted.gid_index, sysfs)
            except RdmaAbsent as problem:
                reasons.append(str(problem))
    raise RdmaAbsent("; ".join(reasons) or f"no port in {', '.join(devices)}")


def why_down(device: str, number: int, sysfs: Path = SYSFS) -> str:
    """ "" for an active port, otherwise its state."""
    state = _read(sysfs / "class/infiniband" / device / "ports" / str(number) / "state")
    if state == "4: ACTIVE":
        return ""
    return f"port {number} of {device} is {state.partition(': ')[2] or 'gone'}"


def _port(device: str, number: int, gid_index: int | None, sysfs: Path) -> Port:
    path = sysfs / "class/infiniband" / device / "ports" / str(number)
    if why := why_down(device, number, sysfs):
        raise RdmaAbsent(why)
    ethernet = _read(path / "link_layer") == "Ethernet"
    index, gid = _gid(path, f"port {number} of {device}", gid_index, ethernet)
    netdev = _read(path / "gid_attrs/ndevs" / str(index)) if ethernet else ""
    mtu = MTUS[-1]
    # An interface of another network namespace is not seen: opening the device decides.
    if netdev and (said := _read(sysfs / "class/net" / netdev / "mtu")):
        frame = int(said)
        mtu = max((size for size in MTUS if size + ROCE_HEADERS <= frame), default=0)
        if not mtu:
            raise RdmaAbsent(
                f"port {number} of {device}: an MTU of {frame} on {netdev} is too small for RDMA"
            )
    lid = int(_read(path / "lid") or "0", 16)
    return Port(device, number, ethernet, lid, index, gid, netdev, mtu)


def _gid(path: Path, name: str, wanted: int | None, ethernet: bool) -> tuple[int, str]:
    """Index and GID. Raises RdmaAbsent."""
    if wanted is not None or not ethernet:
        gid = _read(path / "gids" / str(wanted or 0))
        if _empty(gid):
            raise RdmaAbsent(f"{name} has no GID {wanted or 0}")
        kind = _read(path / "gid_attrs/types" / str(wanted or 0))
        if ethernet and kind != "RoCE v2":
            raise RdmaAbsent(f"GID {wanted} of {name} is {kind or 'of no kind'}, RoCE v2 is needed")
        return wanted or 0, gid
    found = []
    for index in sorted(int(entry.name) for entry in (path / "gids").iterdir())[:GIDS_MAX]:
        gid = _read(path / "gids" / str(index))
        if not _empty(gid) and _read(path / "gid_attrs/types" / str(index)) == "RoCE v2":
            address = ipaddress.IPv6Address(gid)
            found.append((2 if address.is_link_local else int(address.ipv4_mapped is None), index, gid))
    if not found:
        raise RdmaAbsent(f"{name} has no GID of RoCE v2: has its network interface an address?")
    _, index, gid = min(found)
    return index, gid


def _empty(gid: str) -> bool:
    return not gid.replace(":", "").strip("0")


def _read(path: Path) -> str:
    """ "" for an attribute that cannot be read: the kernel answers EINVAL for an empty GID."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
