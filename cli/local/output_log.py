"""The output of a process of `halfmoon up`, in files of bounded size."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

#: When a file is as large as this it becomes the old one, in place of the old one before it.
FILE_BYTES_MAX = 8 << 20
#: A longer line is cut into several.
LINE_BYTES_MAX = 1 << 16


class OutputLog:
    """Appends to `file`; the part before it is in `file` with `.1` at its end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._output = file.open("ab", buffering=0)
        self._bytes = self._output.tell()

    def write(self, line: str) -> None:
        """Write one line. It is lost where the disk is full: the watched process goes on."""
        try:
            if self._bytes >= FILE_BYTES_MAX:
                self._begin_another()
            self._bytes += self._output.write(line.encode(errors="replace") + b"\n")
        except OSError:
            return

    def _begin_another(self) -> None:
        # The new one is there before the old one is moved: there may be no file descriptor, or no room, for it now.
        begun = self._file.with_name(f"{self._file.name}.new")
        another = begun.open("wb", buffering=0)
        os.replace(self._file, self._file.with_name(f"{self._file.name}.1"))
        os.replace(begun, self._file)
        self._output.close()
        self._output, self._bytes = another, 0

    def close(self) -> None:
        self._output.close()


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines that a process writes, until it ends."""
    begun = b""
    while chunk := await stream.read(LINE_BYTES_MAX):
        *whole, begun = (begun + chunk).split(b"\n")
        if len(begun) >= LINE_BYTES_MAX:
            whole, begun = [*whole, begun], b""
        for raw in whole:
            yield raw.decode(errors="replace").rstrip()
    if begun:
        yield begun.decode(errors="replace").rstrip()
