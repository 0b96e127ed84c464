"""`halfmoon size`: the fewest prefill and decode workers that hold a trace."""

from __future__ import annotations

import argparse

import msgspec
import orjson

from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.simulation.capacity import outcomes_of, tell
from halfmoon.cli.simulation.simulate import add_workload, arrivals_of, cluster_of
from halfmoon.conductor.simulation.capacity import CapacityUnknown, smallest
from halfmoon.conductor.simulation.report import Objectives


def add(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--workers-max", type=int, default=64, help="of each pool")
    parser.add_argument("--json", action="store_true")


async def run(args: argparse.Namespace) -> int:
    arrivals = arrivals_of(args)
    if args.workers_max < 1:
        raise OptionInvalid(f"--workers-max {args.workers_max}: must be positive")
    if args.system in ("lamina", "infinite-llm"):
        raise OptionInvalid(f"--system {args.system}: it has no prefill workers, which size counts")
    slo = Objectives(ttft_ns=args.ttft_ms * 1_000_000, tbt_ns=args.tbt_ms * 1_000_000)

    def held(prefill: int, decode: int) -> float:
        cluster = msgspec.structs.replace(cluster_of(args), prefill=prefill, decode=decode)
        outcomes = outcomes_of(args, arrivals, args.speed, cluster=cluster)
        share = sum(slo.held(outcome) for outcome in outcomes.values()) / max(1, len(outcomes))
        tell(f"{prefill} + {decode}: {share:.1%}")
        return share

    try:
        prefill, decode, share = smallest(held, args.workers_max)
    except CapacityUnknown as problem:
        raise OptionInvalid(f"size: {problem}") from None
    if args.json:
        print(orjson.dumps({"prefill": prefill, "decode": decode, "held": round(share, 4)}).decode())
    else:
        print(
            f"{prefill} prefill + {decode} decode: {share:.1%} of requests hold TTFT <= {args.ttft_ms / 1e3:g} s and "
            f"TBT <= {args.tbt_ms} ms at speed {args.speed:g}"
        )
    return 0
