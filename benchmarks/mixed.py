"""Mixed workers against a prefill and a decode worker, live: first tokens and times between tokens by load, for short
and for long prompts.

Three clusters by turns, on the same cores: a pair, two mixed workers, and both kinds, of which the conductor chooses
for each request (it holds the weights once more; the model is small, and an idle process computes nothing). A closed
loop on the pair says what it can do; each cluster then gets the same Poisson arrivals at shares of that. Nothing is
refused by prediction, so that all of them serve the same requests. The TTFT objective is so many times the mean time
between two that the closed loop finished.

Figures by load: TTFT, and TBT as SLOs judge it (mean of the longest tenth); requests that held both objectives; and of
the choice how many went to mixed workers, and its share of the better of the other two.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import Counter
from typing import Any

import uvloop
from clusters import beside, bus_config, cluster, finish, parser, spread
from simulation_live import read_log

from halfmoon.bus.config import BusConfig
from halfmoon.cli.bench.clients import NatsTarget, Record
from halfmoon.cli.bench.driver import Driver, Limits
from halfmoon.cli.bench.report import intervals
from halfmoon.cli.bench.workload import DrawnLoad, Lengths, Texts
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.replay.reasons import way_reason
from halfmoon.schemas.decisions import StartMixed, StartPrefill
from halfmoon.schemas.numbers import MS_NS
from halfmoon.schemas.slo import tbt_ns

CLUSTERS: dict[str, list[str]] = {
    "pair": ["--prefill", "1", "--decode", "1"],
    "mixed": ["--prefill", "0", "--decode", "0", "--mixed", "2"],
    "choice": ["--prefill", "1", "--decode", "1", "--mixed", "1"],
}
#: Prompt and answer tokens, and requests of the closed loop.
LENGTHS = {"short": ("100-300", "40-80", 30), "long": ("1200-2500", "40-80", 12)}
CLOSED_LOOP = 8


async def drive(
    config: BusConfig, lengths: str, limits: Limits, *, rate: float = 0.0, seed: int
) -> list[Record]:
    target = NatsTarget(config)
    try:
        model = await target.open()
        prompt, output, _ = LENGTHS[lengths]
        load = DrawnLoad(
            prompt=Lengths.parse(prompt, "prompt"),
            output=Lengths.parse(output, "output"),
            context=model.context,
            rate=rate,
            seed=seed,
        )
        driver = Driver(target, Texts(model.vocab_size, seed), load.requests(), limits)
        await driver.run()
        return driver.counted
    finally:
        await target.close()


async def capacity(config: BusConfig, lengths: str, seed: int) -> float:
    """Requests a second of a closed loop."""
    requests = LENGTHS[lengths][2]
    limits = Limits(concurrency=CLOSED_LOOP, requests=requests, warmup=CLOSED_LOOP)
    ends_ns = sorted(record.ended_ns for record in await drive(config, lengths, limits, seed=seed))
    return (len(ends_ns) - 1) * 1e9 / (ends_ns[-1] - ends_ns[0])


def figures(records: list[Record], ttft_slo_ms: float, tbt_slo_ms: float) -> dict[str, Any]:
    finished = [record for record in records if record.outcome == "finished"]
    ttft = [(record.heard_ns[0] - record.sent_ns) / MS_NS for record in finished]
    tbt = [tbt_ns(intervals(record)) / MS_NS for record in finished]
    held = sum(
        first <= ttft_slo_ms and between <= tbt_slo_ms for first, between in zip(ttft, tbt, strict=True)
    )
    return {
        "requests": len(records),
        "outcomes": dict(Counter(record.reason or record.outcome for record in records)),
        "ttft_ms": spread(ttft),
        "tbt_ms": spread(tbt),
        "held": round(held / max(1, len(records)), 4),
    }


async def placed(config: BusConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Orders by kind of worker, of the whole log; and how often each reason was the log's, numbers left out."""
    core, found, reasons = Core(), Counter[str](), Counter[str]()
    core.explain_requests = lambda _: True
    for stamped in await read_log(config):
        for decision in core.step(stamped):
            if isinstance(decision, StartMixed | StartPrefill):
                found["mixed" if isinstance(decision, StartMixed) else "pair"] += 1
        for why in core.notes:
            reasons[re.sub(r"[0-9.]+ (ns|us|ms|s)\b", "…", way_reason(why))] += 1
    return dict(found), dict(reasons.most_common())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, float] = {}
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        loads: dict[str, dict[str, Any]] = {}
        for kind, pools in CLUSTERS.items():
            flags = [*pools, "--numerics", args.numerics, "--admission", "none"]
            flags += ["--tbt-slo-ms", str(args.tbt_slo_ms)]
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, cluster(*flags) as addresses:
                config = bus_config(addresses)
                for lengths in args.lengths:
                    if lengths not in rates:
                        rates[lengths] = runner.run(capacity(config, lengths, args.seed))
                    for load in args.loads:
                        seed = args.seed + 1_000 * number + int(100 * load)
                        records = runner.run(
                            drive(
                                config,
                                lengths,
                                Limits(duration_s=args.seconds),
                                rate=load * rates[lengths],
                                seed=seed,
                            )
                        )
                        loads.setdefault(f"{lengths} {load:g}", {})[kind] = figures(
                            records, 1_000 * args.ttft_slo_services / rates[lengths], args.tbt_slo_ms
                        )
                if kind == "choice":
                    orders, reasons = runner.run(placed(config))
        rounds.append(
            {
                "loads": loads,
                "choice_orders": orders,
                "choice_reasons": reasons,
                "load_average": beside()["load_average"],
            }
        )
    return {"capacity_pair": {name: round(rate, 3) for name, rate in rates.items()}, "rounds": rounds}


def lines_of(result: dict[str, Any]) -> list[str]:
    """For a person: medians of the rounds."""
    lines = [f"capacity of a pair, requests/s: {result['capacity_pair']}"]
    for name in result["rounds"][0]["loads"]:
        lines.append(f"{name} of it")
        for kind in CLUSTERS:
            each = [one["loads"][name][kind] for one in result["rounds"]]
            cells = [
                f"{part} p50 {spread([one[part]['p50'] for one in each])['p50']:.0f} "
                f"p90 {spread([one[part]['p90'] for one in each])['p50']:.0f}"
                for part in ("ttft_ms", "tbt_ms")
            ]
            held = spread([one["held"] for one in each])
            lines.append(
                f"  {kind:7}{'  '.join(cells)}  held {held['p50']:.0%} ({held['min']:.0%} to {held['max']:.0%})"
            )
        shares = [
            one["loads"][name]["choice"]["held"]
            / max(0.001, *(one["loads"][name][kind]["held"] for kind in ("pair", "mixed")))
            for one in result["rounds"]
        ]
        lines.append(f"  choice over the better: {spread(shares)['p50']:.3f} (least {min(shares):.3f})")
        least = {
            part: spread(
                [
                    one["loads"][name]["choice"][part]["p50"]
                    / min(one["loads"][name][kind][part]["p50"] for kind in ("pair", "mixed"))
                    for one in result["rounds"]
                ]
            )["p50"]
            for part in ("ttft_ms", "tbt_ms")
        }
        lines.append(
            f"  p50 of the choice over the least of the two: first token {least['ttft_ms']:.2f}, "
            f"between tokens {least['tbt_ms']:.2f}"
        )
    lines.append(f"orders of the choice: {[one['choice_orders'] for one in result['rounds']]}")
    for reason, count in result["rounds"][0]["choice_reasons"].items():
        lines.append(f"  {count} times: {reason}")
    return lines


def main() -> None:
    """Measure, print a table, and save it when asked."""
    made: argparse.ArgumentParser = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seconds", type=float, default=20.0, help="of each load")
    made.add_argument(
        "--loads", type=float, nargs="+", default=[0.3, 0.7, 1.0], help="shares of the capacity"
    )
    made.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    made.add_argument("--numerics", choices=["exact", "fast"], default="fast")
    made.add_argument("--ttft-slo-services", type=float, default=6.0, help="times the time between two ends")
    made.add_argument("--tbt-slo-ms", type=int, default=500)
    made.add_argument("--seed", type=int, default=1)
    args = made.parse_args()
    result = measure(args)
    finish(
        args,
        {"options": {key: value for key, value in vars(args).items() if key != "save"}, **result},
        lines_of(result),
    )


if __name__ == "__main__":
    main()
