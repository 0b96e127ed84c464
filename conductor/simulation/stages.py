"""The time that simulated prefill workers take for a prompt that they compute together, as `workers.prefill` does it.

Each stage computes one chunk after another, and begins one when the stage before has handed it on. Everything goes by
way of the worker with the last layers: the KV and the residuals of each other stage come in over an equal share of its
link, and residuals for the next stage go out again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.schemas.decisions import LayerStage
from halfmoon.schemas.numbers import SECOND_NS


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """From the first chunk's begin. By stage: when its last chunk ends, and for how long it computed."""

    ends_ns: list[int]
    busy_ns: list[int]
    #: Between the workers.
    moved_bytes: int


def stage_times(
    profile: Profile,
    stages: Sequence[LayerStage],
    chunks: range,
    *,
    link_bytes_s: int,
    times: float = 1.0,
) -> StageTimes:
    """`chunks`: from the cached tokens to the prompt's end, by the tokens of a chunk. `times`: of the profile's, for
    noise.
    """
    layers = sum(stage.layers for stage in stages)
    assert layers == profile.layers, (layers, profile.name)
    cost, layer_bytes = profile.cost, profile.token_bytes // profile.layers

    share_bytes_s = max(1, link_bytes_s // (len(stages) - 1))

    def sent_ns(size: int) -> int:
        return size * SECOND_NS // share_bytes_s

    ends, busy = [0] * len(stages), [0] * len(stages)
    # Cached blocks of a stage's layers reach it before its first chunk.
    moved = 0
    came_ns = [0] * len(stages)
    for place, stage in enumerate(stages[:-1]):
        prefix = chunks.start * stage.layers * layer_bytes
        moved += prefix
        ends[place] = sent_ns(prefix)
    for begin in chunks:
        end = min(begin + chunks.step, chunks.stop)
        chunk_ns = cost.prefill_ns(end, begin) * times
        residual = (end - begin) * profile.activation_bytes
        there_ns = 0
        for place, stage in enumerate(stages):
            compute_ns = int(chunk_ns * stage.layers / layers)
            ends[place] = max(ends[place], there_ns) + compute_ns
            busy[place] += compute_ns
            if place + 1 == len(stages):
                break
            came = residual + (end - begin) * stage.layers * layer_bytes
            came_ns[place] = max(came_ns[place], ends[place]) + sent_ns(came)
            there_ns = came_ns[place] + profile.link_latency_ns
            moved += came
            if place + 2 < len(stages):
                there_ns += sent_ns(residual) + profile.link_latency_ns
                moved += residual
    return StageTimes(ends_ns=ends, busy_ns=busy, moved_bytes=moved)
