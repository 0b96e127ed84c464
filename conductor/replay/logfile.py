"""A log in a file: JSON Lines, compressed by zstandard when its name ends in `.zst`.

The first line is the header, the last one counts the others: a file that was cut off is noticed. In between stand, in
the order in which a conductor meets them, events (with sequence and server time), decisions behind the event that
caused them, and some KV progress. Only fields of `halfmoon.schemas` are written: an unknown field never reaches the
file, so there is neither text nor token in it.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import zstandard
from msgspec import Meta

from halfmoon.schemas.codec import one_line
from halfmoon.schemas.decisions import Decision, SetTimer
from halfmoon.schemas.events import Event, Stamped
from halfmoon.schemas.kv import KvLoaded, KvReady, TransferFailed
from halfmoon.schemas.types import INT_MAX, Count

#: Version of the lines, not of the messages in them.
FORMAT = 1
ZSTD_LEVEL = 9
#: No message of NATS is longer by far; a snapshot of hundred million blocks is not.
LINE_BYTES_MAX = 32 << 20
SNAPSHOT_BYTES_MAX = 4 << 30
#: Memory that a file may demand for its decompression; ours demand 8 MiB.
WINDOW_BYTES_MAX = 128 << 20
#: KV progress that is kept; `PrefillResult` holds the first token, and replay does not show `TransferOpened`.
Progress = KvReady | KvLoaded | TransferFailed


#: Sequences begin at 1. No server's clock is beyond the year 2189: timers are set to some time after it.
Place = Annotated[int, Meta(ge=1, le=INT_MAX)]
Time = Annotated[int, Meta(ge=0, le=INT_MAX // 4 * 3)]


class LogFileInvalid(ValueError):
    """Not a saved log, a damaged one, or one of a version that this halfmoon does not read; the text names
    the line.
    """


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="header"):
    """The first line. `code_version` and `log_version` are those that the log began under ("", 0: not in the
    file).
    """

    format: int
    #: halfmoon that wrote the file.
    saved_by: str
    cluster: str = ""
    code_version: str = ""
    log_version: int = 0
    first_seq: int = 0
    last_seq: int = 0
    #: Cause and position of the oldest decision that was left, when older ones had expired.
    first_decision: tuple[int, int] | None = None


class EventLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="event"):
    """An event with its place and time in the log, both given by the stream."""

    seq: Place
    at_ns: Time
    event: Event


class InvalidLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="invalid"):
    """A message that was no event: conductors passed over it. Its content is not kept."""

    seq: Place
    at_ns: Time


class DecisionLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="decision"):
    """A recorded decision; `at_ns` is when it was stored."""

    cause_seq: Place
    position: Count
    at_ns: Time
    decision: Decision


class ProgressLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="progress"):
    """KV progress at the server's time."""

    at_ns: Time
    progress: Progress


class SnapshotLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="snapshot"):
    """State of a conductor after `seq`; stands before the events of a log whose head is gone."""

    seq: Place
    snapshot: bytes


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="end"):
    """The last line: how many of each there are."""

    events: int
    decisions: int


Line = EventLine | InvalidLine | DecisionLine | ProgressLine | SnapshotLine
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Header | Line | End] = msgspec.json.Decoder(Header | Line | End)


def lines_of_step(stamped: Stamped, decisions: Iterable[Decision]) -> list[Line]:
    """An event and its decisions, as if stored at once: timers are kept by conductors alone."""
    lines: list[Line] = [EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=stamped.event)]
    for position, decision in enumerate(decisions):
        if not isinstance(decision, SetTimer):
            lines.append(
                DecisionLine(cause_seq=stamped.seq, position=position, at_ns=stamped.at_ns, decision=decision)
            )
    return lines


class LogWriter:
    """A context: the file has its name only when all was written."""

    def __init__(self, path: Path, header: Header) -> None:
        self.events = self.decisions = 0
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._file: IO[bytes] = self._partial.open("wb")
        self._out: IO[bytes] = self._file
        if path.suffix == ".zst":
            compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
            self._out = compressor.stream_writer(self._file, closefd=False)
        self._write(header)

    def write(self, line: Line) -> None:
        self.events += isinstance(line, EventLine | InvalidLine)
        self.decisions += isinstance(line, DecisionLine)
        self._write(line)

    def _write(self, line: Header | Line | End) -> None:
        self._out.write(_encoder.encode(line) + b"\n")

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._write(End(events=self.events, decisions=self.decisions))
        if self._out is not self._file:
            self._out.close()
        self._file.close()
        if kind is None:
            os.replace(self._partial, self._path)
        else:
            self._partial.unlink(missing_ok=True)


class LogFile:
    """A saved log to read, as often as wanted. Raises LogFileInvalid and OSError, here and while reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as lines:
            first = self._decoded(next(lines, b""), 1)
        if not isinstance(first, Header):
            raise LogFileInvalid(f"{path}: not a saved log: its first line is no header")
        if first.format != FORMAT:
            raise LogFileInvalid(
                f"{path}: of format {first.format}, saved by halfmoon {first.saved_by}; this one reads format {FORMAT}"
            )
        self.header = first

    def lines(self) -> Iterator[Line]:
        """All but the header and the end, in order."""
        events = decisions = 0
        number = 1
        with self._opened() as lines:
            next(lines)
            for raw in lines:
                number += 1
                line = self._decoded(raw, number)
                if isinstance(line, EventLine):
                    events += 1
                elif isinstance(line, DecisionLine):
                    decisions += 1
                elif isinstance(line, InvalidLine):
                    events += 1
                elif isinstance(line, End):
                    if (line.events, line.decisions) != (events, decisions) or next(lines, b""):
                        raise LogFileInvalid(f"{self.path}: line {number}: lines are missing or too many")
                    return
                elif isinstance(line, Header):
                    raise LogFileInvalid(f"{self.path}: line {number}: a second header")
                yield line
        raise LogFileInvalid(f"{self.path}: cut off after line {number}")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Iterator[bytes]]:
        with self.path.open("rb") as file:
            plain: Any = file
            if self.path.suffix == ".zst":
                decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
                plain = io.BufferedReader(decompressor.stream_reader(file), 1 << 20)
            try:
                yield self._whole_lines(plain)
            except zstandard.ZstdError as problem:
                raise LogFileInvalid(f"{self.path}: {problem}") from None

    def _whole_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        number = 0
        while raw := file.readline(LINE_BYTES_MAX):
            number += 1
            longest = LINE_BYTES_MAX
            if len(raw) == longest and raw.startswith(b'{"line":"snapshot"'):
                longest = SNAPSHOT_BYTES_MAX
                raw += file.readline(longest - len(raw))
            # A few KB of zstandard can hold a line of any length.
            if len(raw) == longest and not raw.endswith(b"\n"):
                raise LogFileInvalid(f"{self.path}: line {number}: longer than {longest} bytes")
            yield raw

    def _decoded(self, raw: bytes, number: int) -> Header | Line | End:
        try:
            return _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise LogFileInvalid(f"{self.path}: line {number}: {one_line(problem)}") from None
