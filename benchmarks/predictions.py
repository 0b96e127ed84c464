"""How well TTFT and TBT are predicted on a real cluster under load: what the conductor predicted of the requests that
it accepted, against what their client saw.

One cluster for each kind of numerics. At first a closed loop says what it can do; in each round Poisson arrivals come
at shares of that: light, full, double load. The TTFT objective is so many times the mean time between two that the
closed loop finished: so overload is as deep on a slow machine as on a fast one.

Double load is twice what the prefill workers can compute, where that is more than the closed loop finished: decoding
may be what held it up, and then no queue forms before the first token. It comes for so long that the queue would grow
to several times the objective. It is an error when nothing was refused then. Predictions are those of the log,
decided again by a replay; what was seen is the client's: from sending a request to its first token, and between tokens
(mean of the longest tenth, as SLOs are judged, and mean of all).

Beside them: what would have been predicted of the same requests without corrections (`Policy.correction_window` 0), by
a replay of the same log.

Figures: quantiles of seen over predicted and of how far it is from 1, SLO misses among accepted requests, and wasted
work: time of prefills, and tokens, of requests that did not finish. `raw` has each accepted request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop
from clusters import bus_config, cluster, finish, parsed, parser, spread
from simulation_live import read_log

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.streams import StreamLimits
from halfmoon.cli.bench.clients import NatsTarget, Record
from halfmoon.cli.bench.driver import Driver, Limits
from halfmoon.cli.bench.report import intervals
from halfmoon.cli.bench.workload import DrawnLoad, Lengths, Texts
from halfmoon.cli.operator.policy import conductor_status
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import Prediction, StartMixed, StartPrefill
from halfmoon.schemas.events import (
    ClusterConfigured,
    DecodeRefused,
    PolicyChanged,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    Stamped,
)
from halfmoon.schemas.numbers import MS_NS, tbt_ns

#: In flight at once where the capacity is measured: enough that prompts always wait.
CLOSED_LOOP = 12
#: Where more comes than can be computed, it comes until the queue would take so many times the objective.
OVERLOAD_OBJECTIVES = 3
#: There nothing is to be refused.
UNREFUSED_MS = 3_600_000.0
#: The longest tenth of the intervals of longer answers is more than their first, which waits for a step under way.
LONG_ANSWER_TOKENS = 30
#: What a row of `raw` has, in this order. Times in ms; `tbt` is that of SLOs, `tbt_mean` of all intervals.
COLUMNS = (
    "load",
    "ttft_slo",
    "prompt_tokens",
    "tokens",
    "predicted_queue",
    "predicted_prefill",
    "predicted_ttft",
    "predicted_tbt",
    "uncorrected_ttft",
    "uncorrected_tbt",
    "ttft",
    "tbt",
    "tbt_mean",
    "logged_prefill_end",
    "worker_queue",
    "worker_prefill",
)


@dataclass(frozen=True)
class Capacity:
    """What a closed loop says that the cluster can do, requests/s: `finished` by all of it, `prefilled` by its prefill
    workers if they never waited.
    """

    finished: float
    prefilled: float

    def rate(self, load: float) -> float:
        """Requests/s of a load, which is a share."""
        return load * (max(self.finished, self.prefilled) if load > 1 else self.finished)

    def seconds(self, load: float, ttft_slo_ms: float, least: float) -> float:
        """How long a load comes, `least` at least: each second of a load above 1 adds `load - 1` seconds of queue."""
        if load <= 1:
            return least
        return max(least, OVERLOAD_OBJECTIVES * ttft_slo_ms / 1000 / (load - 1))


class Run:
    """One load: the records of the client, and how many requests a second arrived."""

    def __init__(self, load: float, rate: float, records: list[Record]) -> None:
        self.load, self.rate, self.records = load, rate, records


class Round:
    """What a closed loop said, each load at its share of that, and its TTFT objective."""

    def __init__(self, capacity: Capacity, ttft_slo_ms: float, runs: list[Run]) -> None:
        self.capacity, self.ttft_slo_ms, self.runs = capacity, ttft_slo_ms, runs
        self.load_average = [round(load, 2) for load in os.getloadavg()]


async def set_ttft_slo(config: BusConfig, ttft_slo_ms: float) -> None:
    bus = await Bus.connect(config, name="operator", limits=StreamLimits(replicas=0))
    policy = (await conductor_status(bus)).policy
    changed = PolicyChanged(policy=msgspec.structs.replace(policy, ttft_slo_ns=int(ttft_slo_ms * MS_NS)))
    await bus.append(changed, source_id=subjects.OPERATOR, within_s=10)
    await bus.close()


async def capacity_of(config: BusConfig, args: argparse.Namespace, closed: Sequence[Record]) -> Capacity:
    """`closed`: records of the closed loop, the first requests of this cluster."""
    assert all(record.outcome == "finished" for record in closed), [record.reason for record in closed]
    ends_ns = sorted(record.ended_ns for record in closed)
    prefills_ns = [
        stamped.event.compute_ns
        for stamped in await read_log(config)
        if isinstance(stamped.event, PrefillFinished)
    ]
    return Capacity(
        finished=(len(ends_ns) - 1) * 1e9 / (ends_ns[-1] - ends_ns[0]),
        prefilled=(args.prefill + args.mixed) * 1e9 / statistics.mean(prefills_ns),
    )


async def drive(config: BusConfig, args: argparse.Namespace, seed: int, capacity: Capacity | None) -> Round:
    """See Round; the capacity is measured first where there is none."""
    target = NatsTarget(config)
    try:
        model = await target.open()

        async def send(rate: float, number: int, limits: Limits) -> list[Record]:
            load = DrawnLoad(
                prompt=Lengths.parse(args.prompt_tokens, "--prompt-tokens"),
                output=Lengths.parse(args.output_tokens, "--output-tokens"),
                context=model.context,
                rate=rate,
                seed=seed * 100 + number,
            )
            # A seed of their own: no prompt begins as one of another run.
            driver = Driver(target, Texts(model.vocab_size, load.seed), load.requests(), limits)
            await driver.run()
            return driver.counted

        if capacity is None:
            await set_ttft_slo(config, UNREFUSED_MS)
            limits = Limits(concurrency=CLOSED_LOOP, requests=args.capacity_requests, warmup=CLOSED_LOOP)
            capacity = await capacity_of(config, args, await send(0.0, 0, limits))
        ttft_slo_ms = 1000 * args.ttft_slo_services / capacity.finished
        await set_ttft_slo(config, ttft_slo_ms)
        runs = []
        for number, load in enumerate(args.loads, 1):
            rate = capacity.rate(load)
            limits = Limits(duration_s=capacity.seconds(load, ttft_slo_ms, args.seconds))
            runs.append(Run(load, rate, await send(rate, number, limits)))
        await asyncio.sleep(1.0)  # the last events
        return Round(capacity, ttft_slo_ms, runs)
    finally:
        await target.close()


def uncorrected(log: Sequence[Stamped]) -> list[Stamped]:
    """The same log, as if predictions were not corrected and nothing was refused but what was refused."""
    accepted = {one.event.request_id for one in log if isinstance(one.event, PrefillFinished)}
    found = []
    for stamped in log:
        event = stamped.event
        if isinstance(event, RequestArrived) and event.request_id not in accepted:
            continue
        if isinstance(event, (ClusterConfigured, PolicyChanged)):
            policy = msgspec.structs.replace(event.policy, correction_window=0, admission="none")
            stamped = msgspec.structs.replace(stamped, event=msgspec.structs.replace(event, policy=policy))
        found.append(stamped)
    return found


class Logged:
    """What the log says of each request."""

    def __init__(self, log: Sequence[Stamped]) -> None:
        self.predicted: dict[str, Prediction] = {}
        self.placements: Counter[str] = Counter()
        self.arrived_ns: dict[str, int] = {}
        self.prefills: dict[str, list[tuple[int, PrefillFinished]]] = {}
        self.finished: set[str] = set()
        self.refused_after_prefill = 0
        core = Core()
        for stamped in log:
            event = stamped.event
            if isinstance(event, RequestArrived):
                self.arrived_ns.setdefault(event.request_id, stamped.at_ns)
            elif isinstance(event, PrefillFinished):
                self.prefills.setdefault(event.request_id, []).append((stamped.at_ns, event))
            elif isinstance(event, RequestFinished) and event.finish_reason != "abort":
                self.finished.add(event.request_id)
            self.refused_after_prefill += isinstance(event, DecodeRefused)
            for decision in core.step(stamped):
                if isinstance(decision, (StartPrefill, StartMixed)):
                    self.predicted.setdefault(decision.request_id, decision.predicted)
                    self.placements[decision.request_id] += 1


def row_of(round_: Round, load: float, record: Record, logged: Logged, without: Logged) -> list[Any]:
    """See COLUMNS; `record` is of a request that was accepted and has a first token."""
    request_id = record.answer["id"]
    predicted, before = logged.predicted[request_id], without.predicted[request_id]
    ended_ns, prefill = logged.prefills[request_id][0]
    gaps = intervals(record)
    times_ns = (
        predicted.queue_ns,
        predicted.prefill_ns,
        predicted.ttft_ns,
        predicted.tbt_ns,
        before.ttft_ns,
        before.tbt_ns,
        record.heard_ns[0] - record.sent_ns,
        tbt_ns(gaps),
        sum(gaps) // len(gaps) if gaps else 0,
        ended_ns - logged.arrived_ns[request_id],
        prefill.queue_ns,
        prefill.compute_ns,
    )
    return [
        load,
        round(round_.ttft_slo_ms, 1),
        record.prompt_tokens,
        record.completion_tokens,
        *(round(one / MS_NS, 1) for one in times_ns),
    ]


def off(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of pairs (predicted, seen): seen over predicted, and how far that is from 1."""
    ratios = sorted(seen / predicted for predicted, seen in pairs if predicted > 0 and seen > 0)
    if not ratios:
        return {}
    away = sorted(abs(ratio - 1) for ratio in ratios)
    # The same places as `spread`'s: the middle, and the value that a tenth is above.
    return {
        "ratio": spread(ratios),
        "off_p50": round(statistics.median(away), 3),
        "off_p90": round(away[min(len(away) - 1, int(0.9 * len(away)))], 3),
    }


def figures(
    rows: Sequence[Sequence[Any]], records: Sequence[Record], args: argparse.Namespace
) -> dict[str, Any]:
    """Of one load: rows of its accepted requests, and all that its client sent."""
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    outcomes = Counter(record.reason or record.outcome for record in records)
    late = sum(one["ttft"] > one["ttft_slo"] for one in found)
    slow = sum(one["tbt"] > args.tbt_slo_ms for one in found)
    missed = sum(one["ttft"] > one["ttft_slo"] or one["tbt"] > args.tbt_slo_ms for one in found)
    return {
        "requests": len(records),
        "accepted": len(found),
        "rejected": sum(record.outcome == "rejected" for record in records),
        "predicted_queue_ms_max": max((one["predicted_queue"] for one in found), default=0.0),
        "outcomes": dict(sorted(outcomes.items())),
        "ttft": off([(one["predicted_ttft"], one["ttft"]) for one in found]),
        "tbt": off([(one["predicted_tbt"], one["tbt"]) for one in found if one["tokens"] > 1]),
        "tbt_long": off(
            [(one["predicted_tbt"], one["tbt"]) for one in found if one["tokens"] > LONG_ANSWER_TOKENS]
        ),
        "tbt_mean": off([(one["predicted_tbt"], one["tbt_mean"]) for one in found if one["tokens"] > 1]),
        # The same requests, by what would have been predicted of them without corrections.
        "uncorrected": {
            name: off([(one[f"uncorrected_{name}"], one[name]) for one in found if one[name]])
            for name in ("ttft", "tbt")
        },
        "slo_missed": {
            "ttft": late,
            "tbt": slow,
            "any": missed,
            "share": round(missed / max(1, len(found)), 4),
        },
    }


def wasted(logged: Logged) -> dict[str, Any]:
    """Work of a cluster that no answer has: prefills of requests that did not finish, and those done once more."""
    times = {
        request_id: [event.compute_ns for _, event in ended] for request_id, ended in logged.prefills.items()
    }
    all_ns = sum(map(sum, times.values()))
    used_ns = sum(each[-1] for request_id, each in times.items() if request_id in logged.finished)
    return {
        "prefill_s": round((all_ns - used_ns) / 1e9, 3),
        "share": round(1 - used_ns / max(1, all_ns), 4),
        "refused_after_prefill": logged.refused_after_prefill,
        "placed_again": sum(count > 1 for count in logged.placements.values()),
    }


def measure(numerics: str, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds on one cluster."""
    flags = ["--numerics", numerics, "--prefill", str(args.prefill), "--decode", str(args.decode)]
    flags += ["--mixed", str(args.mixed)] if args.mixed else []
    flags += ["--tbt-slo-ms", str(args.tbt_slo_ms)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, cluster(*flags) as addresses:
        config = bus_config(addresses)
        measured: list[Round] = []
        for number in range(args.rounds):
            capacity = measured[0].capacity if measured else None
            measured.append(runner.run(drive(config, args, args.seed + number, capacity)))
        log = runner.run(read_log(config))
    logged, without = Logged(log), Logged(uncorrected(log))
    rounds, raw = [], []
    by_load: dict[str, tuple[list[list[Any]], list[Record]]] = {f"{load:g}": ([], []) for load in args.loads}
    for one in measured:
        loads = {}
        for run in one.runs:
            name = f"{run.load:g}"
            accepted = [record for record in run.records if record.answer.get("id") in logged.prefills]
            rows = [row_of(one, run.load, record, logged, without) for record in accepted]
            loads[name] = {"rate": round(run.rate, 3), **figures(rows, run.records, args)}
            by_load[name][0].extend(rows)
            by_load[name][1].extend(run.records)
            raw.append([" ".join(map(str, row)) for row in rows])
        rounds.append(
            {
                "capacity": round(one.capacity.finished, 3),
                "prefill_capacity": round(one.capacity.prefilled, 3),
                "ttft_slo_ms": round(one.ttft_slo_ms),
                "load_average": one.load_average,
                "loads": loads,
            }
        )
    return {
        "together": {name: figures(rows, records, args) for name, (rows, records) in by_load.items()},
        "wasted": wasted(logged),
        "rounds": rounds,
        "raw": raw,
    }


def require_refusals(numerics: str, result: dict[str, Any]) -> None:
    """Raises SystemExit where nothing was refused although more came than could be computed."""
    for load, one in result["together"].items():
        if float(load) > 1 and not one["rejected"]:
            slo_ms = result["rounds"][0]["ttft_slo_ms"]
            raise SystemExit(
                f"predictions: {numerics}: nothing was refused at load {load}: {one['requests']} requests came, the"
                f" longest predicted queue was {one['predicted_queue_ms_max']:.0f} ms of an objective of {slo_ms} ms"
            )


def lines_of(numerics: str, result: dict[str, Any]) -> list[str]:
    """For a person."""
    first = result["rounds"][0]
    lines = [
        f"{numerics}: capacity {first['capacity']} requests/s, of its prefill workers {first['prefill_capacity']}"
    ]
    for load, one in result["together"].items():
        lines.append(f"  load {load}: {one['accepted']} of {one['requests']} accepted, {one['outcomes']}")
        for name in ("ttft", "tbt", "tbt_long", "tbt_mean"):
            if one[name]:
                ratio = one[name]["ratio"]
                lines.append(
                    f"    {name}: seen / predicted {ratio['p50']:.2f} (p50), {ratio['p90']:.2f} (p90); off by "
                    f"{one[name]['off_p50']:.0%} (p50), {one[name]['off_p90']:.0%} (p90)"
                )
        for name, without in one["uncorrected"].items():
            if without:
                lines.append(
                    f"    {name} uncorrected: off by {without['off_p50']:.0%} (p50), {without['off_p90']:.0%} (p90)"
                )
        lines.append(f"    SLO missed by {one['slo_missed']['share']:.1%} of the accepted")
    waste = result["wasted"]
    lines.append(
        f"  wasted: {waste['share']:.1%} of prefill time, {waste['refused_after_prefill']} refused after it"
    )
    return lines


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=12.0, help="of arrivals, for each load")
    options.add_argument(
        "--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="shares of the capacity"
    )
    options.add_argument("--numerics", nargs="+", default=["exact", "fast"], choices=["exact", "fast"])
    options.add_argument("--prompt-tokens", default="64-512")
    options.add_argument("--output-tokens", default="8-64")
    options.add_argument("--capacity-requests", type=int, default=20, help="of the closed loop")
    options.add_argument("--prefill", type=int, default=1)
    options.add_argument("--decode", type=int, default=1)
    options.add_argument("--mixed", type=int, default=0)
    options.add_argument("--ttft-slo-services", type=float, default=5.0, help="in mean times of a request")
    options.add_argument("--tbt-slo-ms", type=int, default=1000)
    options.add_argument("--seed", type=int, default=1)
    args = parsed(
        options,
        rounds=1,
        seconds=3.0,
        loads=[1.0, 2.0],
        numerics=["fast"],
        prompt_tokens="64-256",
        output_tokens="2-16",
        capacity_requests=6,
        ttft_slo_services=4.0,
    )
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "save", "brief")}
    kinds, lines = {}, []
    for numerics in args.numerics:
        kinds[numerics] = measure(numerics, args)
        require_refusals(numerics, kinds[numerics])
        lines += lines_of(numerics, kinds[numerics])
    finish(args, {"settings": settings, "columns": COLUMNS, **kinds}, lines)


if __name__ == "__main__":
    main()
