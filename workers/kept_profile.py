"""A measured cost profile, kept for later starts of workers, and doubted where measured times differ from it.

A busy machine makes everything look slow, for a moment or for half a minute. So a profile is compared with a few times
measured after it, and measured again where they differ; of each part the fastest counts, since a neighbour only adds.
The difference is kept with it. Where no two profiles agree the last one serves this start alone, and the next start
measures anew. It also does so when a worker's real work takes other times for long (`ProfileCheck`): a neighbour may
have been there all the while.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median_low

import msgspec
from msgspec.structs import asdict, replace

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.events import PrefillFinished, WorkerHeartbeat
from halfmoon.schemas.types import Message
from halfmoon.workers.model.loading.cache_files import cache_folder, held_lock, replace_file

#: Two measurements agree when the slower is not beyond this, in thousandths of the faster.
AGREE_PERMILLE = 1_300
MEASURED_MAX = 3
PREFILL_TOKENS_MIN = 128
#: A profile is doubted when the median of COMPARED times is below or above these, in thousandths of its prediction. The
#: lower bound is near, since a profile measured beside a neighbour is wrong; a neighbour of now is no reason to doubt.
COMPARED = 12
DOUBT_BELOW_PERMILLE = 600
DOUBT_ABOVE_PERMILLE = 3_000


class _FittedPart(msgspec.Struct, frozen=True):
    """Coefficients that were fitted together, and the time that they give for something of a typical size."""

    fields: tuple[str, ...]
    typical_ns: Callable[[CostProfile], int]


_PARTS = (
    _FittedPart(
        ("prefill_base_ns", "prefill_per_token_ps", "prefill_per_token2_fs"),
        lambda cost: cost.prefill_ns(1_000, 0),
    ),
    _FittedPart(
        ("decode_base_ns", "decode_per_sequence_ns", "decode_per_context_token_ps"),
        lambda cost: cost.step_ns(4, 4_000),
    ),
    _FittedPart(("linear_group_ns", "linear_row_ns", "group_rows"), lambda cost: cost.linear_ns(1, 8)),
    _FittedPart(
        ("attention_group_ns", "attention_row_ns", "attention_token_ps"),
        lambda cost: cost.attention_ns(1, 4, 4_000),
    ),
    _FittedPart(
        ("channel_trip_ns", "channel_byte_ps", "query_row_bytes"), lambda cost: cost.channel_ns(1, 100_000)
    ),
)


class MeasuredProfile(msgspec.Struct, forbid_unknown_fields=True):
    """The file. `spread_permille`: largest difference of the measurements; `agreed`: it is small enough."""

    profile: CostProfile
    spread_permille: int
    measurements: int
    agreed: bool


def _fastest(profiles: list[CostProfile]) -> tuple[CostProfile, int]:
    """Each part as it was measured fastest, and how much slower the second was at most, in thousandths."""
    best, spread = profiles[0], 1_000
    for part in _PARTS:
        ranked = sorted(profiles, key=part.typical_ns)
        best = replace(best, **{name: getattr(ranked[0], name) for name in part.fields})
        spread = max(spread, apart_permille([(part.typical_ns(ranked[0]), part.typical_ns(ranked[1]))]))
    return best, spread


def apart_permille(times: Iterable[tuple[int, int]]) -> int:
    """How much longer the longer of two times is at most, in thousandths of the shorter."""
    return max(max(pair) * 1_000 // max(1, min(pair)) for pair in times)


def measured_often(
    measure_now: Callable[[], CostProfile], apart_now: Callable[[CostProfile], int]
) -> MeasuredProfile:
    """The profile as measured, and measured again until it agrees.

    `apart_now` gives the difference of a profile from a few times that are taken now, in thousandths.
    """
    profiles = [measure_now()]
    profile, spread = profiles[0], apart_now(profiles[0])
    while spread > AGREE_PERMILLE and len(profiles) < MEASURED_MAX:
        profiles.append(measure_now())
        profile, spread = _fastest(profiles)
    return MeasuredProfile(profile, spread, len(profiles), spread <= AGREE_PERMILLE)


def kept_profile(
    key: str, measure_now: Callable[[], CostProfile], apart_now: Callable[[CostProfile], int]
) -> CostProfile:
    """The profile of an earlier start, or measured now. When several workers start at once, one measures."""
    path = _path(key)
    known = _read(path)
    if known is not None and known.agreed:
        return known.profile
    with held_lock(path.with_suffix(".lock")):
        other = _read(path)
        # The process that held the lock has measured for this start too, agreed or not.
        if other is not None and (other.agreed or other != known):
            return other.profile
        kept = measured_often(measure_now, apart_now)
        # Zeros too: a coefficient that is missing in a file was not known to its writer.
        text = json.dumps(asdict(kept) | {"profile": asdict(kept.profile)}, indent=1)
        replace_file(path, lambda place: place.write_text(text))
    return kept.profile


def doubt(key: str) -> None:
    """The next start measures anew."""
    with contextlib.suppress(OSError):
        _path(key).unlink()


def _path(key: str) -> Path:
    return cache_folder("profiles") / f"{key}.json"


def _read(path: Path) -> MeasuredProfile | None:
    try:
        fields = json.loads(path.read_text())
        kept = msgspec.convert(fields, MeasuredProfile)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return None
    return kept if fields["profile"].keys() == set(CostProfile.__struct_fields__) else None


class ProfileCheck:
    """Compares a worker's profile with the times of its prefills and steps; `doubted` is called once, with words.

    Prefills of few tokens are left out: costs that are not in the formula count most there. `steps` False: they wait
    for attention elsewhere, which is not in the formula either.
    """

    def __init__(self, profile: CostProfile, doubted: Callable[[str], None], *, steps: bool) -> None:
        self._profile, self._doubted, self._steps = profile, doubted, steps
        self._seen: dict[str, deque[int]] = {
            "prefill": deque(maxlen=COMPARED),
            "step": deque(maxlen=COMPARED),
        }
        self._over = profile == CostProfile()

    def saw(self, event: Message) -> None:
        """An event that the worker reports."""
        match event:
            case PrefillFinished(prompt_tokens=tokens):
                cached = event.cached_local_tokens + event.cached_fetched_tokens
                if tokens - cached >= PREFILL_TOKENS_MIN and event.stages < 2:
                    self._compare("prefill", self._profile.prefill_ns(tokens, cached), event.compute_ns)
            case WorkerHeartbeat(steps=steps, step_sequences=sequences) if (
                self._steps and steps and sequences
            ):
                expected_ns = self._profile.step_ns(sequences, event.step_context_tokens)
                self._compare("step", expected_ns, event.step_ns)
            case _:
                # This event has no times.
                pass

    def _compare(self, what: str, expected_ns: int, seen_ns: int) -> None:
        seen = self._seen[what]
        if self._over or expected_ns <= 0 or seen_ns <= 0:
            return
        seen.append(seen_ns * 1_000 // expected_ns)
        middle = median_low(seen)
        if len(seen) == COMPARED and not DOUBT_BELOW_PERMILLE <= middle <= DOUBT_ABOVE_PERMILLE:
            self._over = True
            times = f"a {what} takes {middle / 1_000:.2f} times what the kept cost profile says"
            self._doubted(f"{times}: the next start measures anew")
