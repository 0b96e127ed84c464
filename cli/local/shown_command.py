"""The words that `ps` shows of a process that was forked, as if it had been started by them."""

from __future__ import annotations

import ctypes
from pathlib import Path

#: Fields of /proc/self/stat, counted from 0 behind the name: where the words begin and end.
_WORDS_BEGIN, _WORDS_END = 45, 46


def show_command(words: list[str]) -> None:
    """Writes them over those that this process was started with, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_WORDS_BEGIN]), int(fields[_WORDS_END])
    # A kernel that does not report the two.
    if not begin < end:
        return
    shown = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
