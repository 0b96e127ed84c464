"""Replicas of a service take names of their own, as `halfmoon container` and `halfmoon secrets` have them."""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.cli import secrets
from halfmoon.cli.container import take_name
from halfmoon.cli.options import OptionInvalid

HOLD = """
import sys, time
from pathlib import Path
from halfmoon.cli.container import take_name
print(take_name("prefill", Path(sys.argv[1]), Path(sys.argv[2]))[0], flush=True)
time.sleep(60)
"""


def options(place: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    secrets.add(parser)
    return parser.parse_args([str(place), *more])


def test_a_replica_takes_the_first_free_name_also_of_one_that_was_killed(tmp_path: Path) -> None:
    keys, names = tmp_path / "keys", tmp_path / "names"
    keys.mkdir()
    names.mkdir()
    for number in range(3):
        (keys / f"prefill-{number}.nk").touch()
    words = [sys.executable, "-c", HOLD, str(names), str(keys)]
    first, second = (subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        assert first.stdout is not None
        assert second.stdout is not None
        assert {first.stdout.readline().strip(), second.stdout.readline().strip()} == {
            "prefill-0",
            "prefill-1",
        }
        name, lock = take_name("prefill", names, keys)
        assert name == "prefill-2"
        with pytest.raises(OptionInvalid, match="all 3 names are taken"):
            take_name("prefill", names, keys)
        first.kill()
        first.wait()
        again, other = take_name("prefill", names, keys)
        assert again in ("prefill-0", "prefill-1")
        os.close(lock)
        os.close(other)
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    with pytest.raises(OptionInvalid, match="there are none"):
        take_name("decode", names, keys)


def test_secrets_stay_as_they_are_and_are_for_their_owner_only(tmp_path: Path) -> None:
    place = tmp_path / "secrets"
    secrets.make(options(place, "--prefill", "1", "--decode", "1", "--servers", "nats-0"))
    first = {
        path.relative_to(place): path.read_bytes()
        for path in place.rglob("*")
        if path.suffix in (".nk", ".key")
    }
    made = {"prefill-0.nk", "store-prefill-0.nk", "operator.nk", "ca.key", "server.key"}
    assert {path.name for path in first} >= made
    secrets.make(options(place, "--prefill", "2", "--decode", "1", "--servers", "nats-0"))
    assert {path: (place / path).read_bytes() for path in first} == first
    assert (place / "prefill" / "prefill-1.nk").exists()
    for path in place.rglob("*"):
        if path.suffix in (".nk", ".key") or path.name == "secret":
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    server = "".join(path.read_text() for path in (place / "nats-0").iterdir() if path.suffix == ".conf")
    assert not [seed for seed in first.values() if seed.decode(errors="replace").strip() in server]
    assert not (place / "conductor" / "secret").exists(), "a conductor neither names nor moves blocks"


def test_a_seed_that_is_none_is_named(tmp_path: Path) -> None:
    place = tmp_path / "secrets"
    secrets.make(options(place, "--prefill", "1", "--decode", "1", "--servers", "nats-0"))
    (place / "client" / "client.nk").write_text("SUnothing")
    with pytest.raises(OptionInvalid, match=r"client\.nk"):
        secrets.make(options(place, "--servers", "nats-0"))
