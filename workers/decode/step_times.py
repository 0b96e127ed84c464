"""How long decode steps take here and now: the profile, scaled by what was observed."""

from __future__ import annotations

from halfmoon.schemas.cost_profile import CostProfile

_WEIGHT = 0.1


class StepTimes:
    """`observe` each step; `predict` for the double check; `take` the means since the last heartbeat."""

    def __init__(self, profile: CostProfile) -> None:
        self._profile = profile
        self._ratio = 1.0
        self._steps = self._ns = self._sequences = self._context = 0

    def predict(self, sequences: int, context_tokens: int) -> int:
        """Nanoseconds of one step."""
        return int(self._profile.step_ns(sequences, context_tokens) * self._ratio)

    def observe(self, step_ns: int, sequences: int, context_tokens: int) -> None:
        expected = self._profile.step_ns(sequences, context_tokens)
        if expected > 0:
            self._ratio += _WEIGHT * (step_ns / expected - self._ratio)
        self._steps += 1
        self._ns += step_ns
        self._sequences += sequences
        self._context += context_tokens

    def take(self) -> tuple[int, int, int, int]:
        """(steps, mean ns, mean sequences, mean context tokens) since the last call."""
        steps = self._steps
        means = (self._ns, self._sequences, self._context)
        self._steps = self._ns = self._sequences = self._context = 0
        if not steps:
            return (0, 0, 0, 0)
        return (steps, means[0] // steps, means[1] // steps, means[2] // steps)
