"""The time of one iteration of prompt chunks and decodes: by a worker's cost profile, or by a roofline of GPUs.

Weights are read once for all rows, which is what an iteration of both kinds saves; attention is each request's own.

Source: Sarathi-Serve (OSDI'24), section 4.1, for both regimes; SARATHI (arXiv 2308.16369), section 4.4, for tiles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.papers.devices import (
    COMPUTE_SHARE,
    ELEMENT_BYTES,
    MEMORY_SHARE,
    ROOM_SHARE,
    Device,
    ServedModel,
)
from halfmoon.conductor.simulation.profiles import ALL_REDUCE_NS
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.numbers import SECOND_NS

#: Rows of a tile of a matrix product: more than one tile's are computed as whole ones.
TILE_ROWS = 128
#: The batch that a token budget is chosen for, and the prompt at whose end its chunk is. Source: Sarathi-Serve, 5.1.
BUDGET_SEQUENCES, BUDGET_CONTEXT = 32, 4_096
BUDGET_TOKENS_MAX = 8_192


class IterationTimes(Protocol):
    """`chunks` are (tokens computed before, tokens); `context_tokens` are those of all sequences together."""

    def iteration_ns(self, chunks: Sequence[tuple[int, int]], sequences: int, context_tokens: int) -> float:
        """An iteration of these chunks and of one token for each of these sequences."""


class ProfileTimes:
    """By the formulas of a cost profile: the base once, then what each row adds."""

    def __init__(self, cost: CostProfile) -> None:
        self._cost = cost

    def iteration_ns(self, chunks: Sequence[tuple[int, int]], sequences: int, context_tokens: int) -> float:
        return float(self._cost.iteration_ns(chunks, sequences, context_tokens))


class RooflineTimes:
    """A model on devices with tensor parallelism: the slower of computing and of reading memory, in each part."""

    def __init__(self, model: ServedModel, device: Device, devices: int) -> None:
        self.model, self.device, self.devices = model, device, devices
        self._flops_s = devices * device.flops * COMPUTE_SHARE
        self._bytes_s = devices * device.memory_bytes_s * MEMORY_SHARE

    @property
    def kv_tokens(self) -> int:
        """Tokens that there is room for beside the weights."""
        room = ROOM_SHARE * self.devices * self.device.memory_bytes - self.model.weight_bytes
        assert room > 0, f"{self.model.name} does not fit"
        return int(room // self.model.token_bytes)

    def iteration_ns(self, chunks: Sequence[tuple[int, int]], sequences: int, context_tokens: int) -> float:
        model = self.model
        rows = sequences + sum(tokens for _, tokens in chunks)
        if rows > TILE_ROWS:
            rows = -(-rows // TILE_ROWS) * TILE_ROWS
        read_bytes = model.weight_bytes + 2 * rows * model.width * ELEMENT_BYTES
        took = max(2 * model.parameters * rows / self._flops_s, read_bytes / self._bytes_s)
        took += context_tokens * model.token_bytes / self._bytes_s
        for start, tokens in chunks:
            pairs = tokens * (start + (tokens + 1) / 2)
            flops = 4 * model.width * model.layers * pairs
            took += max(flops / self._flops_s, (start + tokens) * model.token_bytes / self._bytes_s)
        reduces = 2 * model.layers * ALL_REDUCE_NS if self.devices > 1 else 0
        return took * SECOND_NS + reduces


def token_budget(iteration_ns: Callable[[int], float], slo_ns: float, *, tile: int, tokens_max: int) -> int:
    """The most tokens of an iteration that takes no longer than `slo_ns`: a multiple of `tile`, at least one tile.

    `iteration_ns` of a number of tokens does not fall as they become more. Where one tile takes longer, no budget holds
    the objective and one tile breaks it least. Source: Sarathi-Serve, section 4.3.
    """
    assert 0 < tile <= tokens_max, (tile, tokens_max)
    tiles = range(1, tokens_max // tile + 1)
    return tile * max(1, bisect_right(tiles, slo_ns, key=lambda count: iteration_ns(count * tile)))


def budget_for(
    times: IterationTimes,
    slo_ns: float,
    *,
    prompt_tokens: int = BUDGET_CONTEXT,
    context_tokens: int = BUDGET_CONTEXT,
) -> int:
    """The token budget whose iterations hold the objective, at the end of a prompt of so many tokens and beside
    `BUDGET_SEQUENCES` with a context of `context_tokens` each.
    """

    def full_ns(tokens: int) -> float:
        chunk = max(0, tokens - BUDGET_SEQUENCES)
        chunks = [(max(0, prompt_tokens - chunk), chunk)] if chunk else []
        return times.iteration_ns(chunks, BUDGET_SEQUENCES, BUDGET_SEQUENCES * context_tokens)

    return token_budget(full_ns, slo_ns, tile=TILE_ROWS, tokens_max=BUDGET_TOKENS_MAX)
