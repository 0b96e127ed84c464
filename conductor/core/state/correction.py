"""Corrections: the ratio of measured to predicted times of a worker's last prefills and answers, in thousandths.

A cost profile is fitted to a worker alone; its present speed also depends on the other processes that compute on its
host, and changes by the hour. So predictions are corrected by the median of the last ratios: one stalled prefill moves
nothing, and a change of speed shows after a few. Ratios of prefills are kept apart by the number of neighbours that
computed at the time, those of answers by their length.

Ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.numbers import TBT_WORST_PERCENT
from halfmoon.schemas.types import INT_MAX

#: As predicted.
EXACT_PERMILLE = 1_000
#: Of a single measurement, in thousandths of its prediction.
PERMILLE_MIN, PERMILLE_MAX = 50, 20_000
#: Fewer measurements than this are completed by one of the value that is assumed without them.
FEW = 3
#: This many in a row, all this far (in thousandths) to one side of the median, are a change of speed.
CHANGED_IN_A_ROW = 2
CHANGED_PERMILLE = 1_250
#: More neighbours than this count as this many.
NEIGHBOURS_MAX = 3
#: Parts of a cost profile.
_PREFILL = ("prefill_base_ns", "prefill_per_token_ps", "prefill_per_token2_fs")
_STEP = ("decode_base_ns", "decode_per_sequence_ns", "decode_per_context_token_ps")


class SeenPrefill(msgspec.Struct, array_like=True):
    """A prefill that took `took_ns` from its turn on, without a fetch."""

    prompt_tokens: int
    cached_tokens: int
    took_ns: int


class SeenSteps(msgspec.Struct, array_like=True):
    """The mean of some steps."""

    sequences: int
    context_tokens: int
    step_ns: int


def ratio_permille(predicted_ns: int, seen_ns: int) -> int:
    """`seen_ns` in thousandths of `predicted_ns`."""
    return min(max(seen_ns * 1_000 // max(1, predicted_ns), PERMILLE_MIN), PERMILLE_MAX)


def keep(seen: list[SeenPrefill] | list[SeenSteps] | list[int], window: int) -> None:
    """Forget the oldest measurements, but for a window of them."""
    del seen[:-window]


def middle_permille(ratios: Sequence[int], otherwise: int) -> int:
    """The factor by `ratios`, oldest first; `otherwise`: its value without them."""
    if len(ratios) < FEW:
        return _median([otherwise, *ratios])
    found = _median(ratios)
    newest = ratios[-CHANGED_IN_A_ROW:]
    faster = all(one * CHANGED_PERMILLE < found * 1_000 for one in newest)
    slower = all(one * 1_000 > found * CHANGED_PERMILLE for one in newest)
    return _median(newest) if faster or slower else found


def prefills_permille(seen: Mapping[int, Sequence[SeenPrefill]], fitted: CostProfile) -> dict[int, int]:
    """The corrections of prefills by the number of busy neighbours, on top of `fitted`.

    Measurements are compared with the fit of now, so that a speed that the fit has learned is not corrected again.
    """
    ratios = {
        neighbours: [
            ratio_permille(fitted.prefill_ns(one.prompt_tokens, one.cached_tokens), one.took_ns)
            for one in each
        ]
        for neighbours, each in seen.items()
    }
    return {neighbours: nearest_permille(ratios, neighbours) for neighbours in range(NEIGHBOURS_MAX + 1)}


def steps_permille(seen: Sequence[SeenSteps], fitted: CostProfile) -> int:
    """The correction of steps, on top of `fitted`."""
    ratios = [ratio_permille(fitted.step_ns(one.sequences, one.context_tokens), one.step_ns) for one in seen]
    return middle_permille(ratios, EXACT_PERMILLE)


def length_class(tokens: int) -> int:
    """Answers are alike when the longest tenth of their intervals is as many, within a power of two.

    Of few intervals it is one, mostly the first: that waited for the step under way.
    """
    return max(1, (tokens - 1) * TBT_WORST_PERCENT // 100).bit_length()


def nearest_permille(ratios: Mapping[int, Sequence[int]], wanted: int) -> int:
    """The correction by measurements of class `wanted`; where there are few, by those of the nearest class too."""
    known = [one for one, each in ratios.items() if len(each) >= FEW and one != wanted]
    nearest = min(known, key=lambda one: (abs(one - wanted), one), default=None)
    otherwise = EXACT_PERMILLE if nearest is None else middle_permille(ratios[nearest], EXACT_PERMILLE)
    return middle_permille(ratios.get(wanted, ()), otherwise)


def _median(values: Sequence[int]) -> int:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


def scaled(fitted: CostProfile, prefill_permille: int, step_permille: int) -> CostProfile:
    """`fitted` with prefills that take `prefill_permille` of it, and steps that take `step_permille`."""
    if prefill_permille == step_permille == EXACT_PERMILLE:
        return fitted
    times = ((_PREFILL, prefill_permille), (_STEP, step_permille))
    # A worker may announce any cost; ours is a number that a snapshot can hold.
    changed = {
        name: min(getattr(fitted, name) * permille // EXACT_PERMILLE, INT_MAX)
        for names, permille in times
        for name in names
    }
    return msgspec.structs.replace(fitted, **changed)
