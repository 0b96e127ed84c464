"""Which device, port, GID and MTU is taken, on made-up trees of /sys; and that absence is said, with the
reason.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from store_harness import SECRET, layout
from transport_harness import Side

from halfmoon.store.config import StoreConfig
from halfmoon.store.transports.base import ServedPool
from halfmoon.store.transports.rdma import transport as rdma
from halfmoon.store.transports.rdma import verbs as rdma_verbs
from halfmoon.store.transports.rdma.device import Port, RdmaAbsent, Wanted, choose, why_down

V1, V2 = "IB/RoCE v1", "RoCE v2"
LOCAL = "fe80:0000:0000:0000:f0d0:e3ff:fefa:dc31"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0007"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
Gid = tuple[str, str]


def add_port(
    sysfs: Path,
    device: str,
    number: int = 1,
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    lid: str = "0x0",
    gids: tuple[Gid, ...] = ((LOCAL, V1), (LOCAL, V2), (IPV4, V1), (IPV4, V2), (EMPTY, "")),
    mtu: int = 9000,
) -> None:
    port = sysfs / "class/infiniband" / device / "ports" / str(number)
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for name, text in (("state", state), ("link_layer", link_layer), ("lid", lid)):
        (port / name).write_text(f"{text}\n")
    for index, (gid, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        if kind:  # the kernel refuses to say it of an empty GID
            (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
            (port / "gid_attrs/ndevs" / str(index)).write_text(f"net-{device}\n")
    (sysfs / "class/net" / f"net-{device}").mkdir(parents=True, exist_ok=True)
    (sysfs / "class/net" / f"net-{device}" / "mtu").write_text(f"{mtu}\n")


def taken(sysfs: Path, wanted: str = "auto") -> Port:
    return choose(Wanted.parse(wanted), sysfs)


def refused(sysfs: Path, wanted: str = "auto") -> str:
    with pytest.raises(RdmaAbsent) as problem:
        taken(sysfs, wanted)
    return str(problem.value)


def test_ipv4_of_roce_v2_is_taken_before_ipv6_before_link_local(tmp_path: Path) -> None:
    add_port(tmp_path, "a", gids=((IPV6, V2), (IPV4, V1), (LOCAL, V2), (IPV4, V2)))
    assert taken(tmp_path) == Port("a", 1, True, 0, 3, IPV4, "net-a", 4096)
    add_port(tmp_path, "b", gids=((LOCAL, V2), (IPV6, V1), (IPV6, V2)))
    assert taken(tmp_path, "b").gid_index == 2
    add_port(tmp_path, "c", gids=((LOCAL, V1), (LOCAL, V2)))
    assert taken(tmp_path, "c").gid_index == 1


@pytest.mark.parametrize(
    ("frame", "mtu"),
    [(9000, 4096), (4192, 4096), (4191, 2048), (2144, 2048), (1500, 1024), (576, 256), (352, 256)],
)
def test_the_mtu_is_the_largest_that_fits_into_a_frame_with_its_headers(
    tmp_path: Path, frame: int, mtu: int
) -> None:
    add_port(tmp_path, "a", mtu=frame)
    assert taken(tmp_path).mtu == mtu


def test_a_frame_too_small_for_rdma(tmp_path: Path) -> None:
    add_port(tmp_path, "a", mtu=351)
    assert refused(tmp_path) == "port 1 of a: an MTU of 351 on net-a is too small for RDMA"


def test_an_interface_of_another_namespace_leaves_the_mtu_to_the_device(tmp_path: Path) -> None:
    add_port(tmp_path, "a")
    (tmp_path / "class/net/net-a/mtu").unlink()
    assert taken(tmp_path).mtu == 4096


def test_infiniband_has_gid_0_and_a_lid_and_no_interface(tmp_path: Path) -> None:
    add_port(tmp_path, "ib", link_layer="InfiniBand", lid="0x1f", gids=((LOCAL, ""),))
    assert taken(tmp_path) == Port("ib", 1, False, 31, 0, LOCAL, "", 4096)


def test_auto_passes_over_what_cannot_be_used(tmp_path: Path) -> None:
    add_port(tmp_path, "a", state="1: DOWN")
    add_port(tmp_path, "b", gids=((LOCAL, V1), (EMPTY, "")))
    add_port(tmp_path, "c", 1, state="2: INIT")
    add_port(tmp_path, "c", 2)
    assert (taken(tmp_path).device, taken(tmp_path).number) == ("c", 2)
    assert taken(tmp_path, "c:2:1").gid == LOCAL


def test_every_refusal_says_what_there_is_instead(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"no RDMA device in {tmp_path}/class/infiniband"
    add_port(tmp_path, "a", state="1: DOWN")
    add_port(tmp_path, "b", gids=((LOCAL, V1), (EMPTY, "")))
    assert refused(tmp_path, "x") == "no RDMA device x; there is a, b"
    assert refused(tmp_path, "a:7") == "a has no port 7; it has 1"
    assert refused(tmp_path, "a") == "port 1 of a is DOWN"
    assert refused(tmp_path, "b:1:0") == "GID 0 of port 1 of b is IB/RoCE v1, RoCE v2 is needed"
    assert refused(tmp_path, "b:1:1") == "port 1 of b has no GID 1"
    assert refused(tmp_path, "b:1:9") == "port 1 of b has no GID 9"
    no_gid = "port 1 of b has no GID of RoCE v2: has its network interface an address?"
    assert refused(tmp_path) == f"port 1 of a is DOWN; {no_gid}"
    assert why_down("gone", 1, tmp_path) == "port 1 of gone is gone"


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:1:2:3", "a:", "a:-1"])
def test_a_wish_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"rdma: .* is none of auto, off, DEVICE"):
        Wanted.parse(text)
    with pytest.raises(ValueError, match="rdma: "):
        StoreConfig(node_id="n", layout=layout(), cluster_secret=SECRET, rdma=text)


def make(config_rdma: str) -> rdma.RdmaTransport:
    """Never made here: nothing has a device."""
    side = Side("shm", "one", rdma=config_rdma)
    try:
        return rdma.RdmaTransport(
            ServedPool(view=side.view, access=side.guard, incarnation="i", counters=side.counters),
            side.config.rdma_options,
            side.executor,
            exchange=side.exchange,
        )
    finally:
        side.executor.shutdown()
        side.segment.close()


def test_absence_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rdma, "choose", lambda wanted: choose(wanted, tmp_path))
    with pytest.raises(RdmaAbsent, match="rdma is off"):
        make("off")
    with pytest.raises(RdmaAbsent, match="no RDMA device in"):
        make("auto")
    add_port(tmp_path, "a")
    real_import: Any = (
        __builtins__["__import__"] if isinstance(__builtins__, dict) else __builtins__.__import__
    )

    def without_pyverbs(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("pyverbs"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real_import(name, *rest, **named)

    monkeypatch.setattr("builtins.__import__", without_pyverbs)
    with pytest.raises(RdmaAbsent, match=r"pyverbs cannot be imported: libibverbs\.so\.1"):
        make("auto")


def test_nothing_of_pyverbs_is_imported_before_it_is_needed() -> None:
    assert rdma_verbs.Verbs
    assert "IN_GUEST" in os.environ or not [name for name in sys.modules if name.startswith("pyverbs")]
