"""The file: what is written comes back; what is damaged is refused, with the line."""

from __future__ import annotations

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
