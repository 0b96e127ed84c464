"""Words to the person who started the process."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """One line on standard error, at once; lost where that is a full disk, or nobody's any more."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
