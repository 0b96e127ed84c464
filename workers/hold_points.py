"""Points at which a worker stands still until a test lets it go on: a test kills it there, in a known moment.

Only the environment asks for it. `HALFMOON_TEST_HOLDS` names a directory; without it a point costs one comparison. A
file there with the name of a point arms it, for the first thread that reaches the number in the file. That thread
renames the file after its order or worker, and goes on when the file is gone. Threads that hold are never the loop's,
so heartbeats go on: a worker that holds is not lost.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "HALFMOON_TEST_HOLDS"
#: Numbers are layers: one of a prompt is computed, stored, and on its way to the decode worker's node.
PROMPT_LAYER = "prompt-layer"
#: Numbers are layers: one of another worker's prompt is computed and sent back.
STAGE_LAYER = "stage-layer"
#: Numbers are tokens that the answer has: the step that draws the next one has not begun.
DECODE_STEP = "decode-step"
#: Numbers are tokens that the lender has: those that follow have not been sent.
MOVE = "move"
#: The worker is ready for orders, and has not joined. The worker's name follows, after a "-".
JOINING = "joining"
#: Seconds between two looks.
LOOK_S = 0.01

_named = os.environ.get(VARIABLE, "")
#: None: nobody asks.
PLACE: Path | None = Path(_named) if _named else None


def reached(point: str, number: int, of: str) -> None:
    """Holds where the point is armed for `number` or less. `of`: the order or the worker that holds there."""
    if PLACE is None:
        return
    armed, holds = PLACE / point, PLACE / f"{point} {of}"
    try:
        if number < int(armed.read_text()):
            return
        armed.rename(holds)  # one of several does it
    except FileNotFoundError:
        return
    while holds.exists():
        time.sleep(LOOK_S)
