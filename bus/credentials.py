"""Credentials of processes on NATS, as files: the seed of an nkey, which its owner alone may read.

A server's configuration holds public keys only (`halfmoon.bus.permissions`): its readers gain no identity by it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import nkeys

from halfmoon.bus.permissions import Identity

#: Of a directory and of a file that hold secrets.
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


class CredentialsBroken(ValueError):
    """A file that should hold the seed of an nkey holds something else."""


def private_directory(path: Path) -> None:
    """Made where it is missing, and closed to everybody else where it was open."""
    path.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    path.chmod(DIRECTORY_MODE)


def write_private(path: Path, content: bytes) -> None:
    """Whole or not at all; for its owner only."""
    fresh = path.with_name(f".{path.name}")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=FILE_MODE)
    fresh.write_bytes(content)
    os.replace(fresh, path)


def key_file(directory: Path, name: str) -> Path:
    """Where the key of the process `name` is."""
    return directory / f"{name}.nk"


def make_key(file: Path) -> None:
    """A key that nobody had before."""
    write_private(file, nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))


def public_key(file: Path) -> str:
    """The half that a server knows of the key in `file` (`U…`). Raises CredentialsBroken, OSError."""
    try:
        pair = nkeys.from_seed(bytearray(file.read_bytes().strip()))
    except (nkeys.NkeysError, ValueError) as problem:  # ValueError: a seed of another length
        raise CredentialsBroken(f"{file}: {problem}") from None
    return bytes(pair.public_key).decode()


def make_all(directory: Path, identities: Iterable[Identity]) -> list[Identity]:
    """A fresh key in `directory` for each of them, in place of all that was there; they come back with it."""
    private_directory(directory)
    for old in directory.glob("*.nk"):
        old.unlink()
    made = []
    for identity in identities:
        file = key_file(directory, identity.name)
        make_key(file)
        made.append(replace(identity, public_key=public_key(file)))
    return made
