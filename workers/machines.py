"""How a worker is built: a pure machine inside a shell.

The machine (`PrefillState`, `DecodeState`) decides everything and touches nothing: `on(event)` returns the actions
that follow, in the order in which they must be done. It has no clock, no thread and no connection; events carry
the time, and each action that takes time ends in an event. The shell (`PrefillWorker`, `DecodeWorker`) feeds it
what happens, obeys, and decides nothing. So the same machine runs in a process, in tests that draw every
interleaving, and in a simulated cluster. `validate()` raises AssertionError when an invariant does not hold.

Each role's folder has its events in `events`, its actions in `actions`, its machine in `state`. Here is what machines
share.

Source: dask.distributed's `worker_state_machine` (stimulus in, instructions out).
"""

from __future__ import annotations

from halfmoon.schemas.tokens import TakeReply


def refusal(taken: TakeReply | None) -> str:
    """Why an order got no tokens."""
    return "the frontend does not answer" if taken is None else "the frontend no longer wants it"
