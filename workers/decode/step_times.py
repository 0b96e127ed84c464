"""How long decode steps take here and now, and wait for others. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.lending import PlaceWait
from halfmoon.schemas.policy import Layout
from halfmoon.workers.decode.sequence import DecodeSequence

_WEIGHT = 0.1
#: The newest steps that a place is judged by, and the least number for a report.
WINDOW, LEAST = 16, 8
#: Short steps count as this long: on a busy machine their times are noise, and no place is slow by them.
EXPECTED_NS_MIN = 2_000_000


class StepTimes:
    """The profile, scaled by observed steps: `observe` each step; `predict` for the double check; `take` the means
    since the last heartbeat.
    """

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


class PlaceTimes:
    """Waits of steps for the places that attend to parts of their sequences, beside the measured time of such parts.
    `observe` each step; `take` the report of a heartbeat. Nothing without measured parts.

    A place is judged by the median of its newest steps, so that one step at a bad moment counts for nothing. The
    conductor decides which place is too slow.
    """

    def __init__(self, layout: Layout, profile: CostProfile) -> None:
        self._layout, self._profile = layout, profile
        self._measured = profile.attention_token_ps > 0 and profile.channel_trip_ns > 0
        #: Place → (ns that a step waited, ns that it was expected to wait).
        self._steps: dict[str, deque[tuple[int, int]]] = {}
        self._asked: dict[str, bool] = {}

    def observe(self, batch: Iterable[DecodeSequence], waits_ns: Mapping[str, int]) -> None:
        """A step of `batch` waited `waits_ns` for each place."""
        if not self._measured or not waits_ns:
            self._steps = {}
            return
        expected = self._expected_ns(batch)
        # A place that is no longer asked is judged anew when it is asked again.
        self._steps = {place: self._steps.get(place, deque(maxlen=WINDOW)) for place in expected}
        for place, expected_ns in expected.items():
            self._steps[place].append((waits_ns.get(place, 0), expected_ns))
            self._asked[place] = True

    def take(self) -> list[PlaceWait]:
        """One for each place that was asked since the last call, and often enough."""
        asked, self._asked = self._asked, {}
        found = []
        for place in asked:
            steps = self._steps.get(place, ())
            if len(steps) >= LEAST:
                by_ratio = sorted(steps, key=lambda one: (one[0] * 1_000 // one[1], one))
                waited_ns, expected_ns = by_ratio[len(by_ratio) // 2]
                found.append(PlaceWait(worker_id=place, waited_ns=waited_ns, expected_ns=expected_ns))
        return found

    def _expected_ns(self, batch: Iterable[DecodeSequence]) -> dict[str, int]:
        """A step of the batch, at each place, with its messages, when nothing of it is hidden."""
        layout, profile = self._layout, self._profile
        asked: dict[str, tuple[int, int, int]] = {}
        for sequence in batch:
            for part in sequence.parts:
                tokens = part.size(sequence.length, layout.segment_tokens)
                row_bytes = 2 * profile.query_row_bytes + part.grows * layout.token_layer_bytes
                rows, cached, sent = asked.get(part.worker_id, (0, 0, 0))
                asked[part.worker_id] = rows + 1, cached + tokens, sent + row_bytes
        return {
            place: max(
                EXPECTED_NS_MIN,
                profile.attention_ns(1, rows, cached)
                + profile.channel_ns(layout.layers, layout.layers * sent),
            )
            for place, (rows, cached, sent) in asked.items()
        }
