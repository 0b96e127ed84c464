"""Segments lie in /dev/shm, where every user of the machine may put something under any name."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.store.pool.segment import (
    SHM,
    Geometry,
    PoolView,
    Segment,
    SegmentError,
    remove_stale,
    segment_name,
)
from tests.guardian import cluster_name

SMALL = Geometry(slots=2, layers=2, layer_block_bytes=4096)
NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the segment of a node that nobody else names would be."""
    path = SHM / segment_name(cluster_name(), "node")
    yield path
    path.unlink(missing_ok=True)


def test_a_segment_is_for_its_owner_only(place: Path) -> None:
    before = os.umask(0)
    try:
        segment = Segment.create(place.name, SMALL)
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    segment.close()
    assert not place.exists()


@pytest.mark.parametrize("what", ["link", "pipe", "file"])
def test_what_another_put_in_its_place_is_neither_written_nor_believed(
    place: Path, tmp_path: Path, what: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(SMALL.file_bytes))
    if what == "link":
        place.symlink_to(victim)
    elif what == "pipe":
        os.mkfifo(place)
    elif os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    else:
        place.write_bytes(victim.read_bytes())
        place.chmod(0o666)
        os.chown(place, NOBODY, NOBODY)
    with pytest.raises(SegmentError, match=f"{place.name}"):
        Segment.create(place.name, SMALL)
    with pytest.raises(SegmentError, match=f"{place.name}"):
        PoolView.attach(place.name, SMALL)
    cluster = place.name.removeprefix("halfmoon-").removesuffix("-node")
    assert remove_stale(cluster) == []
    assert place.lstat()
    assert victim.read_bytes() == bytes(SMALL.file_bytes)
