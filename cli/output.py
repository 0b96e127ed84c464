"""Words to the person who started the process."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)
