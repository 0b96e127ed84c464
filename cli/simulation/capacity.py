"""`halfmoon capacity`: the highest replay speed that a simulated cluster holds."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec
import orjson

from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.simulation.simulate import add_workload, arrivals_of, interruptible, simulated
from halfmoon.conductor.simulation.capacity import HELD_MIN, Capacity, CapacityUnknown, Runs
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.report import Objectives
from halfmoon.conductor.simulation.trace import Arrival


def add(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--begin", type=float, default=1.0, help="the speed to look at first")
    parser.add_argument(
        "--tbt-limits", metavar="MS,MS", default="", help="several limits, from the same simulations"
    )
    parser.add_argument("--json", action="store_true")


def tell(text: str) -> None:
    """Progress, where a person looks."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def outcomes_of(
    args: argparse.Namespace, arrivals: list[Arrival], speed: float, **options: Any
) -> dict[str, Outcome]:
    """The outcome of each request of one whole simulation. Raises KeyboardInterrupt when it was cut short."""
    outcomes: dict[str, Outcome] = {}
    with interruptible():
        report = simulated(args, arrivals, speed=speed, outcomes=outcomes, **options)
    if not report.complete:
        # Half a run is no measure of the whole.
        raise KeyboardInterrupt
    return outcomes


async def run(args: argparse.Namespace) -> int:
    arrivals = arrivals_of(args)
    try:
        limits = [int(limit) for limit in (args.tbt_limits or str(args.tbt_ms)).split(",")]
    except ValueError:
        raise OptionInvalid(
            f"--tbt-limits {args.tbt_limits}: whole numbers of ms, separated by commas"
        ) from None
    args.tbt_ms = limits[0]
    if args.begin <= 0:
        raise OptionInvalid(f"--begin {args.begin:g}: must be positive")

    def at(speed: float) -> dict[str, Outcome]:
        tell(f"speed {speed:g}")
        return outcomes_of(args, arrivals, speed)

    runs, found = Runs(at), dict[int, Capacity]()
    for limit in limits:
        slo = Objectives(ttft_ns=args.ttft_ms * 1_000_000, tbt_ns=limit * 1_000_000)
        start = found[limits[0]].speed if found else args.begin
        try:
            found[limit] = runs.capacity(slo, start=start)
        except CapacityUnknown as problem:
            raise OptionInvalid(f"capacity at TBT <= {limit} ms: {problem}") from None
    if args.json:
        plain = {str(limit): msgspec.to_builtins(capacity) for limit, capacity in found.items()}
        print(orjson.dumps({"system": args.system, "policy": args.policy, "tbt_ms": plain}).decode())
        return 0
    for limit, capacity in found.items():
        print(
            f"{args.system}: speed {capacity.speed:.3f} with TTFT <= {args.ttft_ms / 1e3:g} s and TBT <= {limit} ms "
            f"for {capacity.held:.1%} (at least {HELD_MIN:.0%}) of requests; {capacity.first_failing:.3f} does not hold"
        )
    return 0
