"""Options of a simulation: its cluster, and how the requests are served by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from halfmoon.conductor.simulation.report import Objectives, Workers


class ConfigurationImpossible(ValueError):
    """A cluster that cannot be; the text has the reason."""


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers and sizes of a cluster's parts. Sizes of -1 are the profile's."""

    #: Workers of each role: some of both, or with mixed ones none of either.
    prefill: int
    decode: int
    mixed: int = 0
    block_tokens: int = 512
    #: Blocks of a prefill or mixed node's pool, of a decode node's pool (0: it keeps nothing), of a worker's own cache.
    pool_blocks: int = -1
    decode_pool_blocks: int = -1
    kv_blocks: int = -1
    #: Of each node's network; 0: the profile's.
    link_bytes_s: int = 0
    #: Tokens of one iteration of a colocated worker with chunked prefill.
    chunk_tokens: int = 512
    #: Tokens of one iteration of a mixed worker, and its time by the profile. Without a time it is not bounded; without
    #: tokens either it holds the policy's TBT objective.
    token_budget: int = 0
    iteration_ns: int = 0

    @property
    def workers(self) -> Workers:
        return Workers(self.prefill, self.decode, self.mixed)

    @property
    def lacks(self) -> Literal["", "prefill", "decode"]:
        """The role without which nobody is served; "" where there is none."""
        if self.mixed > 0 and self.prefill == self.decode == 0:
            return ""
        return "prefill" if self.prefill < 1 else "decode" if self.decode < 1 else ""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`seed` draws the `random` policy's choices and, with `noise_percent`, how much computations differ from the
    profile.
    """

    seed: int = 0
    #: Arrivals come this many times as fast.
    speed: float = 1.0
    #: Arrivals that follow another come after its answer, not at their time.
    closed_loop: bool = False
    noise_percent: int = 0
    #: See `Clock`.
    cost_times: Sequence[tuple[int, float]] = ()
    #: Objectives by which answers count; None: the policy's.
    slo: Objectives | None = None
    #: Called now and then with the number of requests that have ended. KeyboardInterrupt ends the run.
    progress: Callable[[int], None] | None = None


#: As fast as the arrivals came, at the profile's costs.
AS_RECORDED = RunOptions()
