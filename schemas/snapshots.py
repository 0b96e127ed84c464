"""A conductor's state, saved so that one that starts need not read the log from its start.

Kept in the SNAPSHOTS stream in parts, each on a subject of its own that names the place in the log and the digest, so
that conductors that save the same state write the same bytes to the same places. `SnapshotHead` is written last:
without it there is no snapshot.
"""

from __future__ import annotations

from halfmoon.schemas.types import Bytes, Count, Id, Message, Seq, Text


class SnapshotHead(Message, frozen=True):
    """All parts are there. `version` is of the state's form: a core restores its own only."""

    seq: Seq
    digest: Id
    version: Count
    code_version: Text
    size_bytes: Bytes
    parts: Count
