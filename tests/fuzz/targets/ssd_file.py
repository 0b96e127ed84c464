"""Files of the SSD tier, cut, changed and made up: taken up or begun anew, never an error. What a record is said to
hold can be read (its checksum tells whether it is right), and the file can be written again.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from halfmoon.schemas.policy import Layout
from halfmoon.store.pool.segment import SHM
from halfmoon.store.tiers.base import Entry
from halfmoon.store.tiers.ssd_file import _ENTRY, ENTRY_BYTES, PAGE_BYTES, SsdFile
from tests.fuzz.frame import Found, Play

TEST_INPUTS = 300
INPUTS_MEANT = 800_000
LAYOUT = Layout(
    model="m", model_fingerprint="f", layers=2, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32"
)
RECORDS = 6
FILE_BYTES = 2 * PAGE_BYTES + RECORDS * (PAGE_BYTES + ENTRY_BYTES)
NUMBERS = (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)

#: Places and what is written there, into a good file; then its length (-1: as it is).
Changes = tuple[list[tuple[int, bytes]], int]
_changes = msgspec.msgpack.Decoder(Changes)


def make(draw: random.Random) -> bytes:
    changes = []
    for _ in range(draw.choice((0, 1, 1, 2, 4, 8))):
        record = draw.randrange(RECORDS)
        match draw.randrange(6):
            case 0:
                changes.append((draw.randrange(PAGE_BYTES), draw.randbytes(draw.choice((1, 8, 64)))))
            case 1:
                place = PAGE_BYTES + record * ENTRY_BYTES + draw.randrange(ENTRY_BYTES)
                changes.append((place, draw.randbytes(draw.choice((1, 8, 64)))))
            case 2:
                changes.append((2 * PAGE_BYTES + draw.randrange(RECORDS * PAGE_BYTES), draw.randbytes(9)))
            case _:  # with a checksum that is right
                key = bytes([draw.randrange(4)]) * 16
                raw = _ENTRY.pack(
                    key, draw.choice(NUMBERS), draw.choice(NUMBERS), draw.choice(NUMBERS), bytes(16)
                )
                changes.append((PAGE_BYTES + record * ENTRY_BYTES, raw + xxhash.xxh3_64_digest(raw)))
    length = draw.choice((-1, -1, -1, 0, 1, PAGE_BYTES, 5000, FILE_BYTES + 1, draw.randrange(FILE_BYTES)))
    return msgspec.msgpack.encode((changes, length))


class Disk:
    """A good file with three blocks, and a copy of it for each input."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tier"
        file, _ = SsdFile.open(self.path, LAYOUT, FILE_BYTES)
        self._write(file, 0, 3)
        file.close()
        self.good = self.path.read_bytes()

    def _write(self, file: SsdFile, first: int, count: int) -> None:
        for record in range(first, first + count):
            block = np.full((LAYOUT.layers, LAYOUT.layer_block_bytes), record, np.uint8)
            file.write(record, [block])
            file.set_entry(record, Entry(bytes([record]) * 16, record))
        file.write_table()

    def play(self, content: bytes) -> str:
        changes, length = _changes.decode(content)
        raw = bytearray(self.good)
        for place, what in changes:
            raw[place : place + len(what)] = what
        self.path.write_bytes(raw if length < 0 else raw[:length].ljust(length, b"\0"))
        file, entries = SsdFile.open(self.path, LAYOUT, FILE_BYTES)
        try:
            if not all(0 <= record < RECORDS for record in entries):
                raise Found(f"records {sorted(entries)} of {RECORDS}")
            if len({entry.key for entry in entries.values()}) != len(entries):
                raise Found(f"one key in two records: {entries}")
            block = np.empty((LAYOUT.layers, LAYOUT.layer_block_bytes), np.uint8)
            for record in entries:
                file.read(record, 0, [block])
                entry = entries[record]
                file.set_entry(record, Entry(entry.key, entry.checksum, entry.hits + 1, entry.tenant))
            self._write(file, 2, 4)
        finally:
            file.close()
        file, written = SsdFile.open(self.path, LAYOUT, FILE_BYTES)
        file.close()
        if not {2, 3, 4, 5} <= set(written):
            raise Found(f"written and not found again: {sorted(written)}")
        return f"{len(entries)} blocks"


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    # In memory: a busy disk would make a sync take minutes, which says nothing of an input.
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        yield Disk(Path(directory)).play
