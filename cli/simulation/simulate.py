"""`halfmoon simulate`: the conductor's core over a trace, in a simulated cluster."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import orjson
from tqdm import tqdm

from halfmoon.cli.options import OptionInvalid, add_config
from halfmoon.cli.processes.options import installed_policy
from halfmoon.cli.simulation.checkout import papers
from halfmoon.conductor.simulation.options import ClusterShape, RunOptions
from halfmoon.conductor.simulation.profiles import ALIASES, PROFILES, load_profile
from halfmoon.conductor.simulation.report import Objectives, SimulationReport
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival, read_trace
from halfmoon.schemas.policy import AdmissionName, CopiesPrice, Policy, PolicyName
from halfmoon.workers.options import PREFILL_GROUP_MAX

DEFAULT_TRACE = "benchmarks/traces/conversation_trace.jsonl.zst"
#: Default objectives.
TTFT_MS, TBT_MS = 30_000, 1_000


def add(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument(
        "--speed", type=float, default=1.0, help="how many times as fast the trace is replayed"
    )
    parser.add_argument(
        "--closed-loop",
        action="store_true",
        help="turns of a session come after the answer before and its pause (think_ms), not at their recorded time",
    )
    parser.add_argument("--load", action="store_true", help="with --json: load over time as well")
    parser.add_argument("--plot", metavar="DIR", default="", help="write plots into this folder")
    parser.add_argument("--json", action="store_true")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Options of every command that simulates."""
    add_config(parser)
    group = parser.add_argument_group("workload")
    group.add_argument("--trace", metavar="FILE", default=DEFAULT_TRACE, help="JSON Lines, also .gz and .zst")
    group.add_argument("--requests", type=int, default=0, help="only the first so many (0: all)")
    group.add_argument("--ttft-ms", type=int, default=TTFT_MS, help="objective: time to first token")
    group.add_argument("--tbt-ms", type=int, default=TBT_MS, help="objective: time between tokens")
    _add_cluster(parser)
    if (others := papers("systems")) is not None:
        others.add(parser)
    else:
        parser.set_defaults(system="halfmoon")
    parser.add_argument("--seed", type=int, default=0, help="of the random policy and of the noise")
    parser.add_argument(
        "--noise-percent", type=int, default=0, help="computations differ from the profile by up to"
    )
    parser.add_argument(
        "--cost-times",
        metavar="S:FACTOR,...",
        default="",
        help="computations take so many times what the profile says, from so many seconds on: 3, or 0:1,600:3",
    )
    parser.add_argument(
        "--copies-price",
        choices=get_args(CopiesPrice),
        default="displaced",
        help="what a copy of blocks costs under policy halfmoon: what displaced ones are seen to cost (as in a live "
        "cluster), or what blocks save on average",
    )
    parser.add_argument(
        "--correction-window",
        type=int,
        default=0,
        help="predictions are corrected by so many of the last measurements (a live cluster: 15); 0: they are not",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--policy",
        default="halfmoon",
        metavar="NAME",
        help=f"{', '.join(get_args(PolicyName))}, or the name of one that is installed",
    )
    group.add_argument("--admission", choices=get_args(AdmissionName), default="predicted")
    group.add_argument("--prefill", type=int, default=8, help="prefill workers")
    group.add_argument("--decode", type=int, default=8, help="decode workers")
    group.add_argument(
        "--mixed",
        type=int,
        default=0,
        help="mixed workers, which prefill and decode; then --prefill and --decode may both be 0",
    )
    group.add_argument(
        "--token-budget",
        type=int,
        default=0,
        help="tokens of a mixed worker's iteration (default: as many as keep --tbt-ms)",
    )
    names = ", ".join([*PROFILES, *ALIASES])
    group.add_argument(
        "--prefill-group",
        type=int,
        default=1,
        help="prefill workers that compute a long prompt together at most",
    )
    group.add_argument("--profile", default="llama3-70b-8xa800", help=f"hardware: {names}, or a .json file")
    group.add_argument("--block-tokens", type=int, default=512)
    group.add_argument(
        "--pool-blocks", type=int, default=-1, help="of a node's pool (default: the profile's)"
    )
    group.add_argument(
        "--decode-pool-blocks", type=int, default=-1, help="of a decode node's pool (0: keeps nothing)"
    )
    group.add_argument("--kv-blocks", type=int, default=-1, help="of a worker's own cache")
    group.add_argument(
        "--link-gbit", type=float, default=0.0, help="of a node's network (default: the profile's)"
    )


def arrivals_of(args: argparse.Namespace) -> list[Arrival]:
    if not 16 <= args.block_tokens <= 512:
        raise OptionInvalid(f"--block-tokens {args.block_tokens}: 16 to 512")
    arrivals = read_trace(args.trace, block_tokens=args.block_tokens)
    return arrivals[: args.requests] if args.requests > 0 else arrivals


def cluster_of(args: argparse.Namespace) -> ClusterShape:
    return ClusterShape(
        prefill=args.prefill,
        decode=args.decode,
        mixed=args.mixed,
        token_budget=args.token_budget,
        block_tokens=args.block_tokens,
        pool_blocks=args.pool_blocks,
        decode_pool_blocks=args.decode_pool_blocks,
        kv_blocks=args.kv_blocks,
        link_bytes_s=int(args.link_gbit * 1e9 / 8),
    )


def policy_of(args: argparse.Namespace) -> Policy:
    policy = Policy(
        name=installed_policy("--policy", args.policy),
        admission=args.admission,
        ttft_slo_ns=args.ttft_ms * 1_000_000,
        tbt_slo_ns=args.tbt_ms * 1_000_000,
        correction_window=args.correction_window,
        prefill_group=args.prefill_group,
    )
    return msgspec.structs.replace(policy.present(), copies_price=args.copies_price)


def cost_times(text: str) -> list[tuple[int, float]]:
    """Factors by the time, ns, from which each holds. Raises OptionInvalid."""
    found: list[tuple[int, float]] = []
    for part in text.split(",") if text else ():
        since, _, factor = part.rpartition(":")
        try:
            found.append((int(float(since or 0) * 1e9), float(factor)))
        except (ValueError, OverflowError):
            raise OptionInvalid(f"--cost-times {text}: FACTOR, or S:FACTOR,S:FACTOR") from None
        ascending = len(found) < 2 or found[-2][0] < found[-1][0]
        if not (ascending and found[-1][0] >= 0 and 0 < found[-1][1] < 1e6):
            raise OptionInvalid(f"--cost-times {text}: seconds ascend from 0, factors are positive")
    return found


def simulated(
    args: argparse.Namespace,
    arrivals: list[Arrival],
    *,
    speed: float,
    closed_loop: bool = False,
    cluster: ClusterShape | None = None,
    progress: Callable[[int], None] | None = None,
    outcomes: dict[str, Any] | None = None,
) -> SimulationReport:
    """One simulation by the options. Raises OptionInvalid for options that make no sense."""
    for option in ("ttft_ms", "tbt_ms"):
        if getattr(args, option) < 1:
            raise OptionInvalid(f"--{option.replace('_', '-')} {getattr(args, option)}: must be positive")
    for option in ("mixed", "token_budget"):
        if getattr(args, option) < 0:
            raise OptionInvalid(f"--{option.replace('_', '-')} {getattr(args, option)}: must not be negative")
    if role := cluster_of(args).lacks:
        raise OptionInvalid(f"--{role} {getattr(args, role)}: at least 1, or with --mixed none of either")
    if not 0 < speed < 1e6:
        raise OptionInvalid(f"--speed {speed:g}: must be positive")
    if not 0 <= args.noise_percent < 100:
        raise OptionInvalid(f"--noise-percent {args.noise_percent}: 0 to 99")
    if not 0 <= args.correction_window <= 1_000:
        raise OptionInvalid(f"--correction-window {args.correction_window}: 0 to 1,000")
    if not 1 <= args.prefill_group <= PREFILL_GROUP_MAX:
        raise OptionInvalid(f"--prefill-group {args.prefill_group}: 1 to {PREFILL_GROUP_MAX}")
    policy = policy_of(args)
    run = RunOptions(
        seed=args.seed,
        speed=speed,
        closed_loop=closed_loop,
        noise_percent=args.noise_percent,
        cost_times=cost_times(args.cost_times),
        slo=Objectives(ttft_ns=policy.ttft_slo_ns, tbt_ns=policy.tbt_slo_ns),
        progress=progress,
    )
    cluster, profile = cluster or cluster_of(args), load_profile(args.profile)
    if run.closed_loop and not any(arrival.follows >= 0 for arrival in arrivals):
        raise OptionInvalid(f"--closed-loop: no request of {args.trace} has session_id and think_ms")
    if (others := _others(args)) is not None:
        for option, given in (("closed-loop", run.closed_loop), ("mixed", cluster.mixed)):
            if given:
                raise OptionInvalid(f"--{option}: not with --system {args.system}")
        report: SimulationReport = others.simulated(args, arrivals, cluster, profile, run, outcomes)
        return report
    return simulate(arrivals, cluster, policy, profile, run, outcomes=outcomes)


def _others(args: argparse.Namespace) -> Any:
    """The papers' systems, where one of them is meant."""
    return None if args.system == "halfmoon" else papers("systems")


@contextlib.contextmanager
def bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, where a person looks; its function takes the number that is done."""
    with tqdm(total=total, unit=" requests", disable=quiet or not sys.stderr.isatty(), leave=False) as shown:
        yield lambda done: shown.update(done - shown.n) and None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches the simulation as KeyboardInterrupt, which then reports its results so far."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def run(args: argparse.Namespace) -> int:
    arrivals = arrivals_of(args)
    outcomes: dict[str, Any] = {}
    with bar(len(arrivals), quiet=args.json) as progress, interruptible():
        report = simulated(
            args,
            arrivals,
            speed=args.speed,
            closed_loop=args.closed_loop,
            progress=progress,
            outcomes=outcomes,
        )
    if args.plot:
        from halfmoon.conductor.simulation.plots import plot_run

        written = plot_run(Path(args.plot), report, outcomes)
        if not args.json:
            print("\n".join(f"wrote {path}" for path in written))
    if args.json:
        print(orjson.dumps(report.plain(load=args.load)).decode())
    elif (others := _others(args)) is not None:
        print(others.table(report))
    else:
        print(table(report))
    return 0 if report.complete else 130


def table(report: SimulationReport) -> str:
    """For a person."""
    return as_text(report, str(report.setting.workers), rows(report))


def as_text(report: SimulationReport, shape: str, rows: Sequence[tuple[str, str]]) -> str:
    """`rows`, names and texts, below a line on the simulated cluster of workers of this `shape`."""
    setting = report.setting
    lines = [] if report.complete else ["INTERRUPTED: what had happened until then"]
    lines.append(
        f"{setting.system} ({setting.policy}, admission {setting.admission}), {shape}, {setting.profile}, "
        f"speed {setting.speed:g}"
    )
    return "\n".join([*lines, *(f"  {name:<19}{text}" for name, text in rows)])


def rows(report: SimulationReport) -> list[tuple[str, str]]:
    """Figures of a run, each with its name."""
    slo, endings, service, devices = report.slo, report.endings, report.service, report.devices
    found = [
        (
            "requests",
            f"{endings.requests}  completed {endings.completed}  failed {endings.failed}",
        ),
        (
            "rejected",
            ", ".join(f"{reason} {count}" for reason, count in endings.rejected.items()) or "none",
        ),
        ("wasted prefills", str(endings.wasted_prefills)),
    ]
    if endings.open:
        found.insert(1, ("still open", str(endings.open)))
    for name, spread in (("TTFT ms", service.ttft_ms), ("TBT ms", service.tbt_ms)):
        found.append(
            (
                name,
                f"mean {spread.mean:.1f}  p50 {spread.p50:.1f}  p90 {spread.p90:.1f}  p99 {spread.p99:.1f}",
            )
        )
    objective = f"TTFT <= {slo.ttft_ns / 1e9:g} s and TBT <= {slo.tbt_ns / 1e6:g} ms"
    sources = ", ".join(f"{source} {share:.1%}" for source, share in service.hits_by_source.items())
    return [
        *found,
        ("effective capacity", f"{service.effective_capacity:.2%} of requests ({objective})"),
        ("goodput", f"{service.goodput_s:.3f} requests/s over {service.duration_s:.0f} s"),
        ("token reuse", f"{service.token_reuse:.2%} ({sources})"),
        (
            "prefill GPU time",
            f"{devices.prefill_gpu_s:.0f} s ({devices.prefill_busy:.0%} busy)",
        ),
        ("moved", f"{report.traffic.bytes_moved / 1e9:.1f} GB"),
        ("predicted TTFT", _error(report.ttft_error)),
        ("predicted TBT", _error(report.tbt_error)),
        ("decisions", f"digest {report.digest}, {report.events} events in {report.wall_s:.2f} s"),
    ]


def _error(error: dict[str, float]) -> str:
    return f"off by {error['p50']:.1%} (p50), {error['p90']:.1%} (p90)" if error else "nothing to compare"
