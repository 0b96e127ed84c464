"""The report of a simulation, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.schemas.numbers import MS_NS


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives that a request must hold to count, both, in ns."""

    ttft_ns: int = 30_000_000_000
    tbt_ns: int = 1_000_000_000

    def held(self, outcome: Outcome) -> bool:
        return outcome.end == "finished" and outcome.ttft_ns <= self.ttft_ns and outcome.tbt_ns <= self.tbt_ns


class Percentiles(msgspec.Struct, frozen=True):
    """Mean and percentiles of times, in ms."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class Workers(NamedTuple):
    """How many have each role."""

    prefill: int
    decode: int
    mixed: int = 0

    def __str__(self) -> str:
        return " + ".join(f"{count} {role}" for role, count in self._asdict().items() if count)


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


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a report. In JSON its fields stand among the report's own."""


class RunSetting(Figures, frozen=True, kw_only=True):
    """The simulated system and its load."""

    system: str
    policy: str
    admission: str
    profile: str
    prefill: int
    decode: int
    speed: float
    seed: int
    mixed: int = 0

    @property
    def workers(self) -> Workers:
        return Workers(self.prefill, self.decode, self.mixed)


class Endings(Figures, frozen=True, kw_only=True):
    """Requests by their ends."""

    requests: int = 0
    completed: int = 0
    failed: int = 0
    #: Neither ended nor refused when the run was interrupted.
    open: int = 0
    rejected: dict[str, int] = {}
    wasted_prefills: int = 0


class Service(Figures, frozen=True, kw_only=True):
    """Times of the requests that finished, what they had from KVCache, and objectives held."""

    ttft_ms: Percentiles = Percentiles()
    tbt_ms: Percentiles = Percentiles()
    #: Share of all prompt tokens that need not be computed, and where they were.
    token_reuse: float = 0.0
    hits_by_source: dict[str, float] = {}
    #: Share of requests that held both objectives, and those a second.
    effective_capacity: float = 0.0
    goodput_s: float = 0.0
    duration_s: float = 0.0


class DeviceTime(Figures, frozen=True, kw_only=True):
    """Time that the devices computed, all together."""

    prefill_gpu_s: float = 0.0
    decode_gpu_s: float = 0.0
    #: Share of the run that a prefill device computed.
    prefill_busy: float = 0.0


class Traffic(Figures, frozen=True, kw_only=True):
    """KVCache between nodes."""

    bytes_moved: int = 0
    bytes_fetched: int = 0
    bytes_pushed: int = 0
    failed_fetches: int = 0


class SimulationReport(msgspec.Struct, kw_only=True):
    """See `halfmoon simulate --help`. `digest` names every decision in order; only `wall_s` differs between runs."""

    setting: RunSetting
    #: False: interrupted, the figures are of the part until then.
    complete: bool = True
    endings: Endings = Endings()
    service: Service = Service()
    devices: DeviceTime = DeviceTime()
    traffic: Traffic = Traffic()
    #: Error of predictions of placed requests, as a share of the measured value: p50 and p90; and the signed mean.
    ttft_error: dict[str, float] = {}
    tbt_error: dict[str, float] = {}
    slo: Objectives = Objectives()
    events: int = 0
    digest: str = ""
    #: Workers that took another role.
    role_changes: int = 0
    wall_s: float = 0.0
    load: list[LoadSample] = []

    def plain(self, *, load: bool = True) -> dict[str, Any]:
        """As plain values, for JSON."""
        values: dict[str, Any] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            values |= msgspec.to_builtins(value if isinstance(value, Figures) else {name: value})
        if not load:
            del values["load"]
        return values


def spread(values: Sequence[int]) -> Percentiles:
    """Percentiles in ms of times in ns. The p-th one is the smallest value that p % are not above."""
    if not values:
        return Percentiles()
    ordered = sorted(values)
    at = [ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 90, 99)]
    mean = sum(ordered) / len(ordered)
    return Percentiles(*(round(value / MS_NS, 3) for value in (mean, *at)))


def error(pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The error of predictions, as a share of the measured value, from pairs (predicted, measured)."""
    off = sorted(abs(predicted - came) / came for predicted, came in pairs if came > 0)
    if not off:
        return {}
    bias = (
        sum(predicted for predicted, came in pairs if came > 0) / sum(came for _, came in pairs if came > 0)
        - 1
    )
    return {
        "p50": round(off[len(off) // 2], 4),
        "p90": round(off[len(off) * 9 // 10], 4),
        "bias_of_sum": round(bias, 4),
        "n": len(off),
    }


def device_time(prefill_ns: int, decode_ns: int, duration_s: float, prefill_devices: int) -> DeviceTime:
    """The time of computations on all devices, in a run of `duration_s`; `prefill_devices` may compute prompts."""
    prefill_gpu_s = round(prefill_ns / 1e9, 6)
    return DeviceTime(
        prefill_gpu_s=prefill_gpu_s,
        decode_gpu_s=round(decode_ns / 1e9, 6),
        prefill_busy=round(prefill_gpu_s / max(duration_s, 1e-3) / prefill_devices, 6),
    )


def summarise(report: SimulationReport, outcomes: Mapping[str, Outcome], end_ns: int) -> SimulationReport:
    """`report` with the figures of requests filled in."""
    every = list(outcomes.values())
    finished = [outcome for outcome in every if outcome.end == "finished"]
    rejected: dict[str, int] = {}
    for outcome in every:
        if outcome.end not in ("", "finished", "failed"):
            rejected[outcome.end] = rejected.get(outcome.end, 0) + 1
    computed = [outcome for outcome in every if outcome.compute_ns]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in computed) or 1
    local = sum(outcome.local_tokens for outcome in computed) / prompt_tokens
    fetched = sum(outcome.fetched_tokens for outcome in computed) / prompt_tokens
    first_ns = every[0].arrived_ns if every else 0
    duration_s = max(end_ns - first_ns, 1) / 1e9
    held = sum(report.slo.held(outcome) for outcome in every)
    report.endings = Endings(
        requests=len(every),
        completed=len(finished),
        failed=sum(outcome.end == "failed" for outcome in every),
        open=sum(outcome.end == "" for outcome in every),
        rejected=dict(sorted(rejected.items())),
        wasted_prefills=sum(outcome.wasted for outcome in every),
    )
    report.service = Service(
        ttft_ms=spread([outcome.ttft_ns for outcome in finished]),
        tbt_ms=spread([outcome.tbt_ns for outcome in finished if outcome.output_tokens > 1]),
        token_reuse=round(local + fetched, 6),
        hits_by_source={"local": round(local, 6), "fetched": round(fetched, 6)},
        effective_capacity=round(held / max(1, len(every)), 6),
        goodput_s=round(held / duration_s, 6),
        duration_s=round(duration_s, 3),
    )
    report.ttft_error = error(
        [(o.predicted_ttft_ns, o.ttft_ns) for o in finished if o.predicted_ttft_ns >= 0]
    )
    report.tbt_error = error(
        [(o.predicted_tbt_ns, o.tbt_ns) for o in finished if o.predicted_tbt_ns >= 0 and o.output_tokens > 1]
    )
    return report
