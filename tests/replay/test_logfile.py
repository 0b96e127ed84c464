"""The file: what is written comes back; what is damaged is refused, with the line."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zstandard
from recorded import HEADER, lines_of, saved

from halfmoon.conductor.replay.logfile import Line, LogFile, LogFileInvalid


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return lines_of(3, chaos_s=5, calm_s=0)


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.zst"])
def test_what_is_written_comes_back(tmp_path: Path, lines: list[Line], name: str) -> None:
    log = saved(tmp_path / name, lines)
    assert (log.header, list(log.lines())) == (HEADER, lines)
    assert list(log.lines()) == lines, "a second time"
    compressed = (tmp_path / name).read_bytes().startswith(zstandard.FRAME_HEADER)
    assert compressed == name.endswith(".zst")


def test_a_file_that_was_not_finished_has_no_name(tmp_path: Path, lines: list[Line]) -> None:
    def broken() -> Iterator[Line]:
        yield lines[0]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        saved(tmp_path / "log.jsonl.zst", broken())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.zst"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_noticed(
    tmp_path: Path, lines: list[Line], name: str, share: float
) -> None:
    saved(tmp_path / name, lines)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(LogFileInvalid):
        list(LogFile(tmp_path / name).lines())


def test_lines_that_are_missing_or_damaged_are_named(tmp_path: Path, lines: list[Line]) -> None:
    path = tmp_path / "log.jsonl"
    saved(path, lines)
    rows = path.read_bytes().splitlines(keepends=True)

    def complaint(rows: list[bytes]) -> str:
        path.write_bytes(b"".join(rows))
        with pytest.raises(LogFileInvalid) as caught:
            list(LogFile(path).lines())
        return str(caught.value).removeprefix(f"{path}: ")

    assert complaint(rows[:-1]) == f"cut off after line {len(rows) - 1}"
    assert complaint(rows[:10] + rows[11:]) == f"line {len(rows) - 1}: lines are missing or too many"
    assert complaint([*rows, rows[5]]) == f"line {len(rows)}: lines are missing or too many"
    assert complaint([*rows[:4], b"{}\n", *rows[5:]]).startswith(
        "line 5: Object missing required field `line`"
    )
    assert complaint([rows[0], *rows]) == "line 2: a second header"
    assert complaint(rows[1:]) == "not a saved log: its first line is no header"
    assert complaint([]).startswith("line 1: ")
    header = msgspec.structs.replace(HEADER, format=7, saved_by="8.0")
    assert "of format 7, saved by halfmoon 8.0; this one reads format 1" in complaint(
        [msgspec.json.encode(header) + b"\n", *rows[1:]]
    )


def test_hostile_lines_are_refused_in_one_line_of_text(
    tmp_path: Path, lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    saved(path, lines)
    header, *rest = path.read_bytes().splitlines(keepends=True)

    def complaint(row: bytes) -> str:
        path.write_bytes(b"".join([header, row, *rest]))
        with pytest.raises(LogFileInvalid) as caught:
            list(LogFile(path).lines())
        told = str(caught.value).removeprefix(f"{path}: line 2: ")
        assert "\n" not in told
        assert len(told) < 400
        return told

    assert "recursion" in complaint(b'{"line":"event","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    assert "Invalid value" in complaint(b'{"line":"a\\n' + b"b" * 1000 + b'"}\n')
    assert "`int` >= 1" in complaint(b'{"line":"invalid","seq":0,"at_ns":1}\n')
    assert "`int` <= " in complaint(b'{"line":"invalid","seq":1,"at_ns":9223372036854775807}\n')
    monkeypatch.setattr("halfmoon.conductor.replay.logfile.LINE_BYTES_MAX", 100_000)
    assert complaint(b'{"line":"event","x":"' + b"x" * 200_000 + b'"}\n') == "longer than 100000 bytes"


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.zst"
    header = msgspec.json.encode(HEADER)
    path.write_bytes(zstandard.ZstdCompressor().compress(header + b"\n" + b" " * 200_000_000))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(LogFileInvalid, match="line 2: longer than"):
            list(LogFile(path).lines())
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_a_file_may_ask_for_no_more_memory_than_ours_do(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.zst"
    # The head of a frame with a window of two gigabytes.
    path.write_bytes(zstandard.FRAME_HEADER + struct.pack("<BB", 0x00, 21 << 3) + b"\x01\x00\x00")
    with pytest.raises(LogFileInvalid, match="memory"):
        list(LogFile(path).lines())
