"""Options of the processes, which `halfmoon up` takes as well and hands on."""

from __future__ import annotations

import argparse
from typing import get_args

from halfmoon.cli.metrics import add_metrics
from halfmoon.cli.options import add_bus, add_config, add_secret
from halfmoon.cli.output import add_logging
from halfmoon.cli.tracing import add_tracing
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import AdmissionName, MixedChoice, Policy, PolicyName

#: Longer than a server is away when it is started again: time that passed then does count.
CLOCK_STEP_NS_MAX = 60 * SECOND_NS
#: Longer than a lender is asked for room, and than the KV of the longest prompts takes beside decode steps.
MOVE_ANSWER_NS = 300 * SECOND_NS
#: Of the last prefills, steps and answers: more are steadier, fewer follow a change of the machine's speed sooner.
CORRECTION_WINDOW = 15
#: Of what attention elsewhere was measured to take. On a busy machine it is several times that.
SLOW_PLACE_PERCENT = 1_000


def add_process(parser: argparse.ArgumentParser) -> None:
    """Options of every process."""
    add_bus(parser)
    add_secret(parser)
    add_config(parser)
    add_metrics(parser)
    add_tracing(parser)
    add_logging(parser)
    parser.add_argument(
        "--drain-s", type=float, default=20.0, help="how long to finish what runs, when stopped"
    )
    parser.add_argument(
        "--health-file", metavar="FILE", default="", help="touched every second while all is well"
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    defaults = Policy()
    group = parser.add_argument_group("policy (of a log that is empty; else the log's own is in force)")
    group.add_argument("--policy", choices=get_args(PolicyName), default=defaults.name)
    group.add_argument("--admission", choices=get_args(AdmissionName), default=defaults.admission)
    group.add_argument(
        "--fetch-replicas", type=int, default=2, help="other holders named with a fetch; 0: none"
    )
    group.add_argument(
        "--hot-transfers", type=int, default=4, help="copy a prefix that so many read at once; 0: never"
    )
    group.add_argument(
        "--move-period-s",
        type=float,
        default=1.0,
        help="how often KV of running requests may move between decode workers that lend; 0: it stays",
    )
    group.add_argument(
        "--worker-wait-s",
        type=float,
        default=30.0,
        help="how long a new request waits for a worker where a pool has none; 0: it is refused at once",
    )
    group.add_argument(
        "--mixed-choice",
        choices=get_args(MixedChoice),
        default=defaults.mixed_choice,
        help="where there are mixed workers and others: by what is predicted, mixed while they take it, or never",
    )
    group.add_argument("--ttft-slo-ms", type=int, default=defaults.ttft_slo_ns // 1_000_000)
    group.add_argument("--tbt-slo-ms", type=int, default=defaults.tbt_slo_ns // 1_000_000)


def policy_of(args: argparse.Namespace) -> Policy:
    return Policy(
        name=args.policy,
        admission=args.admission,
        ttft_slo_ns=args.ttft_slo_ms * 1_000_000,
        tbt_slo_ns=args.tbt_slo_ms * 1_000_000,
        mixed_choice=args.mixed_choice,
        fetch_replicas=args.fetch_replicas,
        hot_transfers=args.hot_transfers,
        move_period_ns=int(args.move_period_s * SECOND_NS),
        move_answer_ns=MOVE_ANSWER_NS,
        clock_step_ns_max=CLOCK_STEP_NS_MAX,
        arrival_wait_ns_max=int(args.worker_wait_s * SECOND_NS),
        pools_bound=True,
        idle_served=True,
        sources_named=True,
        slow_place_percent=SLOW_PLACE_PERCENT,
        elastic=args.elastic,
        correction_window=CORRECTION_WINDOW,
        prefill_group=args.prefill_group,
    )
