"""Saved logs, damaged and hostile ones, as `halfmoon replay` reads them: verified, explained, shown, drawn, simulated
anew. Each is replayed, found to differ, or refused in one line that names the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import tempfile
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from halfmoon.cli import replay
from halfmoon.cli.commands import parser_of
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.replay.logfile import LogFileInvalid
from halfmoon.conductor.replay.whatif import NothingToSimulate
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_json
from tests.fuzz.targets._golden import LOGS, lines_of, plausible, values_of
from tests.fuzz.targets.core_events import BEFORE, snapshot_after
from tests.fuzz.targets.snapshot import changed_snapshot

TEST_INPUTS = 100
INPUTS_MEANT = 100_000
DEADLINE_S = 20.0
#: Lines of one input: enough for requests that are placed, prefilled, decoded and finished.
LINES = 40
ACTIONS = ("verify", "state", "explain", "html", "perfetto", "what_if")


def make(draw: random.Random) -> bytes:
    """Two bytes, which say how it is read, and the file."""
    lines = _lines(draw)
    content = b"\n".join(lines) + b"\n"
    if not draw.randrange(8):
        content = mutated_bytes(draw, content)
    compressed = draw.random() < 0.3
    if compressed:
        content = _compressed(draw, content)
    return bytes([compressed, draw.randrange(len(ACTIONS))]) + content


def _lines(draw: random.Random) -> list[bytes]:
    log = draw.choice(LOGS)
    lines = lines_of(log)[:LINES] if draw.random() < 0.7 else _after_snapshot(draw, log)
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        place = draw.randrange(len(lines))
        match draw.randrange(10):
            case 0:
                del lines[place]
            case 1:
                lines.insert(place, lines[draw.randrange(len(lines))])
            case 2:
                lines[place] = mutated_bytes(draw, lines[place])
            case 3:
                lines[place] = json_bytes(draw, mutated_json(draw, _value(lines[place])))
            case 4 | 5 | 6 | 7:
                lines[place] = json.dumps(plausible(draw, log, _value(lines[place]))).encode()
            case _:
                lines[place] = json.dumps(
                    mutated_json(draw, _value(lines[place]), times=1), default=str
                ).encode()
    if draw.random() < 0.9:
        counted = [_line_kind(line) for line in lines]
        end = {"line": "end", "events": sum(kind in ("event", "invalid") for kind in counted),
               "decisions": counted.count("decision")}  # fmt: skip
        lines.append(json.dumps(end).encode())
    return lines


def _after_snapshot(draw: random.Random, log: str) -> list[bytes]:
    """A log whose head is gone: a snapshot, mostly changed, and what follows it."""
    header, *rest = lines_of(log)
    after = draw.choice(BEFORE[1:])
    snapshot = snapshot_after(log, after)
    if draw.random() < 0.8:
        snapshot = changed_snapshot(draw, log, snapshot)
    line = msgspec.json.encode({"line": "snapshot", "seq": after, "snapshot": snapshot})
    follow = [raw for raw in rest if _seq(raw) > after]
    return [header, line, *follow[:LINES]]


@cache  # of the golden logs only
def _seq(raw: bytes) -> int:
    value = _value(raw)
    return int(value.get("seq", 0) or value.get("cause_seq", 0))


def _value(line: bytes) -> dict[str, Any]:
    """{}: it was changed before, and is none any more."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _line_kind(line: bytes) -> str:
    return _known_kind(line) if len(line) < 1000 else str(_value(line).get("line"))


@lru_cache(maxsize=10_000)
def _known_kind(line: bytes) -> str:
    return str(_value(line).get("line"))


def _compressed(draw: random.Random, content: bytes) -> bytes:
    raw = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(content)
    match draw.randrange(6):
        case 0:
            return mutated_bytes(draw, raw)
        case 1:
            return raw[: draw.randint(0, len(raw))]
        case 2:  # a head that promises petabytes, and a window of gigabytes
            return raw[:4] + struct.pack("<BBQ", 0xC0, draw.choice((0xA8, 0xFF)), 2**50) + raw[6:]
        case 3 if not draw.randrange(20):  # a line of 100 MB in some KB
            return zstandard.ZstdCompressor(level=1).compress(
                content[: draw.randint(0, 400)] + b" " * 100_000_000
            )
        case _:
            return raw


def _is_arrival(value: dict[str, Any]) -> bool:
    return value.get("event", {}).get("type") == "RequestArrived"


class Reader:
    """`halfmoon replay` in this process, over files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parser = parser_of("replay")
        arrived = [value["event"] for log in LOGS for value in values_of(log) if _is_arrival(value)]
        self._requests = [event["request_id"] for event in arrived]
        (directory / "policy.toml").write_text("ttft_slo_ns = 100000000\n")

    def play(self, content: bytes) -> str:
        if len(content) < 2:
            return "too short"
        file = self._directory / ("run.jsonl.zst" if content[0] else "run.jsonl")
        file.write_bytes(content[2:])
        action = ACTIONS[content[1] % len(ACTIONS)]
        try:
            return f"{action} {self._replay(file, action)}"
        except (LogFileInvalid, OptionInvalid, NothingToSimulate) as problem:
            told = str(problem)
            if "\n" in told or len(told) > 1000:
                raise Found(f"not one line: {told[:2000]}") from None
            if isinstance(problem, LogFileInvalid) and str(file) not in told:
                raise Found(f"it does not name the file: {told}") from None
            return type(problem).__name__

    def _replay(self, file: Path, action: str) -> int:
        words: list[str] = []
        match action:
            case "state":
                words = ["--state"]
            case "explain":
                text = file.read_bytes()
                words = [
                    "--explain",
                    next((name for name in self._requests if name.encode() in text), "none"),
                ]
            case "html" | "perfetto":
                words = [f"--{action}", str(self._directory / f"out.{action}")]
            case "what_if":
                words = ["--what-if", str(self._directory / "policy.toml")]
            case _:
                pass
        args = self._parser.parse_args([str(file), *words])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                replay.run(args).send(None)
            except StopIteration as ended:
                return int(ended.value)
        raise Found("it waits for something")


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with tempfile.TemporaryDirectory() as directory:
        yield Reader(Path(directory)).play
