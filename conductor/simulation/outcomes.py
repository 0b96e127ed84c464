"""The outcome of each simulated request, and the load at a time."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, kw_only=True, gc=False):
    """One request. Times are ns; -1: it did not come to that. `predicted_…`: by the conductor, at its placement."""

    arrived_ns: int
    prompt_tokens: int
    output_tokens: int
    #: "" while open; "finished", "failed", or the reason of a rejection.
    end: str = ""
    prefill_id: str = ""
    decode_id: str = ""
    queue_ns: int = 0
    compute_ns: int = 0
    #: Prompt tokens that were not computed: from the worker's own node, and from others.
    local_tokens: int = 0
    fetched_tokens: int = 0
    first_token_ns: int = -1
    ended_ns: int = -1
    tbt_ns: int = -1
    predicted_ttft_ns: int = -1
    predicted_tbt_ns: int = -1
    #: Its prompt was computed, and then it was refused.
    wasted: bool = False

    @property
    def ttft_ns(self) -> int:
        return self.first_token_ns - self.arrived_ns if self.first_token_ns >= 0 else -1


class LoadSample(msgspec.Struct):
    """Both pools at one time: predicted queue over TTFT SLO, step over TBT SLO (means), and sizes."""

    at_ns: int
    prefill_load: float
    decode_load: float
    queued: int
    running: int
    #: Workers of each role.
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
