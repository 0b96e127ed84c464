"""`halfmoon size`: the fewest workers that hold a trace, in two pools or mixed; of a recorded run, the split too."""

from __future__ import annotations

import argparse
import contextlib
import functools
from pathlib import Path

import msgspec
import orjson

from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.simulation.capacity import outcomes_of, tell
from halfmoon.cli.simulation.simulate import (
    TBT_MS,
    TTFT_MS,
    add_workload,
    arrivals_of,
    cluster_of,
    interruptible,
)
from halfmoon.conductor.plugins import install_plugins
from halfmoon.conductor.replay.logfile import LogFile
from halfmoon.conductor.replay.splits import Sizes, Split, described, split_of
from halfmoon.conductor.replay.verify import Replay
from halfmoon.conductor.replay.whatif import Recorded, recorded
from halfmoon.conductor.simulation.capacity import CapacityUnknown, fewest, smallest
from halfmoon.conductor.simulation.report import Objectives, Workers


def add(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    # Of a recorded run the objectives are those of its own policy.
    parser.set_defaults(ttft_ms=None, tbt_ms=None)
    parser.add_argument(
        "--from-log",
        metavar="FILE",
        default="",
        help="a recorded run (halfmoon events save): its arrivals, costs and sizes; every split of its workers",
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="with --from-log: to split; 0: as many as it had"
    )
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--workers-max", type=int, default=64, help="of each pool")
    parser.add_argument("--json", action="store_true")


async def run(args: argparse.Namespace) -> int:
    if args.workers_max < 1:
        raise OptionInvalid(f"--workers-max {args.workers_max}: must be positive")
    if args.from_log:
        return _from_log(args)
    args.ttft_ms = TTFT_MS if args.ttft_ms is None else args.ttft_ms
    args.tbt_ms = TBT_MS if args.tbt_ms is None else args.tbt_ms
    arrivals = arrivals_of(args)
    if args.system in ("lamina", "infinite-llm"):
        raise OptionInvalid(f"--system {args.system}: it has no prefill workers, which size counts")
    slo = Objectives(ttft_ns=args.ttft_ms * 1_000_000, tbt_ns=args.tbt_ms * 1_000_000)

    @functools.cache
    def held(workers: Workers) -> float:
        cluster = msgspec.structs.replace(cluster_of(args), **workers._asdict())
        outcomes = outcomes_of(args, arrivals, args.speed, cluster=cluster)
        share = sum(slo.held(outcome) for outcome in outcomes.values()) / max(1, len(outcomes))
        tell(f"{workers}: {share:.1%}")
        return share

    try:
        if args.mixed:
            found = Workers(0, 0, fewest(lambda count: held(Workers(0, 0, count)), args.workers_max))
        else:
            prefill, decode, _ = smallest(lambda p, d: held(Workers(p, d)), args.workers_max)
            found = Workers(prefill, decode)
    except CapacityUnknown as problem:
        raise OptionInvalid(f"size: {problem}") from None
    if args.json:
        print(orjson.dumps({**found._asdict(), "held": round(held(found), 4)}).decode())
    else:
        print(
            f"{found}: {held(found):.1%} of requests hold TTFT <= {args.ttft_ms / 1e3:g} s and "
            f"TBT <= {args.tbt_ms} ms at speed {args.speed:g}"
        )
    return 0


def _from_log(args: argparse.Namespace) -> int:
    for option in ("ttft_ms", "tbt_ms"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise OptionInvalid(f"--{option.replace('_', '-')} {getattr(args, option)}: must be positive")
    if not 0 < args.speed < 1e6:
        raise OptionInvalid(f"--speed {args.speed:g}: must be positive")
    install_plugins()
    was = recorded(Replay(LogFile(Path(args.from_log))))
    workers = args.workers or sum(was.cluster.workers)
    if workers < 1:
        raise OptionInvalid(f"--workers {workers}: must be positive")
    with interruptible():
        sizes = _sizes(was, workers, args)
    print(msgspec.json.encode(sizes).decode() if args.json else described(sizes, args.from_log))
    return 0


def _sizes(was: Recorded, workers: int, args: argparse.Namespace) -> Sizes:
    slo = Objectives(
        ttft_ns=args.ttft_ms * 1_000_000 if args.ttft_ms else was.policy.ttft_slo_ns,
        tbt_ns=args.tbt_ms * 1_000_000 if args.tbt_ms else was.policy.tbt_slo_ns,
    )

    @functools.cache
    def split(prefill: int, decode: int, mixed: int = 0) -> Split:
        found = split_of(was, Workers(prefill, decode, mixed), slo, args.speed)
        tell(f"{found.workers}: {found.held:.1%}")
        return found

    own = was.cluster.workers
    splits = [split(prefill, workers - prefill) for prefill in range(1, workers)] + [split(0, 0, workers)]
    if sum(own) == workers and own not in [one.workers for one in splits]:
        splits.append(split(*own))
    pools = mixed = None
    with contextlib.suppress(CapacityUnknown):
        prefill, decode, _ = smallest(lambda p, d: split(p, d).held, args.workers_max)
        pools = split(prefill, decode)
    with contextlib.suppress(CapacityUnknown):
        mixed = split(0, 0, fewest(lambda count: split(0, 0, count).held, args.workers_max))
    return Sizes(
        requests=len(was.arrivals),
        speed=args.speed,
        slo=slo,
        recorded=own,
        splits=splits,
        best=min(splits, key=lambda one: one.rank),
        fewest=pools,
        fewest_mixed=mixed,
        caveats=was.caveats,
    )
